"""GEMMs that feed one another, all with programmatic dependent launch: each waits for the one before."""

from __future__ import annotations

import itertools

import pytest
import torch

from conformance.standing import standing_case
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.registry import every_backend
from lowlat_gemm.reference import parity, reference_gemm

#: (N, K): N of one is K of the next, and the last one closes the circle.
CIRCLE = [(1536, 7168), (2304, 1536), (7168, 2304)]
TURNS, REPLAYS = 4, 100


def _kernels(arch, names, m):
    cases = [standing_case(name, arch, n, k, m, False) for name, (n, k) in zip(names, CIRCLE)]
    return None if None in cases else [COMPILE_CACHE.get(case.entry.unit) for case in cases]


@pytest.mark.parametrize("m", [1, 8, 16])
def test_a_circle_of_kernels_gives_what_single_launches_give(arch, m):
    """Every order of the kernels that are written, also mixed. Weights are scaled so that values keep their size."""
    weights = [torch.randn(n, k, device="cuda").div_(k**0.5).bfloat16() for n, k in CIRCLE]
    start = torch.randn(m, CIRCLE[0][1], device="cuda").bfloat16()
    chains = 0
    for names in itertools.product(every_backend(), repeat=len(CIRCLE)):
        kernels = _kernels(arch, names, m)
        if kernels is None:
            continue
        chains += 1
        steps = list(zip(kernels, weights)) * TURNS
        want = start
        for kernel, weight in steps:
            torch.cuda.synchronize()
            want, before = launch(kernel, want, weight), want
            torch.cuda.synchronize()
        report = parity(want, reference_gemm(before, weights[-1]))
        assert report.ok, f"{names}: {report}"
        buffers = [torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda") for n, _ in CIRCLE]
        x, graph = start.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for i, (kernel, weight) in enumerate(steps):
                y = launch(kernel, y, weight, None, buffers[i % len(CIRCLE)])
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPLAYS):
            for buffer in buffers:
                buffer.fill_(float("nan"))
            graph.replay()
            different += (buffers[-1] != want).sum()
        assert int(different) == 0, f"{names} at M = {m}: {int(different)} elements differ over {REPLAYS} replays"
    assert chains, f"no kernel of {', '.join(every_backend())} serves the circle on {arch}"
