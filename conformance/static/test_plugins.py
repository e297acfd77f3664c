"""What ``lowlat doctor`` says of a framework's plugin: on, or the first thing that keeps it off."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace

import pytest

from conformance.fakes import lowlat, no_gpu  # noqa: F401
from lowlat_cli import environment, plugins
from lowlat_cli.plugins import FRAMEWORKS
from lowlat_gemm.settings import Settings

VLLM, SGLANG = FRAMEWORKS


@pytest.fixture
def installed(monkeypatch):
    """Every framework is there, and our entry point in its group."""
    monkeypatch.setattr(environment, "version", lambda distribution: "1.2")
    points = SimpleNamespace(names={"lowlat_gemm", "another"})
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return points


@pytest.mark.parametrize(
    ("framework", "settings", "environ", "said"),
    [
        (VLLM, {}, {}, "on in vLLM 1.2"),
        (VLLM, {"no_plugin": True}, {}, "off: LOWLAT_GEMM_NO_PLUGIN"),
        (VLLM, {"disabled": True}, {}, "off: LOWLAT_GEMM_DISABLE"),
        (VLLM, {}, {"VLLM_PLUGINS": "a, lowlat_gemm"}, "on in vLLM 1.2"),
        (VLLM, {}, {"VLLM_PLUGINS": "a,b"}, "off: VLLM_PLUGINS=a,b does not name lowlat_gemm"),
        (VLLM, {}, {"VLLM_PLUGINS": ""}, "off: VLLM_PLUGINS= does not name lowlat_gemm"),
        (SGLANG, {}, {"VLLM_PLUGINS": ""}, "on in SGLang 1.2"),
        (SGLANG, {}, {"SGLANG_PLUGINS": ""}, "on in SGLang 1.2"),
        (SGLANG, {}, {"SGLANG_PLUGINS": "a"}, "off: SGLANG_PLUGINS=a does not name lowlat_gemm"),
    ],
)
def test_what_is_said(installed, framework, settings, environ, said):
    assert plugins.state(framework, Settings(**settings), environ) == said


def test_a_package_that_pip_did_not_install_has_no_entry_point(installed):
    installed.names.remove("lowlat_gemm")
    assert "not installed beside vLLM 1.2" in plugins.state(VLLM, Settings(), {})


def test_a_framework_that_is_not_there(monkeypatch):
    monkeypatch.setattr(environment, "version", lambda distribution: None)
    assert plugins.state(VLLM, Settings(), {}) == "vLLM is not installed"


def test_doctor_shows_it(lowlat, no_gpu, installed, monkeypatch):  # noqa: F811
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert "vLLM plugin" in lowlat("doctor")[1]
    assert json.loads(lowlat("doctor", "--json")[1])["plugins"]["vLLM"] == "on in vLLM 1.2"
