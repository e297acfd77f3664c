"""``lowlat report``: what it makes of records of each kind, and of files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.fakes import lowlat  # noqa: F401
from lowlat_cli import report

RECORDS = Path.cwd() / "hw_matrix/records/sm90"  # pytest's root, with and without Bazel
HEAD = {"schema": 2, "command": "lowlat x", "machine": {"gpu": {"name": "NVIDIA H200"}}, "commit": "c" * 40}
COLD = {"weights": "cold", "pdl": True, "chain": "linked"}


def _write(path: Path, cells: list[dict], **fields) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(HEAD | fields | {"cells": cells}))
    return path


def _timed(m: int, **us: float) -> dict:
    timings = {name.replace("_", " "): {"us": value, "p10": value, "p90": value} for name, value in us.items()}
    return {"n": 64, "k": 128, "m": m, "mode": COLD, "timings": timings}


def test_a_benchmark(tmp_path):
    cells = [_timed(1, floor=1.0, norm_alone=0.1, cublas=4.0, vllm=2.5, ours=2.0)]
    cells += [_timed(1, floor=1.0, cublas=4.0, ours=8.0), _timed(2, floor=1.0, cublas=4.0)]
    found = report.summarise(_write(tmp_path / "b.json", cells, kind="bench", not_reached=["64x128 M=4"]))
    assert found.means == [report.Mean("linked, cold, PDL on", 1, 2, 4.0, 1.0, 4.0)]
    assert found.worst == [
        report.Worst("64x128 M=1, linked, cold, PDL on", 2.0, "cublas"),
        report.Worst("64x128 M=1, linked, cold, PDL on", 0.8, "vllm"),
    ]
    assert found.notes == [
        "2 cells against a peer: 1 won, 1 lost", "1 cells have no kernel of ours",
        "1 cells were not reached in the time given",
    ]  # fmt: skip


def test_a_benchmark_of_schema_1_gives_the_means_that_it_holds():
    path = RECORDS / "h200-bench-skinny-tp8.json"
    held = json.loads(path.read_text())["geometric_means"]
    found = report.summarise(path)
    assert found.kind == "bench" and found.gpu == "NVIDIA H200" and [str(mean.m) for mean in found.means] == list(held)
    for mean in found.means:
        expected = held[str(mean.m)]
        assert mean.cells == expected["cells"]
        assert mean.over_floor == pytest.approx(expected["ours_over_floor"], rel=1e-3)
        assert mean.over_baseline == pytest.approx(expected["ours_over_cublas"], rel=1e-3)


def test_a_check_and_its_failures(tmp_path, lowlat):
    found = report.summarise(RECORDS / "h200-check.json")
    ran = json.loads((RECORDS / "h200-check.json").read_text())["counts"]["kernel"]
    assert found.kind == "check" and found.notes[0].startswith(f"{ran} kernel, 0 failed") and not found.failed
    cells = [{"n": 64, "k": 128, "m": 3, "arch": "sm90", "status": "failed", "reason": "8 of 9 elements"}]
    path = _write(tmp_path / "c.json", cells, counts={"failed": 1})
    assert report.summarise(path).failures == ["sm90 64x128 M=3: 8 of 9 elements"]
    code, out, _ = lowlat("report", path)
    assert code == 1 and "FAILED sm90 64x128 M=3: 8 of 9 elements" in out


def test_a_run_of_the_sanitizer(tmp_path):
    run = {"tool": "racecheck", "kernel": "kda", "errors": 0, "tests": "2 passed", "clean": True}
    found = report.summarise(_write(tmp_path / "s.json", [run, run | {"errors": 3, "clean": False}], kind="sanitizer"))
    assert found.notes == ["kda racecheck: 0 errors, 2 passed"]
    assert found.failures == ["kda racecheck: 3 errors, 2 passed"] and found.failed


def test_a_run_of_the_suite(tmp_path):
    tests = [{"id": "a", "outcome": "passed"}, {"id": "b", "outcome": "failed"}]
    shard = report.summarise(_write(tmp_path / "a.json", [], kind="conformance shard", suite="gpu_sm90", tests=tests))
    assert shard.notes == ["gpu_sm90: 1 passed, 1 failed"] and shard.failures == ["b: failed"]
    cells = [{"n": 64, "k": 128, "m": 3, "arch": "sm90", "status": "failed", "reason": "wrong"}]
    merged = _write(tmp_path / "b.json", cells, kind="conformance", suite="gpu_sm90", tests=[], outcomes={"passed": 9})
    assert report.summarise(merged).notes == ["gpu_sm90: 9 passed"]
    assert report.summarise(merged).failures == ["sm90 64x128 M=3: wrong"]


def test_a_tuning_run(tmp_path):
    def cell(m, winner, over_floor, over_baseline, residual=False):
        shape = {"n": 64, "k": 128, "m": m, "residual": residual, "winner": winner}
        return shape | {"us": over_floor, "floor_us": 1.0, "over_floor": over_floor, "over_baseline": over_baseline}

    winner = {"backend": "skinny", "config": {}}
    cells = [cell(1, winner, 1.0, 0.5), cell(1, winner, 4.0, 0.5), cell(1, winner, 1.5, 0.9, True)]
    cells.append(cell(2, None, None, None))
    excluded = [{"backend": "split_k", "config": {"rows": 8}, "reason": "hung"}]
    found = report.summarise(_write(tmp_path / "t.json", cells, excluded=excluded, not_reached=[[64, 256]]))
    assert found.kind == "tune"
    small = "under 6 MB"
    assert found.means == [report.Mean(small, 1, 2, 2.0, 0.5, 1.5), report.Mean(f"{small}, with residual", 1, 1, 1.5, 0.9, 0.5)]
    assert found.worst[0] == report.Worst("64x128 M=1", 0.9, "baseline")
    kept, excluded, not_reached = found.notes
    assert kept.startswith("3 of 4 measured cells kept") and "hung" in excluded and "1 shapes" in not_reached


@pytest.mark.parametrize(
    "shape, group",
    [((1536, 128), "under 6 MB"), ((2304, 1536), "6 to 20 MB"), ((1536, 7168), "20 to 40 MB"), ((3072, 7168), "40 to 85 MB"),
     ((6288, 7168), "85 MB and more")],
)  # fmt: skip
def test_weights_are_grouped_by_their_size(shape, group):
    assert report.weight_group(*shape) == group


def test_of_several_tuning_runs_the_newest_of_each_cell_counts(tmp_path, lowlat):
    def cell(n, over_floor, **more):
        winner = {"backend": "skinny", "config": {}}
        return {"n": n, "k": 128, "m": 1, "residual": False, "winner": winner, "us": over_floor, "floor_us": 1.0,
                "over_floor": over_floor, "over_baseline": 0.5} | more

    machine = {"gpu": {"name": "NVIDIA H200"}}
    older = _write(tmp_path / "new/a.json", [cell(64, 9.0), cell(32, 2.0)], started="2026-01-01", machine=machine)
    newer = _write(tmp_path / "b.json", [cell(64, 4.0), cell(128, None, winner=None)], started="2026-01-02", machine=machine)
    other = _write(tmp_path / "c.json", [_timed(1, floor=1.0, ours=2.0)], kind="bench")
    for paths in ([older, newer, other], [newer, other, older]):
        (together,) = report.tuned_together(paths)
        assert together.path == "2 tuning runs of kimi_k3 on NVIDIA H200 together" and together.cells == 3
        assert [(mean.cells, mean.over_floor) for mean in together.means] == [(2, pytest.approx(8**0.5, rel=1e-4))]
    assert report.tuned_together([older, other]) == []
    assert "2 tuning runs of kimi_k3 on NVIDIA H200 together" in lowlat("report", tmp_path)[1]
    assert report.tuned_together([older, _write(newer, [cell(64, 4.0)], family="mymodel", machine=machine)]) == []


@pytest.mark.parametrize(
    "fields, family",
    [
        ({"command": "lowlat tune --shape 64x128"}, "kimi_k3"),
        ({"command": "lowlat tune --model glm_5_3_flash --tp 4"}, "glm_5_3_flash"),
        ({"command": "lowlat tune --model glm_5_3_flash --family mymodel"}, "mymodel"),
        ({"command": "lowlat tune --model glm_5_3_flash", "family": "mymodel"}, "mymodel"),
    ],
)
def test_the_family_of_a_tuning_run(fields, family):
    assert report.family_of(fields) == family


def test_a_stack_of_layers_with_and_without_a_kind(tmp_path):
    def cell(m, ratio):
        timings = {"with": {"us": ratio}, "without": {"us": 1.0}}
        return {"m": m, "layers": 8, "timings": timings, "with_over_without": ratio}

    for fields in ({}, {"kind": "layers"}):
        found = report.summarise(_write(tmp_path / "l.json", [cell(1, 0.5), cell(64, 2.0)], **fields))
        assert found.kind == "layers" and found.worst[0] == report.Worst("M = 64", 2.0, "a layer without")
        assert found.notes == ["a layer with the library over one without: 1.000, geometric mean over 2 token counts"]


def test_what_parts_cost(tmp_path):
    def cell(m, chain, **costs):
        return {"n": 64, "k": 128, "m": m, "mode": {"chain": chain}, "costs": costs}

    cells = [cell(1, "linked", wait=0.5, store=0.1), cell(1, "linked", wait=1.0), cell(1, "linked", wait=0.75)]
    found = report.summarise(_write(tmp_path / "p.json", [*cells, cell(64, "back_to_back", wait=-0.1)], kind="parts"))
    assert found.notes == ["back_to_back, M = 64: wait -0.10 us", "linked, M = 1: wait +0.75 us, store +0.10 us"]


def test_host_costs(tmp_path):
    cells = [{"n": 64, "k": 128, "m": 1, "forward_over_f_linear": 1.25}]
    found = report.summarise(_write(tmp_path / "h.json", cells, kind="host", medians={"F.linear": 6.0}))
    assert found.notes == ["F.linear 6"] and found.worst[0].ratio == 1.25


def test_no_more_than_the_worst_are_named(tmp_path):
    cells = [_timed(m, floor=1.0, cublas=1.0, ours=m) for m in range(1, 30)]
    found = report.summarise(_write(tmp_path / "b.json", cells, kind="bench"))
    assert [worst.ratio for worst in found.worst] == [29.0 - i for i in range(report.WORST)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "not JSON"), ("[]", "no record"), ('{"cells": []}', "no record"),
        ('{"schema": 1, "cells": 3}', "no record"),
        ('{"schema": 1, "cells": [{"timings": {"ours": {}}}]}', "cannot be read"),
    ],
)  # fmt: skip
def test_files_that_are_no_records(tmp_path, lowlat, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)
    code, _, err = lowlat("report", path)
    assert code == 2 and said in err and "x.json" in err.replace("\n", "")


def test_a_record_of_another_kind_is_said_to_be_one(tmp_path):
    assert "nothing is known" in report.summarise(_write(tmp_path / "o.json", [{"n": 1}], kind="coverage")).notes[0]


def test_folders_are_searched_and_absent_paths_are_an_error(tmp_path, lowlat):
    _write(tmp_path / "a/b/one.json", [])
    two = _write(tmp_path / "two.json", [])
    (tmp_path / "a/note.txt").write_text("no record")
    assert [path.name for path in report.find_records([tmp_path, two])] == ["one.json", "two.json", "two.json"]
    assert lowlat("report", tmp_path / "absent")[0] == 2
    (tmp_path / "empty").mkdir()
    code, _, err = lowlat("report", tmp_path / "empty")
    assert code == 2 and "no record in" in err


def test_the_command_prints_tables_markdown_and_json(lowlat):
    path = RECORDS / "h200-bench-skinny-tp8.json"
    code, out, _ = lowlat("report", path)
    assert code == 0 and "means by M" in out and "7168x14336 M=2" in out
    code, out, _ = lowlat("report", "--markdown", RECORDS)
    assert code == any(report.summarise(path).failed for path in RECORDS.glob("*.json"))
    assert "| back_to_back, cold, PDL on | 1 | 11 | 1.208 | 0.713 |" in out
    assert out.count("## ") == len(list(RECORDS.glob("*.json"))) + 1, "each record, and the tuning runs together"
    code, out, _ = lowlat("report", "--json", path)
    assert code == 0 and json.loads(out)[0]["means"][0]["cells"] == 11
