"""The hook: model loaders are wrapped once, errors stay inside, what is left alone whole, and the one log line."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from vllm.config import DeviceConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader, register_model_loader

from conformance.vllm.conftest import LAYERS, made
from lowlat_gemm import settings
from lowlat_gemm.adapters import methods
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.operands import Reason

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")

FORMATS = model_loader._LOAD_FORMAT_TO_MODEL_LOADER


@pytest.fixture(autouse=True)
def formats():
    """vLLM's loaders, and those again afterwards."""
    before = dict(FORMATS)
    yield before
    FORMATS.clear()
    FORMATS.update(before)


@pytest.fixture
def log(caplog, monkeypatch):
    """What is logged under "lowlat_gemm" and under vLLM's name for the plugin, which does not go up to the root."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for name in ("lowlat_gemm", "vllm"):
        caplog.set_level(logging.INFO, name)
    return caplog


@pytest.fixture
def config():
    return VllmConfig(device_config=DeviceConfig(device="cpu"))


class ToyLoader(BaseModelLoader):
    """A loader of somebody else's, whose model is there already."""

    model: nn.Module

    def download_model(self, model_config):
        pass

    def load_weights(self, model, model_config):
        pass

    def load_model(self, vllm_config, model_config, prefix=""):
        return self.model


@pytest.fixture
def load(config):
    """Loads a model of all kinds of layers through a registered loader, as vLLM does."""
    register_model_loader("toy")(ToyLoader)
    ToyLoader.model = nn.ModuleDict({kind: made(kind) for kind in LAYERS})

    def load():
        loader = get_model_loader(LoadConfig(load_format="toy"))
        return loader.load_model(vllm_config=config, model_config=None)

    return load


def test_the_entry_point_is_this_function():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"lowlat_gemm": "lowlat_gemm.adapters.vllm:register"}


def test_every_loader_is_wrapped_once_by_a_subclass_of_its_name(formats, log):
    adapter.register()
    wrapped = dict(FORMATS)
    for name, loader in formats.items():
        assert issubclass(wrapped[name], loader) and wrapped[name].__name__ == loader.__name__ and wrapped[name] is not loader
    adapter.register()
    assert FORMATS == wrapped and log.text == ""


def test_a_loaded_model_has_plans(gpu, load, config, log):
    adapter.register()
    model = load()
    assert adapter.report(model).installed == LAYERS and gpu.cache.compiles == 4
    lines = [record.getMessage() for record in log.records if record.name.startswith("vllm.plugins")]
    assert lines == ["lowlat_gemm 0.1.0 in vLLM 0.33.0: 6 calls of ModuleDict go through plans, 0 left alone"]
    assert load() is model and adapter.report(model).installed == LAYERS


def test_the_line_says_why_layers_are_left_alone(load, log):
    adapter.register()
    load()
    assert "0 calls of ModuleDict go through plans, 6 left alone (6 capability not supported)" in log.text


def test_switched_off_by_the_environment(load, formats, log):
    settings.change(no_plugin=True)
    adapter.register()
    assert FORMATS["toy"] is ToyLoader and "LOWLAT_GEMM_NO_PLUGIN" in log.text


def test_registering_does_not_initialise_cuda(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    adapter.register()


# ---- errors stay inside


def broken(*args, **kwargs):
    raise RuntimeError("broken on purpose")


def untouched(model) -> bool:
    return type(model["column"].quant_method) is UnquantizedLinearMethod and adapter.report(model).installed == ()


def test_an_error_while_registering(monkeypatch, formats, log):
    monkeypatch.setattr(model_loader, "register_model_loader", broken)
    adapter.register()
    assert FORMATS == formats and "broken on purpose" in log.text and "vLLM runs without it" in log.text


BREAKS = [(methods, "device_plan"), (methods, "compile_ahead"), (methods, "planned"), (adapter, "change_compile_key"), (adapter, "summary")]


@pytest.mark.parametrize(("module", "name"), BREAKS, ids=[name for _, name in BREAKS])
def test_an_error_while_installing(gpu, load, monkeypatch, module, name, log):
    adapter.register()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        model = load()
    assert untouched(model) and "broken on purpose" in log.text


def test_an_error_in_the_middle_of_an_install_is_undone(gpu, load, monkeypatch, log):
    real, made_so_far = methods.planned, []

    def planned(method, *rest):
        made_so_far.append(method)
        return real(method, *rest) if len(made_so_far) < 3 else broken()

    monkeypatch.setattr(methods, "planned", planned)
    adapter.register()
    assert untouched(load()) and len(made_so_far) == 3 and "broken on purpose" in log.text


def test_a_kernel_that_does_not_compile_is_a_fall_back(gpu, load):
    gpu.compile_error = RuntimeError("no")
    adapter.register()
    model = load()
    from conformance.fakes import TOY_K, bf16

    x = bf16(1, TOY_K)
    y = model["column"](x)[0]
    adapter.uninstall(model)
    assert gpu.calls == [] and (y == model["column"](x)[0]).all()


def test_an_error_of_the_loader_is_the_loaders(load, monkeypatch):
    adapter.register()
    monkeypatch.setattr(ToyLoader, "load_model", broken)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        load()


# ---- models that are left alone whole


def test_lora_wraps_layers_after_loading(gpu, load, config):
    adapter.register()
    config.lora_config = SimpleNamespace()
    assert untouched(load())
    refusal = adapter.install_after_load(ToyLoader.model, config).skipped["column"]
    assert refusal.reason is Reason.LAYER and "LoRA" in refusal.detail


def test_an_additional_config_that_cannot_take_our_entry(gpu, load, config):
    adapter.register()
    config.additional_config = SimpleNamespace(compute_hash=lambda: "x")
    assert untouched(load())
    refusal = adapter.install_after_load(ToyLoader.model, config).skipped["column"]
    assert refusal.reason is Reason.LAYER and "additional_config" in refusal.detail
