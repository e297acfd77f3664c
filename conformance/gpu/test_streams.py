"""Streams, CUDA graphs and programmatic dependent launch: the kernel runs when and where the caller says."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import unit_cases
from conformance.gpu.late_writer import compiled_late_writer
from conformance.harness import operands
from lowlat_gemm import execute, settings
from lowlat_gemm.kernels.compile_cache import CompileCache
from lowlat_gemm.operands import Reason

REPLAYS = 1000
LATE_WRITES = 200
LATE_BY_NS = 20_000


def _residual(case, data):
    return data.residual[: case.m].clone() if case.residual else None


def _inputs(case, count: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(case.n + case.k + case.m)
    return torch.randn(count, case.m, case.k, generator=generator, device="cuda").bfloat16()


@pytest.mark.one_case_per_unit
def test_graph_replays_follow_their_inputs(case, kernel):
    """Each replay of one captured launch equals the eager launch on the same input, bit for bit."""
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m].clone(), _residual(case, data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.dispatched(x, data.weight, residual)
    inputs = _inputs(case, 8)
    expected = [kernel(one, data.weight, residual) for one in inputs]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        x.copy_(inputs[replay % len(inputs)])
        graph.replay()
        different += (y != expected[replay % len(inputs)]).sum()
    assert int(different) == 0, f"{case}: {int(different)} elements of {REPLAYS} replays differ from eager launches"


@pytest.mark.one_case_per_unit
def test_side_stream_orders_the_launch(case, kernel):
    """sleep, write x, our GEMM, read y, all on a side stream without a synchronisation between."""
    data = operands(case.n, case.k, "random")
    residual, new = _residual(case, data), _inputs(case, 1)[0]
    want = kernel(new, data.weight, residual)
    x = torch.full_like(new, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.copy_(new)
        y = kernel(x, data.weight, residual)
        result = y.clone()
    stream.synchronize()
    assert torch.equal(result, want), f"{case}: {int((result != want).sum())} elements differ on a side stream"


@pytest.mark.one_case_per_unit
def test_waits_for_a_predecessor_that_triggers_early_and_writes_late(case, kernel, arch):
    """x comes from a kernel that let its dependents start 20 us before it writes; each time another x."""
    data = operands(case.n, case.k, "random")
    residual, inputs = _residual(case, data), _inputs(case, 4)
    expected = [kernel(one, data.weight, residual) for one in inputs]
    writer = compiled_late_writer(arch.compile_target)
    x = torch.full_like(inputs[0], float("nan"))
    words, sources = x.view(torch.int32).flatten(), [one.view(torch.int32).flatten() for one in inputs]
    stream = torch.cuda.current_stream().cuda_stream
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    y = torch.empty_like(expected[0])
    for i in range(LATE_WRITES):
        writer(sources[i % 4], words, LATE_BY_NS, stream)
        kernel(x, data.weight, residual, y)
        different += (y != expected[i % 4]).sum()
    assert int(different) == 0, f"{case}: {int(different)} elements of {LATE_WRITES} launches saw an old x"


@pytest.mark.one_case_per_unit(residual=True)
def test_residual_may_come_late_too(case, kernel, arch):
    data = operands(case.n, case.k, "random")
    x, want = data.x[: case.m], kernel(data.x[: case.m], data.weight, data.residual[: case.m])
    residual = torch.full_like(want, float("nan"))
    writer = compiled_late_writer(arch.compile_target)
    source = data.residual[: case.m].contiguous().view(torch.int32).flatten()
    for i in range(LATE_WRITES):
        writer(source, residual.view(torch.int32).flatten(), LATE_BY_NS, torch.cuda.current_stream().cuda_stream)
        y = kernel(x, data.weight, residual)
        assert torch.equal(y, want), f"{case}: launch {i} saw an old residual"
        residual.fill_(float("nan"))


def test_nothing_compiles_during_capture(arch, monkeypatch):
    """A kernel that was not compiled before capture falls back there, or raises in strict mode."""
    case = unit_cases(arch)[0]
    cache = CompileCache(execute._make)
    monkeypatch.setattr(execute, "COMPILE_CACHE", cache)
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m], _residual(case, data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = execute.run_or_refuse(x, data.weight, residual)
        before = settings.change(strict=True)
        try:
            with pytest.raises(execute.NotCompiledError, match="before its launch"):
                execute.run_or_refuse(x, data.weight, residual)
        finally:
            settings.restore(before)
        x + 1  # an empty graph cannot be captured
    assert result.reason is Reason.CAPTURE, f"{case}: {result}"
    assert cache.late == 2, f"{case}: {cache.late} launches counted as too early"
    assert cache.compiles == 0, f"{case}: {cache.compiles} compiles during capture"
