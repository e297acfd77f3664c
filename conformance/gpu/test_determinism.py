"""The same operands give the same bits: launch after launch, and, where a kernel claims it, at every M and position."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import table_cases
from conformance.harness import operands
from conformance.standing import standing_cases
from lowlat_gemm import settings, try_low_latency_gemm
from lowlat_gemm.dispatch import plan_for
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.registry import every_backend

LAUNCHES, REPLAYS = 50, 20
#: Token counts at which one token must have the same bits: on both sides of every token tile, and above the tables.
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 300)


@pytest.mark.one_case_per_unit
def test_a_thousand_launches_have_the_same_bits(case, kernel):
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m], data.residual[: case.m] if case.residual else None
    want = kernel(x, data.weight, residual)
    outputs = [torch.empty_like(want) for _ in range(LAUNCHES)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for y in outputs:
            kernel(x, data.weight, residual, y)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        for y in outputs:
            y.fill_(float("nan"))
        graph.replay()
        for y in outputs:
            different += (y != want).sum()
    assert int(different) == 0, f"{case}: {int(different)} elements of {LAUNCHES * REPLAYS} launches differ"


def _tokens_and_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(max(TOKENS), k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()


def _same_token_everywhere(run, tokens: torch.Tensor, where: str) -> None:
    """``run(x)``: a token alone, and at the first, a middle and the last place among others."""
    token, want = tokens[:1], run(tokens[:1])
    for m in TOKENS:
        for position in {0, m // 2, m - 1}:
            x = tokens[:m].clone()
            x[position] = token
            y = run(x)[position]
            assert torch.equal(y, want[0]), (
                f"{where}: M = {m}, position {position}: {int((y != want[0]).sum())} elements differ"
            )


def test_a_kernel_that_claims_it_gives_a_token_the_same_bits_at_every_m(arch):
    """A claim is the backend's ``invariance``; the unit is asked for at every M, as the dispatcher does."""
    cases = [case for case in standing_cases(arch) if not case.residual]
    claims = [case for case in cases if every_backend()[case.cell.backend].invariance(case.entry.config) is not None]
    for case in claims:
        backend, (tokens, weight) = every_backend()[case.cell.backend], _tokens_and_weight(case.n, case.k)

        def run(x):
            unit = backend.compile_unit(arch, case.n, case.k, x.shape[0], case.entry.config)
            return launch(COMPILE_CACHE.get(unit), x, weight)

        _same_token_everywhere(run, tokens, str(case))


def test_in_batch_invariant_mode_a_row_is_served_at_every_m_or_at_none(arch):
    before = settings.change(batch_invariant=True)
    try:
        for n, k in dict.fromkeys((case.n, case.k) for case in table_cases(arch)):
            tokens, weight = _tokens_and_weight(n, k)
            served = {m: try_low_latency_gemm(tokens[:m], weight) is not None for m in TOKENS}
            whole = plan_for(arch, n, k).invariant[False]
            assert set(served.values()) == {whole}, f"{n}x{k}: the plan says {whole}, served are {served}"
            if whole:
                _same_token_everywhere(lambda x: try_low_latency_gemm(x, weight), tokens, f"{n}x{k}")
    finally:
        settings.restore(before)
