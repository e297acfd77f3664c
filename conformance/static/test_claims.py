"""What the README says of hardware is what the records say, and what it links to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance.cases import kernel_cases
from lowlat_gemm.arch import SM90

ROOT = Path.cwd()  # pytest's root, with and without Bazel
README = (ROOT / "README.md").read_text()
RECORD = "hw_matrix/records/sm90/h200-check.json"


def test_every_link_into_the_repository_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_cells_that_the_readme_calls_run_are_in_the_record():
    record = json.loads((ROOT / RECORD).read_text())
    ran = {(c["n"], c["k"], c["m"], c["residual"]) for c in record["cells"] if c["status"] == "kernel"}
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["counts"]["failed"] == 0
    said = int(re.search(r"SM90: all (\d+) `skinny` cells", README)[1])
    cells = {(case.n, case.k, case.m, case.residual) for case in kernel_cases(SM90) if case.cell.backend == "skinny"}
    assert said == len(cells) and cells - ran == set(), f"the README says {said}, {len(cells)} are there, {len(ran)} ran"


def test_records_name_their_commit_and_no_place_of_a_machine():
    records = sorted((ROOT / "hw_matrix/records").rglob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{40}", record["commit"]), f"{path}: commit {record['commit']}"
        assert not re.search(r"(^|\s)/", record["command"]), f"{path}: {record['command']}"
