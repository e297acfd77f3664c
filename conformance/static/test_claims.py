"""What the README says of hardware is what the records say, and what it links to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from conformance import sanitize
from conformance.cases import table_cases
from lowlat_cli import report
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.kernels.registry import backend
from lowlat_gemm.models import projection_shapes

ROOT = Path.cwd()  # pytest's root, with and without Bazel
README = (ROOT / "README.md").read_text()
TUNED = sorted((ROOT / "hw_matrix/records/sm90").glob("h200-tune-k3-*.json"))


def test_every_link_into_the_repository_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_cells_that_the_readme_calls_measured_are_in_the_records():
    """Every measured cell of the SM90 table is a winner of the newest run that measured it, with that run's config."""
    records = [json.loads(path.read_text()) for path in TUNED]
    assert all(record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["excluded"] == [] for record in records)
    cells = report.join_tuned(records)["cells"]
    won = {
        (c["n"], c["k"], c["m"], c["residual"]): (c["winner"]["backend"], c["winner"]["config"])
        for c in cells
        if c["winner"]
    }
    measured = {
        (case.n, case.k, case.m, case.residual): (case.cell.backend, dict(case.cell.config))
        for case in table_cases(SM90)
        if case.cell.provenance.kind == "measured"
    }
    said = int(re.search(r"SM90: (\d+) measured cells", README)[1])
    assert said == len(measured) == len(won), f"the README says {said}, the table {len(measured)}, the records {len(won)}"
    assert measured == won, [key for key in measured if measured[key] != won.get(key)]
    shapes = {key[:2] for key in measured}
    rows, sizes = re.search(r"SM90: (\d+) rows, all of ((?:TP\d+(?:, | and )?)+), measured", README).groups()
    assert int(rows) == len(shapes)
    missing = {
        (shape.n, shape.k) for tp in re.findall(r"TP(\d+)", sizes) for shape in projection_shapes("kimi_k3", int(tp))
    } - shapes
    assert not missing, f"{sizes}: {missing} have no row"
    lost, all_cells = map(int, re.search(r"(\d+) of (\d+) measured\s+cells, all above 16 tokens", README).groups())
    without = [c["m"] for c in cells if not c["winner"]]
    assert (lost, all_cells) == (len(without), len(cells)) and min(without) > 16


def test_the_means_of_the_readme_are_those_of_the_records():
    (together,) = report.tuned_together(TUNED)
    head, *rows = re.findall(r"^\| (weight|(?:under )?\d+ .*?MB.*?) \| (.+) \|$", README, re.MULTILINE)
    tokens = [int(word.removeprefix("M = ")) for word in head[1].split(" | ")[1:]]
    groups = list(dict.fromkeys(mean.group for mean in together.means if "residual" not in mean.group))
    assert len(tokens) >= 5 and [name for name, _ in rows] == groups
    for name, row in rows:
        means = {mean.m: mean for mean in together.means if mean.group == name}
        shapes, *ratios = row.split(" | ")
        assert int(shapes) == max(mean.cells for mean in means.values()), name
        for m, said in zip(tokens, ratios, strict=True):
            want = f"{means[m].over_floor:.3f} / {means[m].over_baseline:.3f}"
            assert said == want, f"{name}, M = {m}: the README says {said}, the records {want}"


def test_flashinfer_is_dispatched_where_a_record_shows_its_kernel_right():
    record = json.loads((ROOT / "hw_matrix/records/sm90/h200-flashinfer.json").read_text())
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["versions"]["flashinfer-python"]
    ran = {test["id"] for test in record["tests"] if test["outcome"] == "passed" and "[tinygemm-default]" in test["id"]}
    assert len(ran) == 2 and len(record["tests"]) == sum(test["outcome"] == "passed" for test in record["tests"])
    assert [arch for arch in ARCHES if backend("flashinfer", arch)] == [SM90]


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
