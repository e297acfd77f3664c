"""Corners of the contract on the device: no token at all, a residual that is the output, a zero input, large partial
sums that cancel, infinities and signs of zero, and every GPU of the machine."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import SPLIT_K_CONFIGS, kernel_cases
from conformance.harness import CanaryOutput, operands
from conformance.standing import standing_case
from lowlat_gemm import execute, try_low_latency_gemm
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels import split_k
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import error_bound, parity, reference_gemm


def _residual(case, data):
    return data.residual[: case.m] if case.residual else None


def test_no_token_launches_nothing_and_leaves_no_error(arch):
    """An empty slice of a packed buffer, three dimensions, a residual, and in a capture: a refusal each, no sticky error."""
    case = next(case for case in kernel_cases(arch) if not case.residual)
    data = operands(case.n, case.k, "random")
    packed = torch.zeros(5, case.k, dtype=torch.bfloat16, device="cuda")
    empty = packed[5:5]

    def refused(x, weight=data.weight, residual=None) -> Reason:
        result = execute.run_or_refuse(x, weight, residual)
        assert isinstance(result, Refusal), f"{tuple(x.shape)}: {result}"
        return result.reason

    assert refused(empty) is Reason.TOKENS
    for other in [case for case in kernel_cases(arch) if case.residual][:1]:
        weight, residual = operands(other.n, other.k, "random").weight, empty.new_empty(0, other.n)
        assert refused(empty.new_empty(0, other.k), weight, residual) is Reason.TOKENS
    assert refused(empty.view(0, 1, case.k)) is Reason.RANK
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert refused(empty) is Reason.TOKENS
        y = packed + 1  # an empty graph cannot be captured
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 1).all() and try_low_latency_gemm(data.x[: case.m], data.weight) is not None


@pytest.mark.one_case_per_unit(residual=True)
def test_the_residual_may_be_the_output(case, kernel):
    """y += x w.T in place: each element of the residual is read before it is written."""
    data = operands(case.n, case.k, "random")
    want = kernel(data.x[: case.m], data.weight, data.residual[: case.m])
    out = CanaryOutput(case.m, case.n, torch.bfloat16, "cuda", pitch=case.n + 8)
    out.y.copy_(data.residual[: case.m])
    kernel(data.x[: case.m], data.weight, out.y, out.y)
    assert out.problem() is None, f"{case}: {out.problem()}"
    assert torch.equal(out.y, want), f"{case}: in place differs in {int((out.y != want).sum())} elements"


@pytest.mark.one_case_per_unit(residual=True)
def test_a_zero_input_gives_the_residual(case, kernel):
    """Once: a residual that is added by every split, or not by the last one, is off by whole units."""
    data = operands(case.n, case.k, "random")
    y = kernel(torch.zeros_like(data.x[: case.m]), data.weight, data.residual[: case.m])
    assert torch.equal(y, data.residual[: case.m]), (
        f"{case}: {int((y != data.residual[: case.m]).sum())} elements differ"
    )


def test_each_split_adds_the_residual_once(arch):
    for config in SPLIT_K_CONFIGS:
        if split_k.why_not(arch, 1536, 7168, 1, config, residual=True) is not None:
            continue
        kernel = COMPILE_CACHE.get(split_k.compile_unit(arch, 1536, 7168, 1, config, residual=True))
        x = torch.zeros(16, 7168, dtype=torch.bfloat16, device="cuda")
        ones = torch.ones(16, 1536, dtype=torch.bfloat16, device="cuda")
        y = launch(kernel, x, torch.randn(1536, 7168, device="cuda").bfloat16(), ones)
        assert torch.equal(y, ones), f"split {config.split}: {y.unique().tolist()[:4]}"


@pytest.mark.one_case_per_unit
def test_halves_of_k_that_cancel_to_small_values(case, kernel):
    """Partial sums of about a thousand that cancel to about one, against FP64: kept in BF16 they would be wrong."""
    half = case.k // 2
    data = operands(case.n, case.k, "random")
    x = data.x[: case.m].clone()
    x[:, half : 2 * half] = x[:, :half]
    weight = data.weight * 16
    weight[:, half : 2 * half] = -weight[:, :half]
    weight[:, 0] += 1
    residual = torch.zeros_like(data.residual[: case.m]) if case.residual else None
    reference = reference_gemm(x, weight, residual)
    # BF16 has steps of 4 and more where the partial sums are: a rounded one that falls to the other side is seen.
    assert float(error_bound(reference, x.dtype).max()) < 3, "the bound would let BF16 partial sums pass"
    report = parity(kernel(x, weight, residual), reference)
    assert report.ok, f"{case}: {report}"


@pytest.mark.one_case_per_unit
def test_an_infinite_token_stays_in_its_row(case, kernel):
    data = operands(case.n, case.k, "random")
    x, residual = data.x[: case.m].clone(), _residual(case, data)
    clean = kernel(x, data.weight, residual)
    x[0, case.k - 1] = float("inf")
    y = kernel(x, data.weight, residual)
    want = torch.where(data.weight[:, -1] == 0, float("nan"), data.weight[:, -1].sign() * float("inf"))
    assert torch.equal(y[0].isnan(), want.isnan()) and torch.equal(y[0].nan_to_num(), want.bfloat16().nan_to_num()), (
        str(case)
    )
    assert torch.equal(y[1:], clean[1:]), f"{case}: an infinite token leaked into other rows"


@pytest.mark.one_case_per_unit
def test_zeros_of_either_sign_are_zeros(case, kernel):
    x = torch.full((case.m, case.k), -0.0, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(case.n, case.k, dtype=torch.bfloat16, device="cuda")
    residual = torch.zeros(case.m, case.n, dtype=torch.bfloat16, device="cuda") if case.residual else None
    y = kernel(x, weight, residual)
    assert (y == 0).all(), f"{case}: {y.unique().tolist()[:4]}"


def test_every_gpu_of_the_machine_runs_its_own_launches(arch):
    """The tensors' device counts, not the current one; where there are two GPUs, each with the other one current."""
    count = torch.cuda.device_count()
    for ordinal in range(count):
        case = standing_case("skinny", arch, 2304, 1536, 4, False)
        device = torch.device("cuda", ordinal)
        x = torch.randn(case.m, case.k, device=device).bfloat16()
        weight = torch.randn(case.n, case.k, device=device).bfloat16()
        with torch.cuda.device((ordinal + 1) % count):
            y = launch(COMPILE_CACHE.get(case.entry.unit), x, weight)
            torch.cuda.synchronize(device)
        report = parity(y, reference_gemm(x, weight))
        assert y.device == device and report.ok, f"cuda:{ordinal} of {count}: {report}"
