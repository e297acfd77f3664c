"""Operand layouts that callers really have: slices of packed projections, pitches, any row stride at M = 1."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.reference import parity



def _expect(case, y, data):
    report = parity(y, data.reference(case.m, case.residual))
    assert report.ok, f"{case}: {report}"


def _residual(case, data):
    return data.residual[: case.m] if case.residual else None


@pytest.mark.one_case_per_unit
def test_x_is_a_column_slice_of_a_packed_projection(case, kernel):
    """Rows of a foreign stride; at M = 1 the slice calls itself contiguous."""
    data = operands(case.n, case.k, "random")
    x = poisoned(data.x[: case.m], pitch=case.k + 6288, offset=6144)
    _expect(case, kernel.dispatched(x, data.weight, _residual(case, data)), data)


@pytest.mark.one_case_per_unit
def test_x_ends_with_its_allocation(case, kernel):
    """The last element of the slice is the last of the storage: a read behind it is seen by conformance/sanitize.py."""
    data = operands(case.n, case.k, "random")
    storage = torch.full((case.m * (case.k + 64),), float("nan"), dtype=data.x.dtype, device="cuda")
    x = storage.view(case.m, case.k + 64)[:, 64:]
    x.copy_(data.x[: case.m])
    _expect(case, kernel(x, data.weight, _residual(case, data)), data)


@pytest.mark.one_case_per_unit
def test_every_other_row(case, kernel):
    data = operands(case.n, case.k, "random")
    storage = torch.full((2 * case.m, case.k), float("nan"), dtype=data.x.dtype, device="cuda")
    storage[::2] = data.x[: case.m]
    _expect(case, kernel(storage[::2], data.weight, _residual(case, data)), data)


@pytest.mark.one_case_per_unit(m=1)
def test_one_row_with_any_stride(case, kernel):
    """A single row's stride means nothing, 16-byte multiple or not."""
    data = operands(case.n, case.k, "random")
    x = data.x[:1].as_strided((1, case.k), (case.k + 3, 1))
    _expect(case, kernel.dispatched(x, data.weight, _residual(case, data)), data)


@pytest.mark.one_case_per_unit
def test_weight_rows_with_a_pitch(case, kernel):
    data = operands(case.n, case.k, "random")
    _expect(case, kernel(data.x[: case.m], poisoned(data.weight, case.k + 64), _residual(case, data)), data)


@pytest.mark.parametrize("gap", [1, 8])
@pytest.mark.one_case_per_unit
def test_output_rows_with_a_pitch(case, kernel, gap):
    data = operands(case.n, case.k, "random")
    out = CanaryOutput(case.m, case.n, data.x.dtype, data.x.device, pitch=case.n + gap)
    kernel(data.x[: case.m], data.weight, _residual(case, data), out.y)
    assert out.problem() is None, f"{case}: {out.problem()}"
    _expect(case, out.y, data)
