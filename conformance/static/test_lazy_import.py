"""Importing the package costs nothing: no torch, no cutlass."""

from __future__ import annotations

import importlib

import pytest

import lowlat_gemm
from conformance.fakes import PACKAGE, run_python

LIGHT = [
    "lowlat_gemm",
    "lowlat_gemm.arch",
    "lowlat_gemm.adapters",
    "lowlat_gemm.backends",
    "lowlat_gemm.dispatch",
    "lowlat_gemm.kda_branches",
    "lowlat_gemm.kernels.compile_cache",
    "lowlat_gemm.kernels.registry",
    "lowlat_gemm.kernels.skinny",
    "lowlat_gemm.models",
    "lowlat_gemm.operands",
    "lowlat_gemm.reference",
    "lowlat_gemm.settings",
    "lowlat_gemm.tables",
]
HEAVY = ("torch", "cutlass", "numpy", "tvm_ffi", "cuda", "typer", "rich")

IMPORT_EACH = """\
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
    found = sorted(set(sys.argv[2].split(",")) & set(sys.modules))
    assert not found, f"importing {name} imported {found}"
"""


def test_importing_loads_neither_torch_nor_cutlass(tmp_path):
    result = run_python("-c", IMPORT_EACH, ",".join(LIGHT), ",".join(HEAVY), folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_deciding_loads_neither(tmp_path):
    code = """\
import sys, lowlat_gemm
assert lowlat_gemm.select_kimi_k3_backend(1, 1536, 7168, arch="sm90") is not None
assert lowlat_gemm.explain(1, 1536, 7168, arch="sm90").backend is not None
assert lowlat_gemm.plan_for(lowlat_gemm.parse_arch("sm103"), 3072, 7168).units()
assert not {"torch", "cutlass"} & set(sys.modules), "a decision imported torch or cutlass"
"""
    result = run_python("-c", code, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_deciding_works_without_torch_and_cutlass(tmp_path):
    code = """\
import lowlat_gemm
print(lowlat_gemm.select_kimi_k3_backend(1, 3072, 7168), lowlat_gemm.explain(1, 3072, 7168).refusal)
try:
    lowlat_gemm.try_low_latency_gemm
except ImportError as error:
    print(error.name)
"""
    result = run_python("-c", code, folder=tmp_path, hide=("torch", "cutlass", "tvm_ffi"))
    assert result.returncode == 0, result.stderr
    decided, name = result.stdout.splitlines()
    assert decided == "skinny backend unavailable: not installed: nvidia-cutlass-dsl, apache-tvm-ffi" and name == "torch"


@pytest.mark.parametrize("name", lowlat_gemm.__all__)
def test_every_public_name_resolves_to_what_its_module_has(name):
    value = getattr(lowlat_gemm, name)
    module = lowlat_gemm._WHERE.get(name)
    assert module is None or value is getattr(importlib.import_module(f"lowlat_gemm.{module}"), name)
    assert name in dir(lowlat_gemm)


def test_the_public_surface_of_the_specification_is_there():
    wanted = {"select_kimi_k3_backend", "try_low_latency_gemm", "enable_low_latency_gemm", "explain", "Arch", "Reason"}
    wanted |= {"Projection", "PreparedProjection", "compile_projection", "matrix_view", "weight_map"}
    wanted |= {"request_low_latency_warmup", "enable_kimi_k3_low_latency_gemm"}
    wanted |= {"run_kda_projection_overlap", "autotune_kda_qkvg"}
    assert wanted <= set(lowlat_gemm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'lowlat_gemm' has no attribute 'fast_gemm'"):
        lowlat_gemm.fast_gemm
    with pytest.raises(ImportError, match="fast_gemm"):
        from lowlat_gemm import fast_gemm  # noqa: F401
