"""What the README says of hardware is what the records say, and what it links to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance import sanitize
from conformance.cases import table_cases
from lowlat_gemm.arch import SM90

ROOT = Path.cwd()  # pytest's root, with and without Bazel
README = (ROOT / "README.md").read_text()
RECORD = "hw_matrix/records/sm90/h200-tune-k3-tp8-tp4.json"


def test_every_link_into_the_repository_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_cells_that_the_readme_calls_measured_are_in_the_record():
    """Every measured cell of the SM90 table is a winner of the run that the README names, with that run's config."""
    record = json.loads((ROOT / RECORD).read_text())
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["excluded"] == []
    won = {
        (c["n"], c["k"], c["m"], c["residual"]): (c["winner"]["backend"], c["winner"]["config"])
        for c in record["cells"]
        if c["winner"]
    }
    measured = {
        (case.n, case.k, case.m, case.residual): (case.cell.backend, dict(case.cell.config))
        for case in table_cases(SM90)
        if case.cell.provenance.kind == "measured"
    }
    said = int(re.search(r"SM90: (\d+) measured cells", README)[1])
    assert said == len(measured) == len(won), f"the README says {said}, the table {len(measured)}, the record {len(won)}"
    assert measured == won, [key for key in measured if measured[key] != won.get(key)]
    rows = int(re.search(r"SM90: (\d+) rows, all of TP8 and two of TP4, measured", README)[1])
    assert rows == len({key[:2] for key in measured})


def test_the_means_of_the_readme_are_those_of_the_record():
    means = json.loads((ROOT / RECORD).read_text())["geometric_means"]
    table = re.search(r"\| M \|(.+)\|\n\|[-|]+\n\| x floor \|(.+)\|\n\| x cuBLAS \|(.+)\|\n", README)
    tokens, floor, baseline = ([cell.strip() for cell in row.split("|")] for row in table.groups())
    assert len(tokens) == len(floor) == len(baseline) >= 5
    for m, over_floor, over_baseline in zip(tokens, floor, baseline):
        want = f"{means[m]['over_floor']:.3f}", f"{means[m]['over_baseline']:.3f}"
        assert (over_floor, over_baseline) == want, f"M = {m}: the README says {over_floor, over_baseline}, the record {want}"


def test_the_sanitizer_found_nothing():
    record = json.loads((ROOT / "hw_matrix/records/sm90/h200-sanitizer.json").read_text())
    assert {(run["kernel"], run["tool"]) for run in record["cells"]} == {(k, t) for k in sanitize.PARTS for t in sanitize.TOOLS}
    assert all(run["clean"] and run["errors"] == 0 for run in record["cells"]), record["cells"]


def test_records_name_their_commit_and_no_place_of_a_machine():
    records = sorted((ROOT / "hw_matrix/records").rglob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{40}", record["commit"]), f"{path}: commit {record['commit']}"
        assert not re.search(r"(^|\s)/", record["command"]), f"{path}: {record['command']}"
