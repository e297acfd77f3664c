"""What the tables do not reach of ``skinny``: every M, the residual, FP16, static K, and a first launch in a capture."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from conformance.cases import DEFAULT_SHAPES, kernel_cases
from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels import skinny
from lowlat_gemm.reference import parity



def _kernel(arch, n, k, m, config, **options):
    residual = options.get("residual", False)
    problem = skinny.why_not(arch, n, k, m, config, residual=residual)
    assert problem is None, f"N = {n}, K = {k}, M = {m}, {config}: {problem}"
    return COMPILE_CACHE.get(skinny.compile_unit(arch, n, k, m, config, **options))


def _judge(compiled, data, m, n, k, residual, where):
    out = CanaryOutput(m, n, data.x.dtype, "cuda", pitch=n + 1)
    added = poisoned(data.residual[:m], n + 5) if residual else None
    launch(compiled, poisoned(data.x[:m], k + 8), data.weight, added, out.y)
    assert out.problem() is None, f"{where}: {out.problem()}"
    report = parity(out.y, data.reference(m, residual))
    assert report.ok, f"{where}: {report}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", DEFAULT_SHAPES, ids=str)
def test_default_configs_for_every_m_with_residual(arch, shape, dtype):
    n, k = shape
    data = operands(n, k, "random", dtype=getattr(torch, dtype))
    for m in range(1, skinny.MAX_TOKENS + 1):
        config = skinny.default_config(arch, n, k, m, residual=True)
        compiled = _kernel(arch, n, k, m, config, residual=True, dtype=dtype)
        _judge(compiled, data, m, n, k, True, f"{dtype} M = {m}, N = {n}, K = {k}")


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("values", [(256, 2, 1, 4), (224, 2, 4, 8), (32, 3, 2, 2)], ids=str)
def test_static_k(arch, values, residual):
    """The public SM103 table has such a config at K = 14336; here for K that end in every way."""
    for k in (7168, 14336, 8200):
        config = skinny.SkinnyConfig(*values, static_k=k)
        for m, dtype in ((1, "bfloat16"), (2, "float16"), (5, "bfloat16")):
            data = operands(48, k, "random", dtype=getattr(torch, dtype))
            compiled = _kernel(arch, 48, k, m, config, residual=residual, dtype=dtype)
            _judge(compiled, data, m, 48, k, residual, f"static K = {k}, M = {m}, {dtype}, {values}")


def test_residual_may_be_the_output(arch):
    """y += x w.T in place: each element is read before it is written, by the same thread."""
    n, k = 1536, 7168
    data = operands(n, k, "random")
    for m in (1, 4, 16):
        compiled = _kernel(arch, n, k, m, skinny.default_config(arch, n, k, m, residual=True), residual=True)
        want = launch(compiled, data.x[:m], data.weight, data.residual[:m])
        y = data.residual[:m].clone()
        launch(compiled, data.x[:m], data.weight, y, y)
        assert torch.equal(y, want), f"M = {m}: in place differs in {int((y != want).sum())} elements"


_FIRST_LAUNCH = """
import torch
from lowlat_gemm import execute, plan_for, parse_arch
from lowlat_gemm.reference import parity, reference_gemm

plan = plan_for(parse_arch({arch!r}), {n}, {k})
execute.compile_ahead(plan.units())
x = torch.randn({m}, {k}, device="cuda").bfloat16()
w = torch.randn({n}, {k}, device="cuda").bfloat16()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = execute.try_low_latency_gemm(x, w)
assert y is not None
graph.replay()
torch.cuda.synchronize()
report = parity(y, reference_gemm(x, w))
assert report.ok, report
print("compiles", execute.COMPILE_CACHE.compiles, "loads", execute.COMPILE_CACHE.loads)
"""


def test_first_launch_in_a_capture_and_the_cache_of_another_process(arch, tmp_path, monkeypatch):
    """A fresh process compiles, then launches for the first time inside a capture; the next one loads from disk."""
    case = next(case for case in kernel_cases(arch) if not case.residual)
    code = _FIRST_LAUNCH.format(arch=arch.name, n=case.n, k=case.k, m=case.m)
    monkeypatch.setenv("LOWLAT_GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout.split())
    units = str(len(case.plan.units()))
    assert outputs == [["compiles", units, "loads", "0"], ["compiles", "0", "loads", units]]
