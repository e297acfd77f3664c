"""The parts of the benchmark that need no GPU: what is a median, a ratio, a mean and a token list."""

from __future__ import annotations

import pytest
import torch

from lowlat_cli import bench, measure, parsing
from lowlat_cli.checking import Shape
from lowlat_gemm.reference import reference_gemm
from lowlat_cli.bench import CUBLAS, FLOOR, OURS, BenchCell, geometric_means
from lowlat_cli.measure import Timing


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


class FakeGraph:
    """Counts its replays; ``calls`` are what was captured."""

    def __init__(self, calls=()):
        self.calls, self.replays = list(calls), 0

    def replay(self):
        self.replays += 1


def test_candidates_take_turns_in_changing_order(monkeypatch):
    order = []
    graphs = {name: FakeGraph() for name in "abc"}

    def replay_us(graph, launches):
        order.append(next(name for name, one in graphs.items() if one is graph))
        return len(order) / launches

    monkeypatch.setattr(measure, "replay_us", replay_us)
    timings = measure.interleaved(graphs, launches=10, replays=6)
    assert ["".join(order[i : i + 3]) for i in range(0, 18, 3)] == ["abc", "bca", "cab"] * 2
    assert timings["a"].us == 9 / 10 and all(graph.replays == 1 for graph in graphs.values()), "one warm-up each"


@pytest.fixture
def shape_bench(monkeypatch):
    """A bench on CPU tensors: graphs run their calls at once, and every weight that a candidate reads is noted."""
    made = object.__new__(measure.ShapeCopies)
    made.shape, made.device, made.copies, made.weight_bytes = Shape(24, 64, ()), torch.device("cpu"), 5, 2 * 24 * 64
    made.weights = torch.randn(5, 24, 64).bfloat16()
    made.x = torch.randn(2, 64).bfloat16()
    made.reference, made.floor = reference_gemm(made.x, made.weights[0]), FakeGraph()
    made.captured = []

    def capture(calls):
        made.captured.append(sum((call(), 1)[1] for call in calls))
        return FakeGraph()

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "replay_us", lambda graph, launches: 1.0)
    return made


def test_each_copy_of_the_weight_is_read_by_one_launch(shape_bench, monkeypatch):
    read = []

    def mm(x, w, out):
        read.append(w.data_ptr())
        return out.copy_(x.float() @ w.float())

    monkeypatch.setattr(torch, "mm", mm)
    cell = bench.bench_cell(shape_bench, 2, replays=3)
    first, *launches = read  # the first call is the one that is judged
    assert shape_bench.captured == [5] and launches == [w.data_ptr() for w in shape_bench.weights] and first == launches[0]
    assert set(cell.timings) == {FLOOR, CUBLAS} and "not in table" in cell.reason and cell.worst_ulps[CUBLAS] < 1


def test_a_wrong_result_of_ours_is_not_timed(shape_bench, monkeypatch):
    decision = type("Decision", (), {"runs": True, "backend": "skinny", "refusal": None})
    monkeypatch.setattr(bench, "explain", lambda m, n, k: decision)
    monkeypatch.setattr(bench, "device_plan", lambda *key: type("Plan", (), {"entry": lambda *a: type("E", (), {"unit": 0})}))
    monkeypatch.setattr(bench, "COMPILE_CACHE", type("Cache", (), {"get": staticmethod(lambda unit: None)}))
    monkeypatch.setattr(bench, "launch", lambda compiled, x, w, residual, y: y.zero_())
    with pytest.raises(bench.BenchError, match="ours at M=2 N=24 K=64: 48 of 48"):
        bench.bench_cell(shape_bench, 2)
