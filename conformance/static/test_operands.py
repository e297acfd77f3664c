"""The operand contract: every refusal by an input of its own, the layouts that models really have, and a property."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.fakes import bf16
from lowlat_gemm.operands import ALIGNMENT_BYTES, Reason, Refusal, check_operands, check_weight

K, N = 32, 48


def zeros(*shape, dtype=torch.bfloat16, device=None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def view(shape, strides, offset=0, dtype=torch.bfloat16) -> torch.Tensor:
    """A view of these strides on a storage that is large enough; torch aligns the storage to 64 bytes."""
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides) if extent > 0)
    return zeros(offset + max(last, 0) + 1, dtype=dtype).as_strided(shape, strides, offset)


W = zeros(N, K)

# name -> x, weight, residual, reason (None: served), what the detail must say
CASES = {
    "packed": (zeros(4, K), W, None, None, ""),
    "one row": (zeros(1, K), W, None, None, ""),
    "no row": (zeros(0, K), W, None, None, ""),
    "with residual": (zeros(4, K), W, zeros(4, N), None, ""),
    "fp16 all over": (zeros(2, K, dtype=torch.float16), zeros(N, K, dtype=torch.float16), None, None, ""),
    "on another device": (zeros(2, K, device="meta"), zeros(N, K, device="meta"), None, None, ""),
    # x
    "x 1-D": (zeros(K), W, None, Reason.RANK, "1 dimensions"),
    "x 3-D": (zeros(2, 2, K), W, None, Reason.RANK, "3 dimensions"),
    "x 0-D": (zeros(()), W, None, Reason.RANK, "0 dimensions"),
    "x shorter": (zeros(4, K - 8), W, None, Reason.K_MISMATCH, f"K = {K - 8}, weight has K = {K}"),
    "x fp32": (zeros(4, K, dtype=torch.float32), W, None, Reason.DTYPE, "float32"),
    "x elsewhere": (zeros(4, K, device="meta"), W, None, Reason.DEVICE_MISMATCH, "meta"),
    "x transposed": (zeros(K, 4).t(), W, None, Reason.INNER_STRIDE, "(1, 4)"),
    "x every second column": (zeros(4, 2 * K)[:, ::2], W, None, Reason.INNER_STRIDE, "2"),
    "one row, every second column": (zeros(1, 2 * K)[:, ::2], W, None, Reason.INNER_STRIDE, "2"),
    "x odd pitch": (zeros(4, K + 4)[:, :K], W, None, Reason.ROW_STRIDE, f"{K + 4}"),
    "x expanded": (zeros(1, K).expand(4, K), W, None, Reason.ROW_STRIDE, "0"),
    "x overlapping": (view((4, K), (8, 1)), W, None, Reason.ROW_STRIDE, "8"),
    "x misaligned": (zeros(1, 2 * K)[:, 1 : K + 1], W, None, Reason.ALIGNMENT, "x starts 2 bytes"),
    "x half aligned": (zeros(4, 2 * K)[:, 4 : K + 4], W, None, Reason.ALIGNMENT, "x starts 8 bytes"),
    # weight
    "weight 1-D": (zeros(4, K), zeros(K), None, Reason.WEIGHT_LAYOUT, "1 dimensions"),
    "weight 3-D": (zeros(4, K), zeros(1, N, K), None, Reason.WEIGHT_LAYOUT, "3 dimensions"),
    "weight transposed": (zeros(4, K), zeros(K, N).t(), None, Reason.WEIGHT_LAYOUT, f"(1, {N})"),
    "weight odd pitch": (zeros(4, K), zeros(N, K + 4)[:, :K], None, Reason.WEIGHT_LAYOUT, f"{K + 4}"),
    "weight pitched": (zeros(4, K), zeros(N, K + 64)[:, :K], None, Reason.WEIGHT_LAYOUT, f"{K + 64}"),
    "weight expanded": (zeros(4, K), zeros(1, K).expand(N, K), None, Reason.WEIGHT_LAYOUT, "0"),
    "weight misaligned": (zeros(4, K), zeros(N * K + 8)[4 : N * K + 4].view(N, K), None, Reason.ALIGNMENT, "weight starts 8 bytes"),
    "weight fp16": (zeros(4, K), zeros(N, K, dtype=torch.float16), None, Reason.DTYPE, "float16"),
    # residual
    "residual of one row": (zeros(4, K), W, zeros(1, N), Reason.RESIDUAL_LAYOUT, f"(1, {N})"),
    "residual too wide": (zeros(4, K), W, zeros(4, N + 8), Reason.RESIDUAL_LAYOUT, f"(4, {N + 8})"),
    "residual 1-D": (zeros(1, K), W, zeros(N), Reason.RESIDUAL_LAYOUT, f"({N},)"),
    "residual fp32": (zeros(4, K), W, zeros(4, N, dtype=torch.float32), Reason.DTYPE, "residual"),
    "residual elsewhere": (zeros(4, K), W, zeros(4, N, device="meta"), Reason.DEVICE_MISMATCH, "residual"),
    "residual pitched": (zeros(4, K), W, zeros(4, N + 8)[:, :N], None, ""),
    "residual odd pitch": (zeros(4, K), W, zeros(4, N + 1)[:, :N], Reason.RESIDUAL_LAYOUT, f"{N + 1}"),
    "residual transposed": (zeros(4, K), W, zeros(N, 4).t(), Reason.RESIDUAL_LAYOUT, "(1, 4)"),
    "residual expanded": (zeros(4, K), W, zeros(1, N).expand(4, N), Reason.RESIDUAL_LAYOUT, "0"),
    "residual misaligned": (zeros(1, K), W, zeros(1, 2 * N)[:, 4 : N + 4], Reason.ALIGNMENT, "residual starts 8 bytes"),
    "residual row of odd pitch": (zeros(1, K), W, zeros(4, N + 1)[:1, :N], None, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_each_reason_by_an_input_of_its_own(name):
    x, weight, residual, reason, detail = CASES[name]
    found = check_operands(x, weight, residual)
    if reason is None:
        assert found is None
    else:
        assert found is not None and (found.reason, detail in found.detail) == (reason, True), str(found)


F_B = zeros(1536, 128)


@pytest.mark.parametrize("m", [1, 4, 16])
def test_the_input_of_f_b_is_a_slice_of_the_packed_result(m):
    x = zeros(m, 6288)[:, 6144:6272]  # 6288 = 786 * 8, and so is where it starts
    assert check_operands(x, F_B) is None
    assert (m == 1) == x.is_contiguous()  # which is why nothing is decided on that


def test_a_row_of_a_slice_has_a_foreign_stride_that_does_not_matter():
    weight = zeros(64, 1536)
    assert check_operands(zeros(1, 2112)[:, :1536], weight) is None
    assert check_operands(zeros(1, 2113)[:, :1536], weight) is None  # an odd stride of one row
    refusal = check_operands(zeros(2, 2113)[:, :1536], weight)
    assert refusal is not None and refusal.reason is Reason.ROW_STRIDE


def test_every_second_row_is_a_pitch():
    assert check_operands(zeros(8, K)[::2], W) is None


def test_where_a_row_of_odd_pitch_starts_decides():
    rows = zeros(9, 129)[:, :128]
    served = [check_operands(rows[i : i + 1], F_B) is None for i in range(9)]
    assert served == [True] + [False] * 7 + [True]


def test_a_transposed_column_keeps_stride_1_1():
    x = zeros(128, 1).t()
    assert x.shape == (1, 128) and x.is_contiguous()
    assert check_operands(x, F_B) is None
    column = zeros(4, 1)  # K = 1: a pitch of one element for four rows
    assert column.stride() == (1, 1)
    assert check_operands(column, zeros(1, 1)).reason is Reason.ROW_STRIDE


def test_a_pitched_weight_is_taken_where_it_is_asked_for():
    weight = zeros(N, K + 64)[:, :K]
    assert check_weight(weight, pitched=True) is None and check_weight(weight).reason is Reason.WEIGHT_LAYOUT
    assert check_operands(zeros(2, K), weight, pitched_weight=True) is None
    # Rows of a packed weight (q, k, v of one matrix) are packed themselves; a slice of its columns is not.
    assert check_weight(zeros(3 * N, K)[N : 2 * N]) is None
    assert check_weight(zeros(1, K + 64)[:, :K]) is None


@pytest.mark.parametrize(
    "weight",
    [zeros(N, K + 4)[:, :K], zeros(1, K).expand(N, K), view((N, K), (8, 1)), zeros(K, N).t(), zeros(N, K + 8)[:, 4 : K + 4]],
    ids=["odd pitch", "expanded", "overlapping", "transposed", "misaligned"],
)
def test_pitched_does_not_mean_anything_goes(weight):
    assert check_weight(weight, pitched=True) is not None


def test_garbage_columns_beside_a_slice_are_not_looked_at():
    x = bf16(4, 2 * K)
    before = x.clone()
    check_operands(x[:, :K], W, bf16(4, N))
    assert torch.equal(x, before)


def spans(tensor) -> list[tuple[int, int]]:
    """First and last byte of each row, relative to the storage."""
    rows, columns = tensor.shape
    size, start, (row_stride, _) = tensor.element_size(), tensor.storage_offset(), tensor.stride()
    return [((start + i * row_stride) * size, (start + i * row_stride + columns) * size) for i in range(rows)]


@st.composite
def matrices(draw, rows, columns):
    strides = st.integers(0, 3).map(lambda i: 8 * i) | st.integers(0, 80)
    # Mostly one thing that is unusual, else nothing is ever served and the property says nothing.
    row = draw(st.just(columns) | st.just(columns) | strides)
    column = draw(st.sampled_from([1] * 8 + [0, 2, 8]))
    offset = draw(st.sampled_from([0, 0, 0, 8, 16]) | st.integers(0, 16))
    return view((rows, columns), (row, column), offset)


@st.composite
def operands(draw):
    m, n, k = draw(st.integers(0, 5)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 8, 16, 24]))
    residual = draw(st.none() | matrices(m, n))
    return draw(matrices(m, k)), draw(matrices(n, k)), residual, draw(st.booleans())


@settings(max_examples=600)
@given(operands())
def test_what_is_served_can_be_read_in_words_of_16_bytes(case):
    *tensors, pitched = case
    if check_operands(*tensors, pitched_weight=pitched) is not None:
        return
    for tensor in filter(lambda t: t is not None and t.numel(), tensors):
        # A row of one element has no neighbour, so its inner stride says nothing.
        assert tensor.stride(1) == 1 or tensor.shape[1] == 1, tensor.stride()
        rows = spans(tensor)
        assert all(start % ALIGNMENT_BYTES == 0 for start, _ in rows), (tensor.shape, tensor.stride(), rows)
        assert all(stop <= start for (_, stop), (start, _) in zip(rows, rows[1:])), (tensor.shape, tensor.stride(), rows)


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([8, 16, 24]), st.integers(0, 3), st.integers(0, 3))
def test_no_servable_layout_is_refused(m, n, k, x_words, r_words):
    x = zeros(m, k + 8 * x_words)[:, :k]
    residual = zeros(m, 8 * n + 8 * r_words)[:, : 8 * n]
    assert check_operands(x, zeros(8 * n, k), residual) is None
    assert check_operands(x, zeros(8 * n, k)) is None


def test_a_refusal_reads_as_a_sentence():
    assert str(Refusal(Reason.RANK, "x has 1 dimensions")) == "x is not 2-D: x has 1 dimensions"
    assert str(Refusal(Reason.BIAS)) == "bias present"
    assert len({str(reason) for reason in Reason}) == len(Reason)
