"""The record of a conformance run says what was judged, and a cell that was to be judged and was not fails the run."""

from __future__ import annotations

import json

import pytest

from conformance.cases import kernel_cases, table_cases
from conformance.fakes import run_pytest
from lowlat_gemm.arch import SM90

SAMPLE = """
import os
import pytest
from lowlat_gemm.reference import ParityReport

WRONG, LOST = os.environ.get("WRONG"), os.environ.get("LOST")

@pytest.fixture
def kernel(case):
    if LOST and case.m == 2:
        raise RuntimeError("does not compile")

@pytest.mark.judges_cells
def test_cell(case, kernel, cell_result):
    report = ParityReport(not (WRONG and case.m == 1), 10, 1, 0.25, 0.125, "[0, 0]")
    cell_result(case, report)
    assert report.ok
"""


CASES = [case for case in kernel_cases(SM90) if (case.n, case.k) == (1536, 7168)][:3]
OPTIONS = ("--arch", "sm90", "-k", " or ".join(map(str, CASES)))


def _run(folder, *options, **environ):
    done = run_pytest(folder, SAMPLE, *OPTIONS, *options, **environ)
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("**/*.json"))]
    return done, records


def test_all_judged(tmp_path):
    done, (record,) = _run(tmp_path, "--record", "r.json")
    assert done.returncode == 0, done.stdout
    assert [(c["n"], c["k"], c["m"], c["status"], c["worst_ulps"], c["worst_share"]) for c in record["cells"]] == [
        (case.n, case.k, case.m, "kernel", 0.25, 0.125) for case in CASES
    ]
    assert record["cells"][0]["config"] == dict(CASES[0].cell.config) and record["counts"]["kernel"] == 3
    built, all_cells = len(kernel_cases(SM90)), len(table_cases(SM90))
    assert f"3 of {built} cells with a kernel ran on it" in done.stdout, done.stdout
    assert f"({all_cells} in its tables, {all_cells - built} on backends that are not built)" in done.stdout, (
        done.stdout
    )


def test_a_wrong_cell_is_recorded_as_failed(tmp_path):
    done, (record,) = _run(tmp_path, "--record", "r.json", WRONG="1")
    assert done.returncode == 1 and record["counts"]["failed"] == 1, done.stdout
    assert [c["status"] for c in record["cells"] if c["m"] == 1] == ["failed"]


def test_a_cell_whose_test_ends_early_is_recorded_as_failed(tmp_path):
    done, (record,) = _run(tmp_path, "--record", "r.json", LOST="1")
    assert done.returncode == 1 and record["counts"] == {**record["counts"], "kernel": 2, "failed": 1}, done.stdout
    lost = [c for c in record["cells"] if c["status"] == "failed"]
    assert [c["m"] for c in lost] == [2] and "ended before a verdict" in lost[0]["reason"]


@pytest.mark.parametrize("variable", ["LOWLAT_RECORD_DIR", "TEST_UNDECLARED_OUTPUTS_DIR"])
def test_each_shard_writes_a_record_of_its_own(tmp_path, variable):
    (tmp_path / "out").mkdir()
    found = set()
    for index in range(2):
        shard = {"TEST_TOTAL_SHARDS": "2", "TEST_SHARD_INDEX": str(index), variable: str(tmp_path / "out")}
        assert run_pytest(tmp_path, SAMPLE, *OPTIONS, **shard).returncode == 0
        record = json.loads((tmp_path / "out" / f"tests_sm90-{index}-of-2.json").read_text())
        found |= {(c["n"], c["k"], c["m"]) for c in record["cells"]}
    assert found == {(case.n, case.k, case.m) for case in CASES}
