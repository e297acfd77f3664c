"""The oracle is exact, and its bound catches what is wrong and passes what is right.

"Wrong" is simulated: a kernel that skips the end of K, keeps partial sums in BF16, leaves an element unwritten. "Right"
is any order of FP32 additions that a kernel may use, rounded once.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.fakes import bf16
from lowlat_gemm.reference import accumulation_factor, error_bound, parity, reference_gemm, ulp

DTYPES = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float32: (23, -126)}
LENGTHS = [8, 64, 128, 768, 1536, 7168, 14336]
M, N = 4, 96


def operands(k: int, kind: str = "normal"):
    x, weight = bf16(M, k, seed=1), bf16(N, k, seed=2)
    return (x.abs(), weight.abs()) if kind == "positive" else (x, weight)


def products(x, weight) -> torch.Tensor:
    """[M, N, K] FP32 products: exact, for 8 x 8 significant bits fit in 24."""
    return x.float()[:, None, :] * weight.float()[None, :, :]


def chain(terms: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """The sum over the last axis, one rounded addition after the other."""
    total = torch.zeros(terms.shape[:-1], dtype=dtype)
    for term in terms.unbind(-1):
        total = (total + term).to(dtype)
    return total


def skinny_order(terms, threads: int):
    """One chain a thread over every ``threads``-th vector of 8, then a tree."""
    k = terms.shape[-1]
    width = min(8, k)
    lanes = terms.reshape(*terms.shape[:-1], -1, width)
    partial = [chain(lanes[..., t::threads, :].flatten(-2)) for t in range(min(threads, lanes.shape[-2]))]
    while len(partial) > 1:
        partial = [a + b for a, b in zip(partial[::2], partial[1::2])] + ([partial[-1]] if len(partial) % 2 else [])
    return partial[0]


ORDERS = {
    "one chain": chain,
    "one chain backwards": lambda terms: chain(terms.flip(-1)),
    "32 threads": lambda terms: skinny_order(terms, 32),
    "128 threads": lambda terms: skinny_order(terms, 128),
    "chunks of 16": lambda terms: chain(terms.reshape(*terms.shape[:-1], -1, min(16, terms.shape[-1])).sum(-1)),
    "split 8": lambda terms: chain(torch.stack([chain(part) for part in terms.chunk(8, -1)], -1)),
    "torch": lambda terms: terms.sum(-1),
}


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_fp32_additions_is_accepted(k, order):
    x, weight = operands(k)
    report = parity(ORDERS[order](products(x, weight)).bfloat16(), reference_gemm(x, weight))
    assert report.ok and 0.4 < report.worst_ulps or k == 8 and report.ok, f"K = {k}, {order}: {report}"


@pytest.mark.parametrize("k", LENGTHS)
def test_threaded_orders_are_accepted_where_all_terms_are_positive(k):
    x, weight = operands(k, "positive")
    reference = reference_gemm(x, weight)
    for order in ("32 threads", "128 threads", "split 8"):
        report = parity(ORDERS[order](products(x, weight)).bfloat16(), reference)
        assert report.ok, f"K = {k}, {order}: {report}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_exact_value_rounded_once_is_accepted(dtype):
    reference = reference_gemm(*operands(768))
    report = parity(reference.value.to(dtype), reference)
    assert report.ok and report.worst_ulps <= 0.5 and report.worst_share <= 1


@pytest.mark.parametrize("k", LENGTHS)
def test_small_integers_are_exact(k):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-8, 9, (M, k), generator=generator)
    weight = torch.randint(-8, 9, (N, k), generator=generator)
    residual = torch.randint(-8, 9, (M, N), generator=generator)
    reference = reference_gemm(x.bfloat16(), weight.bfloat16(), residual.bfloat16())
    assert torch.equal(reference.value, (x @ weight.T + residual).double())
    assert torch.equal(reference.magnitude, (x.abs() @ weight.abs().T + residual.abs()).double())
    assert reference.k == k


# ---- what must be caught


def good_result(k: int):
    x, weight = operands(k)
    reference = reference_gemm(x, weight)
    out = reference.value.bfloat16()
    assert parity(out, reference).ok
    return x, weight, reference, out


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("steps", [-2, 2])
def test_one_element_off_by_two_units_is_caught(k, steps):
    _, _, reference, out = good_result(k)
    significand = torch.frexp(reference.value)[0].abs()  # in [0.5, 1): away from where the unit changes
    middle = reference.value.abs() * ((significand > 0.6) & (significand < 0.9))
    m, n = divmod(int(middle.argmax()), N)
    out[m, n] += steps * ulp(reference.value, torch.bfloat16)[m, n]
    report = parity(out, reference)
    assert (report.ok, report.bad, report.elements) == (False, 1, M * N), report
    assert report.first_bad.startswith(f"[{m}, {n}]: got ") and report.worst_ulps >= 1.5 and report.worst_share > 1


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf", "unwritten", "stale", "negated", "neighbour", "zero"])
def test_one_wrong_element_is_caught(k, wrong):
    _, _, reference, out = good_result(k)
    m, n = divmod(int(reference.value.abs().argmax()), N)
    canary = torch.tensor(0x7FC1, dtype=torch.int16).view(torch.bfloat16)  # what poisoned outputs hold: a NaN
    values = {"unwritten": canary, "stale": 1234.0, "negated": -out[m, n], "neighbour": out[m, n - 1], "zero": 0.0}
    out[m, n] = values[wrong] if wrong in values else float(wrong)
    report = parity(out, reference)
    assert not report.ok and report.bad == 1 and f"[{m}, {n}]" in report.first_bad, report
    assert not report.worst_ulps <= 1.5 and not report.worst_share <= 1  # NaN included


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("missing", [1, 8])
def test_a_missing_end_of_k_is_caught(k, missing):
    x, weight, reference, _ = good_result(k)
    out = reference_gemm(x[:, : k - missing], weight[:, : k - missing]).value.bfloat16()
    assert not parity(out, reference).ok, f"K = {k}, {missing} elements missing"


@pytest.mark.parametrize("k", LENGTHS[1:])
def test_a_chain_of_bf16_additions_is_caught(k):
    x, weight, reference, _ = good_result(k)
    assert not parity(chain(products(x, weight), torch.bfloat16), reference).ok, f"K = {k}"


@pytest.mark.parametrize("k", LENGTHS[1:])
@pytest.mark.parametrize("split", [2, 4, 8, 16])
def test_bf16_partial_sums_of_a_split_k_are_caught(k, split):
    """Each split is exact and rounded to BF16 once: the mildest form of the mistake."""
    x, weight, reference, _ = good_result(k)
    parts = [reference_gemm(a, b).value.bfloat16().float() for a, b in zip(x.chunk(split, 1), weight.chunk(split, 1))]
    report = parity(torch.stack(parts).sum(0).bfloat16(), reference)
    assert not report.ok, f"K = {k}, split {split}: {report}"


def test_a_residual_added_after_rounding_is_caught():
    x, weight = operands(1536)
    residual = bf16(M, N, seed=3) * 40
    reference = reference_gemm(x, weight, residual)
    assert parity((reference_gemm(x, weight).value + residual.double()).bfloat16(), reference).ok
    assert not parity(reference_gemm(x, weight).value.bfloat16() + residual, reference).ok
    assert not parity((reference_gemm(x, weight).value + 2 * residual.double()).bfloat16(), reference).ok


def test_a_value_where_the_truth_is_exactly_zero_is_caught():
    # A token of zeros, as padding gives it: nothing is rounded, so nothing but zero is right.
    reference = reference_gemm(torch.zeros(1, 64).bfloat16(), bf16(N, 64))
    for value in (1e-3, 1e-6, 2.0**-100, 2.0**-126):
        out = torch.zeros(1, N).bfloat16()
        out[0, 5] = value
        report = parity(out, reference)
        assert not report.ok and report.bad == 1, f"{value} accepted for 0: {report}"
        assert report.worst_ulps > 1, f"{value} for 0 is {report.worst_ulps} units"


def test_terms_that_cancel_have_many_units_and_a_small_share():
    x, weight = torch.tensor([[256.0, 256.0, 2.0**-8]]).bfloat16(), torch.tensor([[1.0, -1.0, 1.0]]).bfloat16()
    reference = reference_gemm(x, weight)
    report = parity(reference.value.bfloat16() + 2.0**-13, reference)  # what FP32 may lose of 256
    assert report.ok and report.worst_ulps >= 4 and 0 < report.worst_share < 0.5, report


def test_an_infinite_operand_allows_infinity_alone():
    reference = reference_gemm(torch.tensor([[math.inf]]).bfloat16(), torch.tensor([[1.0], [-1.0]]).bfloat16())
    right = torch.tensor([[math.inf, -math.inf]]).bfloat16()
    assert parity(right, reference).ok and parity(right, reference).worst_share == 0
    for wrong in (3.0, math.nan, -math.inf):
        report = parity(torch.tensor([[wrong, -math.inf]]).bfloat16(), reference)
        assert report.bad == 1 and not report.worst_share <= 1, f"{wrong} for infinity: {report}"


def test_both_zeros_are_zero():
    reference = reference_gemm(torch.zeros(1, 8).bfloat16(), torch.ones(2, 8).bfloat16())
    for zero in (0.0, -0.0):
        assert parity(torch.full((1, 2), zero).bfloat16(), reference).ok


@pytest.mark.parametrize("scale", [-128, -130, -133])
def test_subnormal_results(scale):
    reference = reference_gemm(torch.full((1, 8), 2.0**scale).bfloat16(), torch.eye(8).bfloat16())
    assert parity(torch.full((1, 8), 2.0**scale).bfloat16(), reference).ok
    wrong = torch.full((1, 8), 2.0**scale).bfloat16()
    wrong[0, 3] += 2 * 2.0**-133
    assert parity(wrong, reference).bad == 1
    assert parity(torch.zeros(1, 8).bfloat16(), reference).bad == 8  # flushed to zero


def test_an_overflow_is_expected_where_the_reference_rounds_to_infinity():
    x, weight = torch.tensor([[3e38, 1.0]]).bfloat16(), torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]).bfloat16()
    reference = reference_gemm(x, weight)
    out = reference.value.bfloat16()
    assert out.tolist() == [[math.inf, -math.inf, 1.0]]
    report = parity(out, reference)
    assert report.ok and report.worst_ulps == 0
    out[0, 1] = math.inf
    assert parity(out, reference).bad == 1
    assert parity(torch.tensor([[3e38, -math.inf, 1.0]]).bfloat16(), reference).bad == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_unit_in_the_last_place_is_that_of_nextafter(dtype):
    bits, least = DTYPES[dtype]
    smallest = 2.0 ** (least - bits)
    values = [0.0, -0.0, smallest, 2.0**least, 2.0**least * 1.5, *(s * 1.37 * 2.0**e for e in range(least - bits, 16) for s in (1, -1))]
    values = torch.tensor(values, dtype=torch.float64).to(dtype)
    if dtype is torch.float32:
        above = torch.nextafter(values.abs(), torch.tensor(math.inf))
    else:  # the next pattern of bits, which is what nextafter means
        above = (values.abs().view(torch.int16) + 1).view(dtype)
    expected = above.double() - values.abs().double()
    found = ulp(values.double(), dtype)
    wrong = (found != expected).nonzero().flatten().tolist()
    assert not wrong, [(values[i].item(), found[i].item(), expected[i].item()) for i in wrong[:3]]


@given(st.floats(-1e30, 1e30), st.sampled_from(list(DTYPES)))
def test_rounding_is_off_by_at_most_half_a_unit(value, dtype):
    exact = torch.tensor([value], dtype=torch.float64)
    if torch.isfinite(rounded := exact.to(dtype)).item():
        # In the binade above, where rounding went up to it.
        assert (rounded.double() - exact).abs() <= ulp(rounded.double(), dtype) / 2


def test_rows_do_not_depend_on_one_another():
    x, weight = operands(768)
    whole, part = reference_gemm(x, weight), reference_gemm(x[:2], weight)
    assert torch.allclose(whole.rows(2).value, part.value, rtol=1e-13, atol=1e-12)
    assert whole.rows(2).value.shape == (2, N) and whole.rows(2).k == 768
    assert torch.equal(error_bound(whole, torch.bfloat16)[:2], error_bound(whole.rows(2), torch.bfloat16))


@pytest.mark.parametrize("chunk_rows", [1, 7, N - 1, N, 10**6])
def test_the_chunk_does_not_matter(chunk_rows):
    x, weight = operands(128)
    whole, chunked = reference_gemm(x, weight), reference_gemm(x, weight, chunk_rows=chunk_rows)
    assert torch.allclose(whole.value, chunked.value, rtol=1e-13, atol=1e-12)
    assert torch.allclose(whole.magnitude, chunked.magnitude, rtol=1e-13)


def test_the_operands_are_not_changed():
    x, weight = operands(64)
    copies = x.clone(), weight.clone()
    reference_gemm(x, weight)
    assert torch.equal(x, copies[0]) and torch.equal(weight, copies[1])
    x, weight = x.double(), weight.double()  # .double() of a double is itself, and abs_ is in place
    copy = weight.clone()
    reference_gemm(x, weight)
    assert torch.equal(weight, copy)


def test_no_token_is_right():
    reference = reference_gemm(torch.empty(0, 8).bfloat16(), bf16(N, 8))
    report = parity(torch.empty(0, N).bfloat16(), reference)
    assert (report.ok, report.elements, report.bad, report.first_bad) == (True, 0, 0, None)


@pytest.mark.parametrize("shape", [(M, N - 1), (M - 1, N), (N, M), (M * N,), (1, M, N)])
def test_another_shape_is_an_error_with_both_shapes(shape):
    reference = reference_gemm(*operands(8))
    with pytest.raises(ValueError, match=re.escape(f"{shape}") + ".*" + re.escape(f"({M}, {N})")):
        parity(torch.zeros(shape).bfloat16(), reference)


def test_the_factor_grows_with_the_root_of_k():
    assert accumulation_factor(64) == 32 and accumulation_factor(16384) == 272
