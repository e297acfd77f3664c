"""The hardware matrix: runners and the files made from them, what a record counts for, joining shards, the command."""

from __future__ import annotations

import copy
import json
import re
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.cases import kernel_cases, table_cases
from conformance.fake_records import COMMIT, cell_of, record_of, shards_of
from conformance.sharding import digest
from hw_matrix import __main__ as command
from hw_matrix.coverage import MEANING, PROVENANCE_MEANING, Proof, Record, cell_states, counts
from hw_matrix.merge import MergeError, file_name, find_shards, merge
from hw_matrix.runners import FILE, RunnersError, load_runners
from hw_matrix.summary import summarize
from hw_matrix.workflow import made_files, shard_matrix
from lowlat_gemm.arch import ARCHES, SM90, SM103
from lowlat_gemm.tables import PROVENANCE_KINDS

ROOT = Path.cwd()  # pytest's root, with and without Bazel
RUNNERS = load_runners()
# --- runners and what is made from them


def test_every_generation_has_a_runner_entry_and_the_h200_is_there():
    assert list(RUNNERS) == [arch.name for arch in ARCHES]
    assert RUNNERS["sm90"].claims_hardware and RUNNERS["sm90"].gpu == "NVIDIA H200"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 1", "count = -1", "sm90: count: found -1, need 0 or more"),
        ("count = 1", 'count = "1"', "sm90: count: found '1', need a int"),
        ("shards = 1", "", "sm90: found count, exec"),
        ('gpu = "NVIDIA H200"', 'gpu = ""', "sm90: gpu: found ''"),
        ("[sm107]", "[sm120]", "need exactly sm90, sm100, sm103, sm107"),
        ('driver = "580"', "driver = 580", "found 580, need text"),
    ],
)
def test_a_broken_runners_file_is_refused_with_its_place(tmp_path, old, new, message):
    (tmp_path / "runners.toml").write_text(FILE.read_text().replace(old, new, 1))
    with pytest.raises(RunnersError, match=re.escape(message)):
        load_runners(tmp_path / "runners.toml")


@pytest.mark.parametrize("path", made_files(RUNNERS), ids=str)
def test_the_checked_in_file_is_what_is_made_from_the_runners(path):
    assert (ROOT / path).read_text() == made_files(RUNNERS)[path], (
        f"{path}: run ./tools/bazelw run //hw_matrix -- generate"
    )


def test_the_workflow_has_a_job_for_every_shard_of_every_runner_that_is_there(tmp_path):
    text = FILE.read_text().replace("count = 0", "count = 2", 1)
    (tmp_path / "runners.toml").write_text(text)
    jobs = shard_matrix(load_runners(tmp_path / "runners.toml"))
    assert [(job["arch"], job["shard"]) for job in jobs] == [("sm90", "0/1"), ("sm100", "0/2"), ("sm100", "1/2")]


def test_the_compiler_of_the_runners_is_that_of_the_lock():
    locked = re.search(r"^nvidia-cutlass-dsl-libs-cu13==(\S+)", (ROOT / "requirements/base.lock").read_text(), re.M)[1]
    assert {runner.toolchain["nvidia-cutlass-dsl-libs-cu13"] for runner in RUNNERS.values()} == {locked}


@pytest.mark.parametrize(
    ("wanted", "found", "fits"),
    [("580", "580.159", True), ("58", "580.1", False), ("4.8.1", "4.8.1", True), ("4", None, False)],
)
def test_a_version_is_whole_or_begins_as_wanted(wanted, found, fits):
    runner = replace(RUNNERS["sm90"], toolchain={"driver": wanted})
    assert (runner.toolchain_problem({"driver": found}) is None) is fits


# --- what a record counts for


def test_the_words_are_closed_and_each_has_a_meaning():
    assert set(MEANING) == set(Proof) and all(MEANING.values())
    assert tuple(PROVENANCE_MEANING) == PROVENANCE_KINDS


CASE = kernel_cases(SM90)[0]
CELLS = len(table_cases(SM90))


