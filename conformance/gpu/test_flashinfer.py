"""FlashInfer's kernels as the backend prepares and launches them; where it is not installed, that this is said."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import launch
from lowlat_gemm.kernels import flashinfer, flashinfer_kernel
from lowlat_gemm.kernels.flashinfer import FlashInferConfig, compile_unit, why_not
from lowlat_gemm.reference import parity

#: Kernels with FP32 sums; the libraries may round between splits of K.
CONFIGS = [FlashInferConfig("tinygemm"), FlashInferConfig("cutile"), FlashInferConfig("cute-dsl"), FlashInferConfig("cute-dsl", "autotuned")]
SHAPES = [(1536, 7168), (1536, 128), (2112, 7168), (48, 1024)]
TOKENS = (1, 2, 3, 8, 16, 17, 32)


def _prepared(arch, n, k, m, config):
    """The kernel; None where FlashInfer does not serve it here, which it then says."""
    unit = compile_unit(arch, n, k, m, config)
    if config.kernel not in flashinfer.kernels_on(arch):
        assert f"does not serve {arch}" in why_not(arch, n, k, m, config)
        return None
    assert why_not(arch, n, k, m, config) is None, f"{config} {n}x{k} M = {m}: {why_not(arch, n, k, m, config)}"
    if flashinfer.installed_version() is None:
        with pytest.raises(ImportError, match="flashinfer"):
            flashinfer_kernel.prepare(unit)
        return None
    assert flashinfer.unavailable(arch) is None, flashinfer.unavailable(arch)
    return flashinfer_kernel.prepare(unit)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kernel}-{config.tactic}")
def test_it_computes_the_gemm(arch, config):
    for n, k in SHAPES:
        for m in TOKENS:
            kernel = _prepared(arch, n, k, m, config)
            if kernel is None:
                break
            for kind in ("random", "integer"):
                data = operands(n, k, kind)
                out = CanaryOutput(m, n, torch.bfloat16, "cuda")
                launch(kernel, poisoned(data.x[:m]), data.weight, None, out.y)
                where = f"{config} {n}x{k} M = {m} {kind}"
                assert out.problem() is None, f"{where}: {out.problem()}"
                report = parity(out.y, data.reference(m, False))
                assert report.ok, f"{where}: {report}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kernel}-{config.tactic}")
def test_a_prepared_kernel_is_captured_and_replayed_with_other_inputs(arch, config):
    n, k, m = 1536, 7168, 4
    kernel = _prepared(arch, n, k, m, config)
    if kernel is None:
        return
    first, second = operands(n, k, "random"), operands(n, k, "integer")
    x, weight = first.x[:m].clone(), first.weight.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(kernel, x, weight)
    for data in (second, first, second):
        x.copy_(data.x[:m])
        weight.copy_(data.weight)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        report = parity(y, data.reference(m, False))
        assert report.ok, f"{config}: {report}"
