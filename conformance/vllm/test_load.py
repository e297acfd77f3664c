"""The entry point, installed by pip, through a real model load; and the ways to leave it out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path.cwd()  # pytest's root, with and without Bazel
INSTALLED = ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj", "lm_head")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the package installed by pip, entry point and all."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("lowlat_gemm", "tools/lowlat_cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", target, source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def load(folder: Path, site: Path, *arguments: str, **environ: str) -> tuple[dict, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOWLAT_", "VLLM_", "PYTHON"))}
    path = os.pathsep.join(map(str, (site, ROOT)))  # the installed package goes first
    result = subprocess.run(
        [sys.executable, "-m", "conformance.vllm.load_model", folder, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HOME": str(folder)} | environ,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr


def test_a_model_that_vllm_loads_has_plans(tmp_path, site):
    answer, log = load(tmp_path, site)
    assert answer["registered"] and tuple(answer["installed"]) == INSTALLED, answer
    assert answer["skipped"] == {
        f"model.layers.{layer}.{name}": "shape not in table"
        for layer in (0, 1)
        for name in ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert answer["compiles"] == 2 and answer["key_changed"]
    assert answer["right"] and answer["logits_right"] and answer["launches"] == 2
    assert log.count("calls of LlamaForCausalLM go through plans") == 1, log
    assert "already registered" not in log


def test_an_adapter_that_breaks_leaves_vllm_running(tmp_path, site):
    answer, log = load(tmp_path, site, "fail")
    assert answer["registered"] and answer["installed"] == [] and not answer["key_changed"]
    assert answer["right"] and answer["logits_right"] and answer["launches"] == 0
    assert "broken on purpose" in log


def test_switched_off(tmp_path, site):
    answer, log = load(tmp_path, site, LOWLAT_GEMM_NO_PLUGIN="1")
    assert answer["registered"] and answer["installed"] == [] and not answer["key_changed"]
    assert answer["right"] and answer["launches"] == 0 and "go through plans" not in log


def test_doctor_finds_the_entry_point_that_pip_installed(tmp_path, site):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOWLAT_", "VLLM_", "PYTHON"))}
    result = subprocess.run(
        [sys.executable, "-m", "lowlat_cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"},
        timeout=300,
    )
    assert json.loads(result.stdout)["plugins"]["vLLM"] == "on in vLLM 0.33.0", result.stdout + result.stderr
