"""What parts of split_k cost: which cells are timed, what is judged, and what a record says; kernels and GPU are fakes."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
import torch

from lowlat_cli import split_k_parts as parts
from lowlat_cli.bench import BenchError
from lowlat_cli.checking import Shape
from lowlat_cli.measure import Mode, Timing
from lowlat_cli.record import make_parts_record, render
from lowlat_cli.report import kind_of, summarise_record
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.split_k import SplitKConfig, compile_unit
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import reference_gemm
from tools import bench_parts

#: Microseconds that each part costs here, on top of the floor's 5.
COSTS = {"wait": 1.0, "weights": 2.0, "tokens": 0.5, "exchange": 0.25, "store": 0.125}


class Copies:
    """A shape on the CPU; a graph is what one launch gives."""

    copies = 2

    def __init__(self, shape, gpu, most):
        self.shape = shape
        self.x, self.weights = torch.randn(most, shape.k).bfloat16(), torch.randn(1, shape.n, shape.k).bfloat16()
        self.reference = reference_gemm(self.x, self.weights[0])

    def empty_output(self, m):
        return torch.empty(m, self.shape.n, dtype=torch.bfloat16)

    def floor_graph(self, m, mode):
        return "floor"

    def graph(self, run, m, y, mode):
        return run(self.x[:m], self.weights[0], y)


@pytest.fixture
def world(monkeypatch):
    """Table: split_k of split 3 at M = 1 and of split 1 at M = 2, skinny at M = 3. ``wrong``: the whole kernel is."""
    world = SimpleNamespace(wrong=False, launched=[])

    def entry(m, residual):
        if m == 3:
            return SimpleNamespace(cell=SimpleNamespace(backend="skinny"))
        config = SplitKConfig(64, 8, 3 if m == 1 else 1, 4)
        cell = SimpleNamespace(backend="split_k", config={"split": config.split})
        return SimpleNamespace(cell=cell, unit=compile_unit(SM90, 64, 512, m, config))

    def launch(kernel, x, weight, residual, y):
        world.launched.append(kernel)
        return y.copy_((x.double() @ weight.double().T) * (2 if world.wrong and kernel == parts.WHOLE else 1))

    def plan(ordinal, n, k):
        return SimpleNamespace(entry=entry) if n == 64 else Refusal(Reason.SHAPE, "in no table")

    def timed(graphs, launches, replays):
        found = {parts.FLOOR: 5.0} | {name: 5.0 + sum(COSTS.values()) - COSTS.get(name, 0.0) for name in graphs if name != parts.FLOOR}
        return {name: Timing(us, us, us) for name, us in found.items()}

    monkeypatch.setattr(parts, "ShapeCopies", Copies)
    monkeypatch.setattr(parts, "device_plan", plan)
    monkeypatch.setattr(parts, "COMPILE_CACHE", SimpleNamespace(get=lambda unit: parts.WHOLE))
    monkeypatch.setattr(parts, "compile_without", lambda part, unit: part)
    monkeypatch.setattr(parts, "launch", launch)
    monkeypatch.setattr(parts, "interleaved", timed)
    monkeypatch.setattr(parts.torch.cuda, "device", lambda ordinal: torch.no_grad())
    return world


def run(*tokens, n=64):
    shape = Shape(n, 512, (f"{n}x512",))
    return parts.run_parts([shape], tokens, SimpleNamespace(ordinal=0), [Mode(), Mode(chain="linked")])


def test_the_cells_that_the_table_has_split_k_for(world):
    cells = run(1, 2, 3)
    assert [(cell.m, cell.mode.chain) for cell in cells] == [(m, chain) for m in (1, 2) for chain in ("back_to_back", "linked")]
    assert cells[0].costs == COSTS, "the whole over the build without the part"
    assert set(cells[2].costs) == {"wait", "weights", "tokens", "store"}, "K is not split: there is no exchange to leave out"
    assert world.launched == [parts.WHOLE, *2 * [parts.WHOLE, *parts.PARTS], parts.WHOLE, *2 * [parts.WHOLE, "wait", "weights", "tokens", "store"]]
    assert run(1, n=128) == []


def test_a_wrong_kernel_is_not_timed(world):
    world.wrong = True
    with pytest.raises(BenchError, match="split_k at M=1 N=64 K=512"):
        run(1)


def test_the_record_and_its_lines(world):
    cells = run(1)
    started = datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc)
    record = json.loads(render(make_parts_record("python -m tools.bench_parts", cells, None, started, 1.0)))
    assert kind_of(record) == "parts" and record["cells"][0]["costs"] == COSTS
    assert record["cells"][0]["timings"]["floor"]["us"] == 5.0 and record["cells"][0]["mode"]["chain"] == "back_to_back"
    said = "wait +1.00 us, weights +2.00 us, tokens +0.50 us, exchange +0.25 us, store +0.12 us"
    assert summarise_record("r", record).notes == [f"back_to_back, M = 1: {said}", f"linked, M = 1: {said}"]
    assert bench_parts.line(cells[0]).endswith("costs wait +1.00, weights +2.00, tokens +0.50, exchange +0.25, store +0.12")


def test_a_request_that_no_table_serves_is_said_to_be_one(world, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lowlat_cli.environment.gpu_for_kernels", lambda wanted: (SimpleNamespace(ordinal=0), None))
    monkeypatch.setattr("sys.argv", ["bench_parts", "--shape", "128x512", "--record", f"{tmp_path}/r.json"])
    assert bench_parts.main() == 2 and "split_k at none of these" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("arguments", [["--shape", "64"], ["--shape", "64x512", "--chain", "loose"], []])
def test_requests_that_are_none(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["bench_parts", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_parts.main()
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
