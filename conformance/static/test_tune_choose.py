"""Which candidate becomes a cell: the rules, one by one, on planted times."""

from __future__ import annotations

import pytest

from lowlat_cli.tuning.candidates import SCREENED_COLUMNS, Candidate, token_classes, with_class_starts
from lowlat_cli.tuning.choose import Times, choose_row, interpolated, row_times
from lowlat_cli.tuning.jobs import BACK_TO_BACK, FLOOR, LINKED, JobResult
from lowlat_gemm.arch import SM90, SM100
from lowlat_gemm.kernels.skinny import SkinnyConfig
from lowlat_gemm.kernels.split_k import SplitKConfig, token_columns

WIDTHS = token_columns(SM90)


def split(ranks: int, stages: int = 4, columns: int = 8) -> Candidate:
    return Candidate("split_k", SplitKConfig(64, columns, ranks, stages))


A, B, C = split(4), split(4, 5), split(2)
WIDE = split(4, 6, 16)
SKINNY = Candidate("skinny", SkinnyConfig(128, 4, 2, 8))


def times(
    us: float, *, second: float | None = None, linked: float | None = None, baselines=(10.0, 10.0), linked_baselines=()
) -> Times:
    chains = () if linked is None else (linked,)
    return Times((us, us if second is None else second), chains, baselines, linked_baselines)


def chosen(table: dict) -> dict:
    return choose_row(table, token_classes(table, WIDTHS))


@pytest.mark.parametrize(
    "measured, kept",
    [
        (times(9.5), True),
        (times(9.53), False),  # 4.9 % is not enough
        (times(5.0, second=9.6), False),  # in both passes
        (times(5.0, second=5.0, baselines=(10.0, 5.2)), False),  # each against the baseline of its own pass
        (times(9.0, second=9.5), True),
    ],
)
def test_a_cell_beats_the_baseline_by_5_percent_in_both_passes(measured, kept):
    assert chosen({1: {A: measured}}) == ({1: A} if kept else {}), measured


def test_the_table_gets_the_weaker_pass():
    assert Times((5.0, 6.0), (), (10.0, 10.0)).weakest == (6.0, 10.0)
    assert Times((5.0, 6.0), (), (7.0, 10.0)).weakest == (5.0, 7.0)


@pytest.mark.parametrize("us, winner", [(5.24, B), (5.26, A)])
def test_of_candidates_about_as_fast_the_linked_chain_decides(us, winner):
    assert chosen({1: {A: times(5.0, linked=8.0), B: times(us, linked=7.0)}}) == {1: winner}


@pytest.mark.parametrize("cost, winner", [(1.02, {1: A, 9: WIDE}), (1.06, {1: A, 9: WIDE}), (1.08, {1: C, 9: WIDE})])
def test_one_split_for_a_row_where_it_costs_little(cost, winner):
    """The cost is a geometric mean over the row: 1.06 at one of two M is 1.03, 1.08 is more."""
    base = 5.0
    table = {1: {A: times(base * cost * 0.9999), C: times(base)}, 9: {WIDE: times(6.0)}}
    assert chosen(table) == winner


@pytest.mark.parametrize("linked, winner", [(7.4, A), (7.5, C)])
def test_one_split_may_not_cost_more_between_other_kernels(linked, winner):
    """Its cost is that of the chain where it costs more: 7.4 against 7.0 at one of two M is 1.028, 7.5 is 1.035."""
    table = {1: {A: times(5.2, linked=linked), C: times(5.0, linked=7.0)}, 9: {WIDE: times(6.0, linked=8.0)}}
    assert chosen(table) == {1: winner, 9: WIDE}


@pytest.mark.parametrize("at_one, winner", [(1.14, A), (1.16, C)])
def test_one_split_may_not_cost_much_at_any_single_m(at_one, winner):
    rest = {m: {WIDE: times(6.0)} for m in range(9, 17)}
    found = chosen({1: {A: times(5.0 * at_one), C: times(5.0)}, **rest})
    assert found == {1: winner, **dict.fromkeys(rest, WIDE)}


def test_no_one_split_that_does_not_serve_every_cell():
    assert chosen({1: {SKINNY: times(5.0)}, 2: {A: times(5.0), SKINNY: times(9.0)}, 9: {WIDE: times(6.0)}}) == {
        1: SKINNY, 2: A, 9: WIDE,
    }  # fmt: skip


def test_one_config_for_a_token_class_where_it_costs_little():
    near = {m: {A: times(5.0 if m < 5 else 5.05), B: times(5.05 if m < 5 else 5.0)} for m in range(1, 9)}
    assert len(set(chosen(near).values())) == 1
    far = {m: {A: times(5.0 if m < 5 else 6.0), B: times(6.0 if m < 5 else 5.0)} for m in range(1, 9)}
    assert chosen(far) == {m: A if m < 5 else B for m in range(1, 9)}


def test_a_candidate_counts_where_both_passes_have_it():
    def result(*candidates):
        return JobResult({one: {BACK_TO_BACK: 5.0, LINKED: 7.0} for one in candidates}, {FLOOR: 4.0, "mm": 10.0, "other": 9.0})

    found = row_times({3: [result(A, B), result(A)]})
    assert found == {3: {A: Times((5.0, 5.0), (7.0, 7.0), (9.0, 9.0))}}


@pytest.mark.parametrize(
    "winners, measured, between",
    [
        ({17: A, 24: A, 32: A}, (17, 24, 32), {*range(18, 24), *range(25, 32)}),
        ({17: B, 24: A}, (17, 24), {*range(18, 24)}),  # two configs: the upper one's
        ({16: B, 25: A}, (16, 25), set()),  # which stands for no count of another class
        ({16: A, 25: A}, (16, 25), {*range(17, 25)}),
        ({1: A, 3: A}, (1, 2, 3), set()),  # 2 was measured, and has no winner
        ({1: A}, (1, 8), set()),
        ({1: A, 4: A}, (1, 4), {2, 3}),
    ],
)
def test_what_lies_between_two_cells(winners, measured, between):
    found = interpolated(winners, measured, WIDTHS)
    assert set(found) == between and all(one == A for one in found.values())


def test_classes_begin_where_nothing_would_be_served():
    assert with_class_starts([1, 8, 16, 24, 64], WIDTHS) == [1, 8, 9, 16, 17, 24, 57, 64]
    assert with_class_starts([4], WIDTHS) == [4] and with_class_starts([24, 32], WIDTHS) == [24, 25, 32]
    assert [(one.columns, one.tokens) for one in token_classes([1, 8, 9, 33], WIDTHS)] == [(8, (1, 8)), (16, (9,)), (40, (33,))]
    screened = token_classes([1, 8, 9, 33, 64], SCREENED_COLUMNS)
    assert [(one.columns, one.screened) for one in screened] == [(8, 8), (16, 9), (64, 64)]
    powers = token_columns(SM100)
    assert with_class_starts([24, 64], powers) == [24, 33, 64] and token_classes([33], powers)[0].columns == 64
    for bad in ([0], [65], [1, 65]):
        with pytest.raises(ValueError, match="1 to 64"):
            token_classes(bad, WIDTHS)


@pytest.mark.parametrize("linked, kept", [(12.0, True), (12.5, True), (12.6, False)])
def test_what_loses_between_other_kernels_is_not_kept(linked, kept):
    """Twice as fast back to back, and slower than the library in the chain that a model has."""
    assert chosen({4: {A: times(5.0, linked=linked, linked_baselines=(12.5,))}}) == ({4: A} if kept else {})