def state_after(*cells_and_changes):
    records = [Record(str(i), record_of([cell], **changes)) for i, (cell, changes) in enumerate(cells_and_changes)]
    return next(s for s in cell_states(SM90, records, RUNNERS["sm90"]) if s.case == CASE)


CPU = {"gpu": None}


@pytest.mark.parametrize(
    ("evidence", "proof"),
    [
        ([], Proof.NONE),
        ([(cell_of(CASE), {})], Proof.HARDWARE),
        ([(cell_of(CASE), CPU)], Proof.NONE),
        ([(cell_of(CASE, "compiled"), CPU)], Proof.COMPILED),
        ([(cell_of(CASE, "model"), CPU), (cell_of(CASE, "compiled"), CPU)], Proof.MODEL),
        ([(cell_of(CASE, "reference"), CPU)], Proof.NONE),
        ([(cell_of(CASE), {}), (cell_of(CASE, "failed"), {})], Proof.FAILED),
        ([(cell_of(CASE, "failed"), {}), (cell_of(CASE), {})], Proof.HARDWARE),
        ([(cell_of(CASE), {}), (cell_of(CASE, "waived"), {})], Proof.WAIVED),
        ([(cell_of(CASE), {}), (cell_of(CASE, "compiled"), CPU)], Proof.HARDWARE),
        ([(cell_of(CASE, config={"block_size": 1}), {})], Proof.NONE),
        ([(cell_of(CASE, backend="another"), {})], Proof.NONE),
        ([(cell_of(CASE, arch="sm103"), {})], Proof.NONE),
        ([(cell_of(CASE, residual=True), {})], Proof.NONE),
    ],
)
def test_what_is_shown_of_a_cell(evidence, proof):
    assert state_after(*evidence).proof is proof


def test_a_generation_with_a_runner_claims_hardware_and_one_without_does_not():
    assert all(state.claims for state in cell_states(SM90, [], RUNNERS["sm90"]))
    assert not any(state.claims for state in cell_states(SM103, [], RUNNERS["sm103"]))


def test_the_records_of_the_repository_are_read_and_counted():
    summary = summarize(ROOT / "hw_matrix/records")
    for generation in summary.generations:
        assert sum(generation.proofs.values()) == len(generation.states) == len(table_cases(generation.arch))
        assert sum(generation.provenances.values()) == len(generation.states)
    assert summary.generations[0].proofs[Proof.HARDWARE], "not one cell of SM90 is in a record as the table has it"


# --- joining shards


@pytest.fixture
def sources(tmp_path):
    """A folder of suites, each of the one file that the shards here are of."""
    for suite in ("gpu", "crosscompile", "static"):
        (tmp_path / "repository/conformance" / suite).mkdir(parents=True)
        (tmp_path / "repository/conformance" / suite / "test_x.py").touch()
    return tmp_path / "repository/conformance"


def test_whole_shards_are_one_record(tmp_path, sources):
    """From folders and from the archive that Bazel makes of a test's outputs."""
    shards = shards_of()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.json").write_text(json.dumps(shards[0].data))
    (tmp_path / "a" / "other.json").write_text('{"kind": "bench"}')
    with zipfile.ZipFile(tmp_path / "outputs.zip", "w") as archive:
        for shard in shards[1:]:
            archive.writestr(f"{shard.name}.json", json.dumps(shard.data))
    (record,) = merge(find_shards([tmp_path]), RUNNERS, SM90, sources)
    assert record["shards"] == 3 and record["outcomes"] == {"passed": len(table_cases(SM90))} and record["tests"] == []
    assert counts(cell_states(SM90, [Record("r", record)], RUNNERS["sm90"]))[Proof.HARDWARE] == len(table_cases(SM90))
    assert file_name(record) == "gpu-2026-12-01-0123456.json"


def _fail(shards):
    shards[1].data["tests"][0]["outcome"] = "failed"


def _drop_test(shards):
    shards[1].data["tests"].pop()


def _double_test(shards):
    shards[1].data["tests"].append(shards[0].data["tests"][0])


def _reindex(shards):
    shards[2].data["shard"]["index"] = 1


def _other_collection(shards):
    shards[2].data["shard"]["digest"] = "0"


