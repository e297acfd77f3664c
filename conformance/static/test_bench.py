"""The parts of the benchmark that need no GPU: what is judged, timed, listed, averaged, recorded and drawn."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from lowlat_cli import bench, bench_command, candidates, measure, parsing, plots, show_bench
from lowlat_cli.bench import BenchCell, Check, geometric_means, losses
from lowlat_cli.candidates import CUBLAS, FLOOR, LINK, OURS, Candidate, Cublas
from lowlat_cli.checking import Shape
from lowlat_cli.environment import Gpu
from lowlat_cli.measure import LINKED, WARM, Mode, Timing
from lowlat_cli.record import command_line, make_bench_record, render
from lowlat_gemm.arch import SM90, DeviceProperties
from lowlat_gemm.kernels import flashinfer
from lowlat_gemm.reference import reference_gemm

H200 = Gpu(0, DeviceProperties("NVIDIA H200", (9, 0), 132, 4814.0), SM90)


def _cell(m=1, mode=Mode(), skipped=None, **us):
    timings = {name.replace("_", " "): Timing(value, value, value) for name, value in us.items()}
    checks = {name: Check(True, 0.5, 0.5, ("kernel",)) for name in timings}
    backend = "skinny" if OURS in us else None
    return BenchCell(1000, 1000, m, mode, 2_000_000, 600, backend, timings, checks, skipped or {})


def test_a_timing_is_the_median_with_its_spread():
    samples = [5.0, 1.0, 3.0, 2.0, 4.0, 100.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert Timing.of(samples) == Timing(6.0, 2.0, 10.0)


def test_ratios_and_bandwidth():
    cell = _cell(floor=2.0, cublas=4.0, ours=2.5)
    assert cell.ratio(OURS, FLOOR) == 1.25 and cell.ratio(OURS, CUBLAS) == 0.625 and cell.gbs(OURS) == 800.0
    row = cell.to_json()
    assert row["over_floor"] == {CUBLAS: 2.0, OURS: 1.25} and row["ours_over"] == {CUBLAS: 0.625}
    assert row["timings"][OURS]["us"] == 2.5 and row["gbs"][OURS] == 800.0
    without = _cell(floor=2.0, cublas=4.0)
    assert without.ratio(OURS, FLOOR) is None and without.over_best_peer is None
    assert without.to_json()["ours_over"] == {}


def test_neither_the_floor_nor_the_norm_is_a_peer():
    cell = _cell(mode=Mode(chain=LINKED), floor=1.0, norm_alone=0.5, cublas=4.0, vllm=3.0, ours=2.0)
    assert cell.best_peer == "vllm" and cell.over_best_peer == pytest.approx(2 / 3)
    assert LINK in cell.timings and LINK not in cell.to_json()["ours_over"] and LINK not in cell.to_json()["gbs"]


def test_geometric_means_are_over_the_cells_that_both_ran():
    cells = [_cell(1, floor=1.0, cublas=2.0, ours=2.0), _cell(1, floor=1.0, cublas=2.0, ours=8.0, vllm=4.0)]
    cells += [_cell(1, floor=1.0, cublas=9.0), _cell(2, floor=1.0, cublas=9.0)]
    cells += [_cell(1, Mode(WARM), floor=1.0, cublas=2.0, ours=1.0)]
    means = geometric_means(cells)
    assert list(means) == [str(Mode()), str(Mode(WARM))] and list(means[str(Mode())]) == [1]
    assert means[str(Mode())][1] == {
        CUBLAS: {"cells": 2, "over_floor": 2.0, "ours_over": 2.0},
        OURS: {"cells": 2, "over_floor": 4.0},
        "vllm": {"cells": 1, "over_floor": 4.0, "ours_over": 2.0},
    }
    assert means[str(Mode(WARM))][1][CUBLAS]["ours_over"] == 0.5


def test_losses_are_listed_worst_first_and_wins_are_not():
    slightly = _cell(1, floor=1.0, cublas=2.0, ours=2.02)
    clearly = _cell(2, floor=1.0, cublas=4.0, vllm=1.5, ours=2.0)
    cells = [slightly, _cell(3, floor=1.0, cublas=2.0, ours=1.9), clearly, _cell(4, floor=1.0, cublas=2.0)]
    assert losses(cells) == [clearly, slightly]
    console = Console(width=200, file=io.StringIO())
    show_bench.bench(console, cells, geometric_means(cells), H200)
    text = console.file.getvalue()
    assert "3 cells against a peer: 1 won, 2 lost, 1 by more than 3 %" in text, text
    assert text.index("LOST 1.333 x vllm: 1000x1000 M=2") < text.index("LOST 1.010 x cublas: 1000x1000 M=1")


def test_what_has_no_time_is_said_once_with_its_count():
    cells = [_cell(m, floor=1.0, cublas=2.0, skipped={"vllm": "vllm is not installed"}) for m in (1, 2)]
    cells.append(_cell(3, floor=1.0, cublas=2.0, skipped={"x": "wrong: 3 of 4"}))
    console = Console(width=200, file=io.StringIO())
    show_bench.bench(console, cells, geometric_means(cells), H200)
    text = console.file.getvalue()
    assert "2  vllm: vllm is not installed" in text and "1  x: wrong" in text, text


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


def test_modes_are_every_combination_and_nothing_else():
    assert bench_command.modes(["cold"], ["on"], ["back_to_back"]) == [Mode()]
    found = bench_command.modes(["cold", "warm"], ["on", "off"], ["back_to_back", "linked", "linked"])
    assert len(set(found)) == len(found) == 8 and Mode(WARM, False, LINKED) in found
    for arguments in (["hot"], ["on"], ["linked"]), (["cold"], ["maybe"], ["linked"]), (["cold"], ["on"], ["loop"]):
        with pytest.raises(ValueError, match="expected"):
            bench_command.modes(*arguments)


def test_candidates_by_name():
    assert [one.name for one in candidates.chosen(["all"])] == list(candidates.CANDIDATES)
    assert [one.name for one in candidates.chosen([])] == [n for n in candidates.CANDIDATES if n != "torch.compile"]
    assert [one.name for one in candidates.chosen(["torch.compile"])] == [OURS, CUBLAS, "torch.compile"]
    assert [one.name for one in candidates.chosen(["vllm"])] == [OURS, CUBLAS, "vllm"]
    with pytest.raises(ValueError, match="unknown candidate 'tgv': known are all, ours, cublas"):
        candidates.chosen(["tgv"])


@pytest.mark.parametrize("name", [name for name in candidates.CANDIDATES if name not in (OURS, CUBLAS)])
def test_a_package_that_is_not_there_is_one_line(monkeypatch, name):
    monkeypatch.setattr(candidates, "_not_installed", lambda module: f"{module} is not installed")
    monkeypatch.setattr(flashinfer, "installed_version", lambda: None)
    assert "is not installed" in candidates.CANDIDATES[name].why_not(SM90, 1536, 7168, 1)


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
    """A bench on CPU tensors: a captured graph has run its calls. ``events``: what the norm and the GEMMs did."""
    made = object.__new__(measure.ShapeCopies)
    made.shape, made.device, made.gpu = Shape(24, 64, ()), torch.device("cpu"), H200
    made.copies, made.weight_bytes = 5, 2 * 24 * 64
    made.weights = torch.randn(5, 24, 64).bfloat16()
    made.x, made.h = torch.randn(2, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    made.reference = reference_gemm(made.x, made.weights[0])
    made.captured, made.events = [], []

    def capture(calls, *, pdl=True):
        made.captured.append((sum((call(), 1)[1] for call in calls), pdl))
        return FakeGraph()

    def link(y, h, x, stream):
        made.events.append(("norm", y.data_ptr()))
        x.copy_(h)

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "replay_us", lambda graph, launches: 1.0)
    monkeypatch.setattr(measure.chain_kernel, "compiled_norm_link", lambda target: link)
    monkeypatch.setattr(measure.ShapeCopies, "_stream", lambda self: 0)
    monkeypatch.setattr(measure.ShapeCopies, "floor_graph", lambda self, m, mode: FakeGraph())
    monkeypatch.setattr(bench.graphs_module, "kernel_names", lambda call: (call(), ["a kernel"])[1])
    return made


class Exact(Candidate):
    """A right GEMM that notes the weight it reads; ``own``: into a tensor of its own."""

    name = "exact"

    def __init__(self, name="exact", error=0.0, own=False):
        self.name, self.error, self.own, self.read = name, error, own, []

    def make(self, n, k, m, ordinal):
        def run(x, w, y):
            self.read.append(w.data_ptr())
            y = torch.empty_like(y) if self.own else y
            return y.copy_(x.double() @ w.double().T + self.error)

        return run


@pytest.mark.parametrize("weights", ["cold", "warm"])
def test_each_launch_reads_its_copy_of_the_weight(shape_bench, weights):
    exact = Exact()
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode(weights)], [exact], replays=3)
    first, again, *launches = exact.read  # judged, named, then captured
    expected = [w.data_ptr() for w in shape_bench.weights] if weights == "cold" else [first] * 5
    assert launches == expected and first == again == shape_bench.weights[0].data_ptr()
    assert shape_bench.captured == [(5, True)] and set(cell.timings) == {FLOOR, "exact"}
    check = cell.checks["exact"]
    assert check == Check(True, check.worst_ulps, check.worst_share, ("a kernel",)) and check.worst_share <= 1


def test_pdl_off_reaches_the_capture(shape_bench):
    bench.bench_cell(shape_bench, 2, [Mode(pdl=False)], [Exact()], replays=3)
    assert shape_bench.captured == [(5, False)]


@pytest.mark.parametrize("own", [False, True], ids=["writes y", "allocates"])
def test_the_linked_chain_reads_what_the_last_gemm_wrote(shape_bench, own):
    events = shape_bench.events

    def run(x, w, y):
        assert torch.equal(x, shape_bench.h), "the GEMM reads what the norm wrote"
        y = torch.empty_like(y) if own else y
        events.append(("gemm", y.data_ptr()))
        kept.append(y)
        return y

    kept = []
    graph = shape_bench.graph(run, 2, torch.full((2, 24), float("nan")).bfloat16(), Mode(chain=LINKED))
    warm_up, *pairs = events
    assert [kind for kind, _ in pairs] == ["norm", "gemm"] * 5 and warm_up[0] == "norm"
    assert [pairs[i][1] for i in (2, 4, 6, 8)] == [pairs[i][1] for i in (1, 3, 5, 7)], "norm i + 1 reads GEMM i"
    assert len(graph.kept) == 3, "the tensors that a graph points into live as long as it"


def test_a_linked_cell_has_the_norm_alone_and_a_shape_that_it_cannot_take_says_so(shape_bench, monkeypatch):
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode(chain=LINKED)], [Exact()], replays=3)
    assert set(cell.timings) == {FLOOR, LINK, "exact"}
    monkeypatch.setattr(measure.chain_kernel, "why_not", lambda n, k: "too wide")
    alone, refused = bench.bench_cell(shape_bench, 2, [Mode(), Mode(chain=LINKED)], [Exact()], replays=3)
    assert alone.timings and refused.timings == {} and refused.skipped == {"exact": "too wide"}


@pytest.mark.parametrize("n, k, served", [(24, 64, True), (25, 64, False), (24, 16384, True), (24, 16392, False)])
def test_what_the_norm_takes(n, k, served):
    assert (measure.chain_kernel.why_not(n, k) is None) == served


def test_a_wrong_result_of_ours_is_not_timed(shape_bench):
    with pytest.raises(bench.BenchError, match="ours at M=2 N=24 K=64: 48 of 48"):
        bench.bench_cell(shape_bench, 2, [Mode()], [Exact(OURS, error=1e6)])
    assert shape_bench.captured == []


def test_a_wrong_peer_is_listed_and_not_timed(shape_bench):
    wrong, right = Exact("hasty", error=1e6), Exact("right", own=True)
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode()], [wrong, right], replays=3)
    assert set(cell.timings) == {FLOOR, "right"} and cell.skipped["hasty"].startswith("wrong: 48 of 48")
    assert not cell.checks["hasty"].ok and cell.checks["right"].ok
    assert len(wrong.read) == 2, "judged and named, not captured"


def test_cublas_is_timed_with_its_error_in_the_record(shape_bench, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda x, w, out: out.copy_(x.double() @ w.double()).add_(64))
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode()], [Cublas()], replays=3)
    row = cell.to_json()
    assert CUBLAS in cell.timings and row["checks"][CUBLAS]["ok"] is False and row["checks"][CUBLAS]["worst_share"] > 1


def test_what_a_result_leaves_unwritten_is_wrong(shape_bench):
    class Idle(Candidate):
        name = "idle"

        def make(self, n, k, m, ordinal):
            return lambda x, w, y: y

    (cell,) = bench.bench_cell(shape_bench, 2, [Mode()], [Idle()], replays=3)
    assert cell.skipped["idle"].startswith("wrong") and math.isnan(cell.checks["idle"].worst_ulps)
    assert cell.to_json()["checks"]["idle"]["worst_ulps"] == "nan"


class Refusing(Candidate):
    def __init__(self, name, where):
        self.name, self.where = name, where

    def make(self, n, k, m, ordinal):
        if self.where == "make":
            raise NotImplementedError("backend not\nfor SM90")

        def run(x, w, y):
            raise ValueError("N has to be 2112")

        return run


RAISED = [("make", "raised NotImplementedError: backend not"), ("run", "raised ValueError: N has to be 2112")]


@pytest.mark.parametrize("where, said", RAISED)
def test_a_peer_that_raises_is_a_line_and_ours_an_error(shape_bench, where, said):
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode()], [Refusing("peer", where), Exact()], replays=3)
    assert cell.skipped == {"peer": said} and "exact" in cell.timings
    with pytest.raises((NotImplementedError, ValueError)):
        bench.bench_cell(shape_bench, 2, [Mode()], [Refusing(OURS, where)])


def test_a_peer_that_cannot_be_captured_is_a_line(shape_bench, monkeypatch):
    def capture(calls, *, pdl=True):
        for call in calls:
            call()
        if exact.read[2:]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return FakeGraph()

    exact = Exact()
    monkeypatch.setattr(measure, "capture", capture)
    (cell,) = bench.bench_cell(shape_bench, 2, [Mode()], [exact], replays=3)
    assert cell.skipped["exact"] == "cannot be captured: operation not permitted when stream is capturing"


def test_no_cell_begins_out_of_time(shape_bench, monkeypatch):
    monkeypatch.setattr(bench, "ShapeCopies", lambda shape, gpu, tokens: shape_bench)
    monkeypatch.setattr(bench, "_compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: torch.no_grad())
    answers, told = iter([False, True, True]), []
    what = [shape_bench.shape], [1, 2], H200, [Mode()], [Exact()]
    cells, missed = bench.run_bench(*what, lambda shape, done: told.append(done), 3, lambda: next(answers))
    assert [cell.m for cell in cells] == [1] and missed == ["24x64 M=2"] and told == [0, 1]


def test_the_record_reads_back(monkeypatch):
    import datetime

    cells = [_cell(m, mode, floor=1.0, cublas=2.0, ours=1.5) for m in (1, 2) for mode in (Mode(), Mode(chain=LINKED))]
    record = make_bench_record("lowlat bench", cells, ["24x64 M=4"], H200, datetime.datetime.now(), 1.0)
    read = json.loads(render(record))
    assert (read["schema"], read["kind"], read["not_reached"]) == (2, "bench", ["24x64 M=4"])
    assert len(read["cells"]) == 4
    assert read["cells"][0]["mode"] == {"weights": "cold", "pdl": True, "chain": "back_to_back"}
    assert read["geometric_means"][str(Mode())]["1"][OURS] == {"cells": 1, "over_floor": 1.5}


def test_the_command_in_a_record_has_no_path():
    words = ["bench", "--plots", "/a/b", "--tp", "8", "--record=/c", "--plots=/d"]
    assert command_line("lowlat", words) == "lowlat bench --tp 8"


def test_pictures(tmp_path):
    modes = [Mode(), Mode(chain=LINKED)]
    cells = [_cell(m, mode, floor=1.0, cublas=2.0, ours=1.5) for m in (1, 2, 8) for mode in modes]
    cells += [replace(cells[0], weight_bytes=9_000_000, timings={FLOOR: Timing(2, 2, 2), CUBLAS: Timing(3, 3, 3)})]
    written = plots.plot_bench(cells, tmp_path / "new", "NVIDIA H200")
    assert [path.name for path in written] == [
        "roofline-back_to_back-cold-pdl-on.png", "ratio-by-m-back_to_back-cold-pdl-on.png",
        "roofline-linked-cold-pdl-on.png", "ratio-by-m-linked-cold-pdl-on.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert plots.plot_bench([replace(cells[0], timings={})], tmp_path, "H200") == []

@pytest.mark.parametrize("megabytes, copies", [(90, 14), (22, 55), (1.5, 800), (0.4, 1024), (0.066, 3031), (900, 2)])
def test_copies_are_cold_and_no_more_than_it_takes(megabytes, copies):
    weight_bytes = int(megabytes * 1e6)
    assert measure.copies_of(weight_bytes) == copies
    assert copies * weight_bytes >= measure.LEAST_COPIES_BYTES
