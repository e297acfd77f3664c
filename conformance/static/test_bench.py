"""The parts of the benchmark that need no GPU: what is a median, a ratio, a mean and a token list."""

from __future__ import annotations

import pytest

from lowlat_cli import parsing
from lowlat_cli.bench import CUBLAS, FLOOR, OURS, BenchCell, Timing, geometric_means


def _cell(m=1, **us):
    timings = {name: Timing(value, value, value) for name, value in us.items()}
    return BenchCell(1000, 1000, m, 2_000_000, 600, "skinny" if OURS in us else None, None, timings, {})


def test_a_timing_is_the_median_with_its_spread():
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 100.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert Timing.of(samples) == Timing(6.0, 2.0, 10.0)


def test_ratios_and_bandwidth():
    cell = _cell(**{FLOOR: 2.0, CUBLAS: 4.0, OURS: 2.5})
    assert cell.ratio(OURS, FLOOR) == 1.25 and cell.ratio(OURS, CUBLAS) == 0.625 and cell.gbs(OURS) == 800.0
    assert cell.to_json()["ours_over_floor"] == 1.25 and cell.to_json()["timings"][OURS]["us"] == 2.5
    without = _cell(**{FLOOR: 2.0, CUBLAS: 4.0})
    assert without.ratio(OURS, FLOOR) is None and without.to_json()["ours_over_floor"] is None


def test_geometric_means_are_over_the_cells_that_ran():
    cells = [_cell(1, floor=1.0, cublas=2.0, ours=2.0), _cell(1, floor=1.0, cublas=2.0, ours=8.0)]
    cells += [_cell(1, floor=1.0, cublas=9.0), _cell(2, floor=1.0, cublas=9.0)]
    means = geometric_means(cells)
    assert list(means) == [1] and means[1] == {
        "ours_over_floor": 4.0, "cublas_over_floor": 2.0, "ours_over_cublas": 2.0, "cells": 2,
    }  # fmt: skip


@pytest.mark.parametrize("text, found", [("1", [1]), ("1,2,4-8", [1, 2, 4, 5, 6, 7, 8]), ("4-5, 4,1", [1, 4, 5])])
def test_token_lists(text, found):
    assert parsing.tokens(text) == found


@pytest.mark.parametrize("text", ["", "0", "2-1", "a", "1,,2", "-3"])
def test_token_lists_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="token counts"):
        parsing.tokens(text)


@pytest.mark.parametrize("text", ["1536", "0x8", "00x8", "8x0", "8x12", "ax8", "8x", "8x8x8"])
def test_shapes_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="expected NxK"):
        parsing.shape(text)
    assert (parsing.shape("1536x7168").n, parsing.shape("1536x7168").k) == (1536, 7168)