def _drop_cell(shards):
    shards[0].data["cells"].pop()


def _not_run(shards):
    shards[0].data["tests"][0]["outcome"] = "not run"


def _skip(shards):
    shards[0].data["tests"][0]["outcome"] = "skipped"


BROKEN = {
    "a missing shard": (lambda s: s.pop(), "gpu_sm90: need each of shards 0 to 2 once, found 0, 1"),
    "a shard twice": (_reindex, "found 0, 1, 1"),
    "another collection": (_other_collection, "2 different sets of collected tests"),
    "a test left out": (_drop_test, "some were left out or ran twice"),
    "a test twice": (_double_test, "some were left out or ran twice"),
    "a failure": (_fail, "1 tests did not pass: conformance/gpu/test_x.py::test_a["),
    "a test not run": (_not_run, "1 tests did not pass"),
    "a skip": (_skip, "1 tests did not pass"),
    "a cell left out": (_drop_cell, "cells of sm90 are not hardware-run: kimi_k3-sm90-"),
    "nothing at all": (lambda s: s.clear(), "no record of gpu_sm90 among no shards at all"),
    "another GPU": (
        lambda s: s[0].data["machine"].update(gpu={"name": "NVIDIA H100"}),
        "ran on NVIDIA H100, the runner of sm90 has NVIDIA H200",
    ),
    "no GPU": (lambda s: s[0].data["machine"].update(gpu=None), "ran on no GPU"),
    "another driver": (lambda s: s[0].data["machine"].update(driver="570.1"), "driver is 570.1, runners.toml has 580"),
    "another compiler": (lambda s: s[0].data["versions"].clear(), "nvidia-cutlass-dsl-libs-cu13 is None"),
    "two commits": (lambda s: s[0].data.update(commit=COMMIT[::-1]), "shards of 2 commits"),
    "local changes": (lambda s: [x.data.update(commit=f"{COMMIT}-dirty") for x in s], "without local changes"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_not_whole_is_not_merged(how, sources):
    shards = [Record(shard.name, copy.deepcopy(shard.data)) for shard in shards_of()]
    BROKEN[how][0](shards)
    with pytest.raises(MergeError) as caught:
        merge(shards, RUNNERS, SM90, sources)
    assert BROKEN[how][1] in str(caught.value), str(caught.value)


def test_a_part_of_a_suite_is_not_the_suite(sources):
    """Shards of a run of some files agree with one another: what there is to run is in the repository."""
    (sources / "gpu/test_y.py").touch()
    with pytest.raises(MergeError, match="gpu_sm90: no test of test_y.py ran"):
        merge(shards_of(), RUNNERS, SM90, sources)
    with pytest.raises(MergeError, match="gpu_sm90: .*nowhere.conformance.gpu: no test files there to compare with"):
        merge(shards_of(), RUNNERS, SM90, sources.parent / "nowhere/conformance")


def test_a_target_of_one_file_elsewhere_may_be_among_the_shards(sources):
    """tools/bazel: two targets of a file each, which a run of everything leaves records of."""
    (shard,) = shards_of(SM90, total=1, status="reference", suite="bazel", gpu=None)
    for test in shard.data["tests"]:
        test["id"] = test["id"].replace("conformance/bazel", "tools/bazel")
    shard.data["shard"]["digest"] = digest(test["id"] for test in shard.data["tests"])
    assert len(merge([*shards_of(), shard], RUNNERS, SM90, sources)) == 1


def test_a_waived_cell_ran(sources):
    shards = shards_of(status="waived")
    for shard in shards:
        for test in shard.data["tests"]:
            test["outcome"] = "waived"
    (record,) = merge(shards, RUNNERS, SM90, sources)
    assert record["outcomes"] == {"waived": CELLS} and len(record["tests"]) == CELLS


def test_without_a_gpu_the_cross_compile_suite_is_joined_and_every_suite_must_be_whole(sources):
    compiled = shards_of(SM103, status="compiled", suite="crosscompile", gpu=None)
    (record,) = merge(compiled, RUNNERS, SM103, sources, with_gpu=False)
    assert record["counts"]["compiled"] == len(table_cases(SM103)) and file_name(record).startswith("crosscompile-")
    with pytest.raises(MergeError, match="no record of gpu_sm103 among crosscompile_sm103"):
        merge(compiled, RUNNERS, SM103, sources)
    static = shards_of(SM103, status="reference", suite="static", gpu=None)[:2]
    with pytest.raises(MergeError, match="static_sm103: need each of shards 0 to 2 once, found 0, 1"):
        merge(compiled + static, RUNNERS, SM103, sources, with_gpu=False)


# --- the command


@pytest.fixture
def hw_matrix(monkeypatch, capsys, sources):
    """Runs the command in this process, in a repository of its own: (exit code, stdout, stderr)."""
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(sources.parent))
    monkeypatch.setattr(command.OUT, "width", 200)
    monkeypatch.setattr(command.ERR, "width", 200)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hw_matrix", *map(str, arguments)])
        try:
            command.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run


def write_shards(folder: Path, shards: list[Record]) -> Path:
    folder.mkdir()
    for shard in shards:
        (folder / f"{shard.name}.json").write_text(json.dumps(shard.data))
    return folder


def test_status_is_red_until_every_claimed_cell_has_a_record(hw_matrix, tmp_path):
    records = tmp_path / "records"
    code, out, _ = hw_matrix("status", "--records", records)
    assert code == 1 and f"0 of {CELLS} cells that claim hardware have a record" in out
    assert f"... and {CELLS - command.NAMED} more cells of sm90" in out
    shards = write_shards(tmp_path / "shards", shards_of())
    code, out, err = hw_matrix("merge", "--arch", "sm90", shards, "--records", records)
    assert code == 0 and f"3 shards, {CELLS} passed" in out, err
    code, out, _ = hw_matrix("status", "--records", records)
    assert code == 0 and f"{CELLS} of {CELLS} cells that claim hardware have a record" in out
    path = next((records / "sm90").glob("*.json"))
    path.write_text(path.read_text().replace('"status": "kernel"', '"status": "failed"', 1))
    code, out, _ = hw_matrix("status", "--records", records)
    assert code == 1 and f"{CELLS - 1} of {CELLS} cells" in out and "(failed)" in out


def test_a_merge_that_is_refused_writes_nothing_and_says_why(hw_matrix, tmp_path):
    shards = write_shards(tmp_path / "shards", shards_of()[:2])
    code, out, err = hw_matrix("merge", "--arch", "sm90", shards, "--records", tmp_path / "records")
    assert (
        code == 1
        and "not merged: gpu_sm90: need each of shards 0 to 2 once" in err
        and not (tmp_path / "records").exists()
    )


def test_a_red_run_is_kept_as_one_when_that_is_asked_for(hw_matrix, tmp_path):
    made, records = shards_of(), tmp_path / "records"
    _fail(made)
    failed = next(test["id"] for shard in made for test in shard.data["tests"] if test["outcome"] == "failed")
    shards = write_shards(tmp_path / "shards", made)
    assert hw_matrix("merge", "--arch", "sm90", shards, "--records", records)[0] == 1 and not records.exists()
    code, out, err = hw_matrix("merge", "--arch", "sm90", "--red", shards, "--records", records)
    assert code == 1 and f"{CELLS - 1} passed" in out and "1 failed" in out
    assert f"red: 1 tests did not pass: {failed}" in err
    (path,) = (records / "sm90").glob("*.json")
    assert [test["id"] for test in json.loads(path.read_text())["tests"]] == [failed]
    made[1].data["cells"].pop()  # nothing else is let through
    shards = write_shards(tmp_path / "fewer", made)
    code, out, err = hw_matrix("merge", "--arch", "sm90", "--red", shards, "--records", tmp_path / "others")
    assert code == 1 and "cells of sm90 are not hardware-run" in err and not (tmp_path / "others").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "--arch", "sm91", "."), "unknown arch 'sm91'"),
        (("merge", "--arch", "sm90", "nowhere"), "nowhere is not there"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(hw_matrix, arguments, message):
    code, out, err = hw_matrix(*arguments)
    assert code == 2 and message in err and len(err.splitlines()) == 1
