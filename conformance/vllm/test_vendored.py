"""The vLLM adapter of a copy under another name: its hook, its report, its operator; and beside an installed original."""

from __future__ import annotations

import importlib
import shutil
import sys

import pytest
from torch import nn
from vllm.config import DeviceConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, register_model_loader

from conformance.fakes import PACKAGE
from conformance.vllm.conftest import LAYERS, made
from conformance.vllm.test_plugin import FORMATS, ToyLoader, formats  # noqa: F401
from lowlat_gemm.adapters import vllm as original

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    target = tmp_path / "thirdparty" / "fast_gemm"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("thirdparty.fast_gemm.adapters.vllm")
    for name in [name for name in sys.modules if name.split(".")[0] == "thirdparty"]:
        del sys.modules[name]


def test_its_hook_and_report(adapter):
    register_model_loader("toy")(ToyLoader)
    adapter.register()
    assert FORMATS["toy"].__module__ == "thirdparty.fast_gemm.adapters.vllm"
    original.register()  # the first one stays: a model is installed into once
    assert FORMATS["toy"].__module__ == "thirdparty.fast_gemm.adapters.vllm"
    ToyLoader.model = nn.ModuleDict({kind: made(kind) for kind in LAYERS})
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    model = get_model_loader(LoadConfig(load_format="toy")).load_model(vllm_config=config, model_config=None)
    assert tuple(adapter.report(model).skipped) == LAYERS
    adapter.change_compile_key(config, adapter.InstallReport(("a",)))
    assert set(config.additional_config) == {"thirdparty.fast_gemm"}
