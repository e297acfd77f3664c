"""FlashInfer's kernels as the backend prepares and launches them; where it is not installed, that this is said.

A test of a kernel is there where FlashInfer is: elsewhere it would pass without having run anything.
"""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.arch import parse_arch
from lowlat_gemm.execute import launch
from lowlat_gemm.kernels import flashinfer, flashinfer_kernel
from lowlat_gemm.kernels.flashinfer import FlashInferConfig, compile_unit, why_not
from lowlat_gemm.reference import parity

#: Kernels with FP32 sums; the libraries may round between splits of K.
CONFIGS = [FlashInferConfig("tinygemm"), FlashInferConfig("cutile"), FlashInferConfig("cute-dsl"), FlashInferConfig("cute-dsl", "autotuned")]
SHAPES = [(1536, 7168), (1536, 128), (2112, 7168), (48, 1024)]
TOKENS = (1, 2, 3, 8, 16, 17, 32)


def _name(config: FlashInferConfig) -> str:
    return f"{config.kernel}-{config.tactic}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``served``: the configs that FlashInfer has on --arch."""
    if "served" in metafunc.fixturenames:
        name = metafunc.config.getoption("--arch")
        there = [one for one in CONFIGS if name and one.kernel in flashinfer.kernels_on(parse_arch(name))]
        metafunc.parametrize("served", there, ids=_name)


def _prepared(arch, n, k, m, config):
    assert why_not(arch, n, k, m, config) is None, f"{config} {n}x{k} M = {m}: {why_not(arch, n, k, m, config)}"
    assert flashinfer.unavailable(arch) is None, flashinfer.unavailable(arch)
    return flashinfer_kernel.prepare(compile_unit(arch, n, k, m, config))


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_where_it_cannot_serve_it_says_why(arch, config):
    if config.kernel not in flashinfer.kernels_on(arch):
        assert f"does not serve {arch}" in why_not(arch, 1536, 7168, 1, config)
    elif flashinfer.installed_version() is None:
        with pytest.raises(ImportError, match="flashinfer"):
            flashinfer_kernel.prepare(compile_unit(arch, 1536, 7168, 1, config))
    else:
        assert why_not(arch, 1536, 7168, 1, config) is None


if flashinfer.installed_version() is not None:

    def test_it_computes_the_gemm(arch, served):
        for n, k in SHAPES:
            for m in TOKENS:
                kernel = _prepared(arch, n, k, m, served)
                for kind in ("random", "integer"):
                    data = operands(n, k, kind)
                    out = CanaryOutput(m, n, torch.bfloat16, "cuda")
                    launch(kernel, poisoned(data.x[:m]), data.weight, None, out.y)
                    where = f"{served} {n}x{k} M = {m} {kind}"
                    assert out.problem() is None, f"{where}: {out.problem()}"
                    report = parity(out.y, data.reference(m, False))
                    assert report.ok, f"{where}: {report}"

    def test_a_prepared_kernel_is_captured_and_replayed_with_other_inputs(arch, served):
        n, k, m = 1536, 7168, 4
        kernel = _prepared(arch, n, k, m, served)
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
            assert report.ok, f"{served}: {report}"
