"""Every cell that has a kernel, on the GPU, elementwise against FP64, from poisoned inputs into canaries."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm import try_low_latency_gemm
from lowlat_gemm.reference import parity

RERUNS = 20


def _run_poisoned(case, kernel, data):
    """The kernel's result on poisoned copies of the operands, its output checked for stray and missing writes."""
    # The pitch behind a row is poison too; one 16-byte word is the least that the contract allows.
    x = poisoned(data.x[: case.m], case.k + 8)
    residual = poisoned(data.residual[: case.m], case.n + 8) if case.residual else None
    out = CanaryOutput(case.m, case.n, data.x.dtype, data.x.device, pitch=case.n + 8)
    kernel(x, data.weight, residual, out.y)
    torch.cuda.synchronize()
    assert out.problem() is None, f"{case}: {out.problem()}"
    return out.y


@pytest.mark.judges_cells
def test_random_operands_are_within_the_bound(case, kernel, cell_result):
    data = operands(case.n, case.k, "random")
    report = parity(_run_poisoned(case, kernel, data), data.reference(case.m, case.residual))
    cell_result(case, report)
    assert report.ok, f"{case}: {report}"


def test_integer_operands_match_bit_for_bit(case, kernel):
    data = operands(case.n, case.k, "integer")
    want = data.reference(case.m, case.residual).value.to(data.x.dtype)
    got = _run_poisoned(case, kernel, data)
    wrong = (got.view(torch.int16) != want.view(torch.int16)).nonzero()
    # Exact zero is +0 in the reference; a sum of products that cancel is +0 in FP32 as well.
    assert len(wrong) == 0, f"{case}: {len(wrong)} elements differ, first {wrong[0].tolist()}"


def test_dispatcher_runs_it_and_reruns_are_bit_equal(case, kernel):
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m], data.residual[: case.m] if case.residual else None
    first = try_low_latency_gemm(x, data.weight, residual)
    assert first is not None, f"{case}: the dispatcher fell back"
    assert torch.equal(first, kernel(x, data.weight, residual)), f"{case}: the dispatcher ran something else"
    for rerun in range(RERUNS):
        again = try_low_latency_gemm(x, data.weight, residual)
        assert torch.equal(first, again), f"{case}: rerun {rerun} differs in {int((first != again).sum())} elements"
