"""Captured graphs next to one another: shared pools, captures made again and again, eager calls between replays, and
weights that change under a graph."""

from __future__ import annotations

import gc

import pytest
import torch

from conformance.harness import operands

ROUNDS = 50
RECAPTURES = 100
CAPTURES_BEFORE = 10
RELOADS = 100


def _residual(case, data):
    return data.residual[: case.m] if case.residual else None


@pytest.mark.one_case_per_unit
def test_two_graphs_in_one_pool_with_transient_tensors_between(case, kernel):
    """Replayed in turns, an eager call between: each equals the eager result, so nothing of ours lives in a pool."""
    data = operands(case.n, case.k, "random")
    residual, inputs = _residual(case, data), [data.x[: case.m].clone(), data.x[: case.m].flip(0).contiguous() * 2]
    expected = [kernel(x, data.weight, residual) for x in inputs]
    graphs, outputs, pool = [], [], None
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            scratch = x.float() * 3
            outputs.append(kernel(x, data.weight, residual) + 0)
            del scratch
        pool = graph.pool()
        graphs.append(graph)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(ROUNDS):
        for graph, y, want in zip(graphs, outputs, expected):
            graph.replay()
            different += (y != want).sum()
            different += (kernel(inputs[0], data.weight, residual) != expected[0]).sum()
    assert int(different) == 0, f"{case}: {int(different)} elements differ over {ROUNDS} rounds of two graphs"


def test_memory_is_flat_over_captures_made_again(arch):
    from conformance.standing import standing_cases
    from lowlat_gemm.execute import COMPILE_CACHE, launch

    cases = [case for case in standing_cases(arch) if case.m == 16]
    assert cases
    for case in cases:
        data, compiled = operands(case.n, case.k, "random"), COMPILE_CACHE.get(case.entry.unit)
        used = []
        for turn in range(CAPTURES_BEFORE + RECAPTURES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = launch(compiled, data.x[: case.m], data.weight)
            graph.replay()
            torch.cuda.synchronize()
            del graph, y
            if turn in (CAPTURES_BEFORE - 1, CAPTURES_BEFORE + RECAPTURES - 1):
                gc.collect()
                torch.cuda.empty_cache()
                used.append(torch.cuda.memory_allocated())
        assert used[0] == used[1], f"{case}: {used[1] - used[0]} bytes more after {RECAPTURES} captures"


@pytest.mark.one_case_per_unit
def test_a_captured_launch_is_in_the_graph_and_reads_the_weight_of_the_moment(case, kernel):
    """A weight that is copied over in place: replays and eager calls see the new one, without a new capture."""
    data = operands(case.n, case.k, "random")
    x, residual, weight = data.x[: case.m], _residual(case, data), data.weight.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(x, weight, residual)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, kernel(x, data.weight, residual)), f"{case}: the launch is not in the graph"
    new = data.weight.flip(0).contiguous()
    want = kernel(x, new, residual)
    weight.copy_(new)
    torch.cuda.synchronize()
    graph.replay()
    assert torch.equal(y, want), f"{case}: a replay used {int((y != want).sum())} elements of the old weight"
    assert torch.equal(kernel(x, weight, residual), want), f"{case}: an eager call used the old weight"


@pytest.mark.one_case_per_unit(m=1)
def test_a_weight_written_by_the_kernel_before_in_the_stream(case, kernel):
    """Weights are read before the PDL wait. A predecessor that does not let its dependents start early (a copy of
    torch's) has ended by then; one that does must not write weights (docs/weights.md)."""
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m], _residual(case, data)
    sources = [data.weight, data.weight.flip(0).contiguous()]
    expected = [kernel(x, source, residual) for source in sources]
    weight = torch.full_like(data.weight, float("nan"))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(RELOADS):
        weight.copy_(sources[i % 2])
        different += (kernel(x, weight, residual) != expected[i % 2]).sum()
    assert int(different) == 0, f"{case}: {int(different)} elements of {RELOADS} launches saw an old weight"
