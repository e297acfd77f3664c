"""Special values: NaN and infinity stay in their row and column, zeros and subnormals are what IEEE says."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import operands

pytestmark = pytest.mark.one_case_per_unit


def _zeros(case):
    return torch.zeros(case.m, case.n, dtype=torch.bfloat16, device="cuda") if case.residual else None


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_bad_weight_stays_in_its_column(case, kernel, value):
    data = operands(case.n, case.k, "random")
    weight = data.weight.clone()
    clean = kernel(data.x[: case.m], weight, _zeros(case))
    weight[case.n // 2, case.k - 1] = value
    y = kernel(data.x[: case.m], weight, _zeros(case))
    assert not torch.isfinite(y[:, case.n // 2]).any(), f"{case}: {value} in the weight is lost"
    y[:, case.n // 2] = clean[:, case.n // 2]
    assert torch.equal(y, clean), f"{case}: {value} leaked into {int((y != clean).any(0).sum())} other columns"


def test_a_bad_token_stays_in_its_row(case, kernel):
    data = operands(case.n, case.k, "random")
    x = data.x[: case.m].clone()
    clean = kernel(x, data.weight, _zeros(case))
    x[case.m - 1, 0] = float("nan")
    y = kernel(x, data.weight, _zeros(case))
    assert y[case.m - 1].isnan().all(), f"{case}: a NaN token gave numbers"
    assert torch.equal(y[: case.m - 1], clean[: case.m - 1]), f"{case}: a NaN token leaked into other rows"


@pytest.mark.one_case_per_unit(residual=True)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["nan", "inf"])
def test_a_bad_residual_stays_in_its_element(case, kernel, value):
    data = operands(case.n, case.k, "random")
    residual = data.residual[: case.m].clone()
    clean = kernel(data.x[: case.m], data.weight, residual)
    residual[case.m - 1, case.n // 2] = value
    y = kernel(data.x[: case.m], data.weight, residual)
    assert not torch.isfinite(y[case.m - 1, case.n // 2]), f"{case}: {value} in the residual is lost"
    y[case.m - 1, case.n // 2] = clean[case.m - 1, case.n // 2]
    assert torch.equal(y, clean), f"{case}: {value} leaked into {int((y != clean).sum())} other elements"


def test_zeros_and_subnormals(case, kernel):
    weight = torch.zeros(case.n, case.k, dtype=torch.bfloat16, device="cuda")
    x = torch.ones(case.m, case.k, dtype=torch.bfloat16, device="cuda")
    assert (kernel(x, weight, _zeros(case)) == 0).all(), f"{case}: zero weights"
    tiny = 2.0**-133  # the least BF16 subnormal
    weight[:, 1] = tiny
    y = kernel(x, weight, _zeros(case))
    assert (y.double() == tiny).all(), f"{case}: a subnormal product came out as {y.double().unique().tolist()[:4]}"


def test_halves_of_k_that_cancel(case, kernel):
    """Large partial sums that cancel: partials kept in BF16 would be off by whole units."""
    half = case.k // 2
    x = torch.ones(case.m, case.k, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(case.n, case.k, dtype=torch.bfloat16, device="cuda")
    weight[:, :half], weight[:, half:] = 1.0, -1.0
    weight[:, case.k - 1] = 0.0  # so that one is left over
    want = half - (case.k - half - 1)
    y = kernel(x, weight, _zeros(case))
    assert (y == want).all(), f"{case}: expected {want}, got {y.unique().tolist()[:4]}"
