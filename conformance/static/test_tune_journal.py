"""A journal gives back what was put into it, to runs on the same kind of machine and code, however it was cut."""

from __future__ import annotations

import json

import pytest

from conformance.fakes import device_of
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.jobs import BACK_TO_BACK, FLOOR, Job, JobResult
from lowlat_cli.tuning.journal import Journal, run_key
from lowlat_gemm.arch import SM90, SM100
from lowlat_gemm.kernels.split_k import SplitKConfig

A, B = (Candidate("split_k", SplitKConfig(64, 8, 4, stages)) for stages in (4, 5))
VERSIONS = {"torch": "2.13.0", "vllm": None}
KEY = run_key(SM90, device_of(SM90), VERSIONS)


def job(m: int) -> Job:
    return Job("final", 24, 64, m, False, 1, 8, 5, (BACK_TO_BACK,), (A, B))


def result(us: float) -> JobResult:
    return JobResult({A: {BACK_TO_BACK: us}}, {FLOOR: 2.0, "mm": 9.0})


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, KEY)
    for m in (1, 2, 3):
        journal.add(job(m), result(float(m)))
    journal.exclude(B, "wrong: why", job(3))
    journal.close()
    return path


def test_what_was_measured_is_known_again(written):
    again = Journal(written, json.loads(json.dumps(KEY)))
    assert [again.result(job(m)) for m in (1, 2, 3, 4)] == [result(1.0), result(2.0), result(3.0), None]
    assert again.excluded == {B: "wrong: why"} and again.foreign == 0


def test_a_journal_that_was_cut_at_any_byte_gives_its_whole_lines(written, tmp_path):
    data = written.read_bytes()
    for cut in range(len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut])
        lines = data[:cut].count(b"\n")
        journal = Journal(path, KEY)
        found = [m for m in (1, 2, 3) if journal.result(job(m)) == result(float(m))]
        assert found == [m for m in (1, 2, 3) if m < lines], f"cut at {cut}"
        journal.add(job(9), result(9.0))
        journal.close()
        assert Journal(path, KEY).result(job(9)) == result(9.0), f"cut at {cut}: what came after is lost"


@pytest.mark.parametrize(
    "key",
    [
        run_key(SM100, device_of(SM90), VERSIONS),
        run_key(SM90, device_of(SM90, sm_count=114), VERSIONS),
        run_key(SM90, device_of(SM90, bandwidth_gbs=3352.0), VERSIONS),
        run_key(SM90, device_of(SM90), VERSIONS | {"torch": "2.14.0"}),
        KEY | {"kernels": "0" * 24},
    ],
)
def test_another_machine_or_code_does_not_use_it(written, key):
    journal = Journal(written, key)
    assert journal.result(job(1)) is None and not journal.excluded and journal.foreign == 5
    journal.add(job(1), result(7.0))
    journal.close()
    assert Journal(written, KEY).result(job(1)) == result(1.0)


def test_the_key_is_of_the_kind_of_machine():
    assert run_key(SM90, device_of(SM90, bandwidth_gbs=4814.2), {"torch": "2.13.0"}) == KEY


@pytest.mark.parametrize("line", ["no json", "[]", '{"job": 1}'])
def test_a_file_that_is_no_journal_is_not_written_to(tmp_path, line):
    path = tmp_path / "notes"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="notes, line 1"):
        Journal(path, KEY)
    assert path.read_text() == f"{line}\n"
