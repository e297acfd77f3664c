"""What the README says of hardware is what the records say, and what it links to is there."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from conformance import sanitize
from conformance.cases import table_cases
from hw_matrix.coverage import Record, cell_states
from hw_matrix.runners import load_runners
from lowlat_cli import report
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.kernels.registry import backend
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.tables import available_tables

ROOT = Path.cwd()  # pytest's root, with and without Bazel
README = (ROOT / "README.md").read_text()
RECORDS = ROOT / "hw_matrix/records/sm90"
#: The tuning runs of the families that the package has a table of.
FAMILIES = sorted(family for family, arch in available_tables() if arch == "sm90")
TUNED = {
    family: [path for path in sorted(RECORDS.glob("h200-tune-*.json")) if report.family_of(report.read_record(path)) == family]
    for family in FAMILIES
}


def number(pattern: str) -> list[int]:
    """The numbers that the README says where ``pattern`` matches."""
    return [int(word.replace(",", "")) for word in re.search(pattern, README).groups()]


def said_of(name: str) -> dict:
    return json.loads((RECORDS / name).read_text())


def test_every_link_into_the_repository_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_measured_cells_are_in_the_records(family):
    """Every measured cell of an SM90 table is a winner of the newest run that measured it, with that run's config."""
    records = [report.read_record(path) for path in TUNED[family]]
    assert all(record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["excluded"] == [] for record in records)
    won = {
        (c["n"], c["k"], c["m"], c["residual"]): (c["winner"]["backend"], c["winner"]["config"])
        for c in report.join_tuned(records)["cells"]
        if c["winner"]
    }
    measured = measured_cells(family)
    assert len(measured) == len(won), f"{family}: the table has {len(measured)}, the records {len(won)}"
    assert measured == won, [key for key in measured if measured[key] != won.get(key)]


def measured_cells(family: str) -> dict:
    return {
        (case.n, case.k, case.m, case.residual): (case.cell.backend, dict(case.cell.config))
        for case in table_cases(SM90)
        if case.family == family and case.cell.provenance.kind == "measured"
    }


def test_the_readme_counts_what_was_measured():
    cells = [cell for family in FAMILIES for cell in report.join_tuned(map(report.read_record, TUNED[family]))["cells"]]
    (said,) = number(r"SM90: ([\d,]+) measured cells")
    assert said == sum(len(measured_cells(family)) for family in FAMILIES)
    without = [cell["m"] for cell in cells if not cell["winner"]]
    assert number(r"([\d,]+) of ([\d,]+) measured\s+cells, all above 16 tokens") == [len(without), len(cells)]
    assert min(without) > 16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_readme_says_which_shapes_have_rows(family):
    found = re.search(rf"{family} (\d+) rows, all of ((?:TP\d+(?:, | and )?)+)(?: but ((?:\d+x\d+(?: and )?)+))?", README)
    rows, sizes, without = found.groups()
    shapes = {key[:2] for key in measured_cells(family)}
    assert int(rows) == len(shapes)
    wanted = {(s.n, s.k) for tp in re.findall(r"TP(\d+)", sizes) for s in projection_shapes(family, int(tp))}
    said = {tuple(map(int, shape.split("x"))) for shape in re.findall(r"\d+x\d+", without or "")}
    assert wanted - shapes == said, f"{family}, {sizes}: no row for {wanted - shapes}, the README says {said}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_means_of_the_readme_are_those_of_the_records(family):
    joined = report.join_tuned(map(report.read_record, TUNED[family]))
    together = report.summarise_record(family, joined)
    head, table = re.search(rf"^\| {family} \| shapes \| (.+) \|\n\|[-|]+\|\n((?:\|.+\|\n)+)", README, re.MULTILINE).groups()
    tokens = [int(word.removeprefix("M = ")) for word in head.split(" | ")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    groups = list(dict.fromkeys(mean.group for mean in together.means if "residual" not in mean.group))
    assert len(tokens) >= 5 and [name for name, *_ in rows] == groups
    for name, shapes, *ratios in rows:
        means = {mean.m: mean for mean in together.means if mean.group == name}
        assert int(shapes) == max(mean.cells for mean in means.values()), name
        for m, said in zip(tokens, ratios, strict=True):
            lost = f" ({means[m].cells})" if means[m].cells < int(shapes) else ""
            want = f"{means[m].over_floor:.3f} / {means[m].over_baseline:.3f}{lost}"
            assert said == want, f"{family}, {name}, M = {m}: the README says {said}, the records {want}"


def test_what_the_readme_says_of_layers_hosts_and_starts():
    layers = {cell["m"]: cell for cell in said_of("h200-layers-tp8.json")["cells"]}
    assert sorted(layers) == list(range(1, 65))
    said = re.search(r"takes ([\d.]+) of the time at M = 1, ([\d.]+) at M = 16 and ([\d.]+) at M = 64", README).groups()
    ratios = {m: cell["with_over_without"] for m, cell in layers.items()}
    assert list(said) == [f"{ratios[m]:.3f}" for m in (1, 16, 64)]
    mean, worst, where = re.search(r"mean over 1 to 64 ([\d.]+), worst ([\d.]+) at M = (\d+)", README).groups()
    assert mean == f"{statistics.geometric_mean(ratios.values()):.3f}"
    assert (worst, int(where)) == (f"{max(ratios.values()):.3f}", max(ratios, key=ratios.get))
    assert max(ratios.values()) < 1, "slower in a layer than without the library"
    host = said_of("h200-host-tp8.json")["medians"]["module_over_module"]
    assert re.search(r"costs the host ([\d.]+) of", README)[1] == f"{host:.3f}"
    starts = {cell["way"]: cell for cell in said_of("h200-startup-tp8.json")["cells"]}
    assert starts["archive"]["late"] == starts["archive"]["compiles"] == 0
    said = re.search(r"starts in ([\d.]+) s\s+with an archive of kernels instead of ([\d.]+) s", README).groups()
    assert list(said) == [f"{starts[way]['total']:.1f}" for way in ("archive", "nothing")]


def test_flashinfer_is_dispatched_where_a_record_shows_its_kernel_right():
    record = json.loads((ROOT / "hw_matrix/records/sm90/h200-flashinfer.json").read_text())
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200" and record["versions"]["flashinfer-python"]
    ran = {test["id"] for test in record["tests"] if test["outcome"] == "passed" and "[tinygemm-default]" in test["id"]}
    assert len(ran) == 2 and len(record["tests"]) == sum(test["outcome"] == "passed" for test in record["tests"])
    assert [arch for arch in ARCHES if backend("flashinfer", arch)] == [SM90]


@pytest.mark.parametrize("name, kernels", [("h200-sanitizer", list(sanitize.PARTS)), ("h200-sanitizer-split-k", ["split_k"])])
def test_the_sanitizer_found_nothing(name, kernels):
    record = said_of(f"{name}.json")
    assert {(run["kernel"], run["tool"]) for run in record["cells"]} == {(k, t) for k in kernels for t in sanitize.TOOLS}
    assert all(run["clean"] and run["errors"] == 0 for run in record["cells"]), record["cells"]
    assert f"{name}.json" in README


def test_records_name_their_commit_and_no_place_of_a_machine():
    records = sorted((ROOT / "hw_matrix/records").rglob("*.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{40}", record["commit"]), f"{path}: commit {record['commit']}"
        assert not re.search(r"(^|\s)/", record["command"]), f"{path}: {record['command']}"


def test_the_model_that_the_docs_tune():
    record = said_of("h200-tune-mymodel.json")
    seconds, cells = re.search(r"took (\d+) s, and all (\d+) cells won", (ROOT / "docs/tuning.md").read_text()).groups()
    assert (int(seconds), int(cells)) == (round(record["seconds"]), len(record["cells"])) and record["excluded"] == []
    assert all(cell["winner"] for cell in record["cells"])
    command = record["command"].removeprefix("lowlat tune ")
    assert command in re.sub(r" --journal \S+", "", (ROOT / "docs/tuning.md").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_lies_between_two_token_counts_that_were_won_is_served(family):
    rows: dict = {}
    for cell in report.join_tuned(map(report.read_record, TUNED[family]))["cells"]:
        rows.setdefault((cell["n"], cell["k"], cell["residual"]), {})[cell["m"]] = cell["winner"]
    served: dict = {}
    for case in table_cases(SM90):
        if case.family == family:
            served.setdefault((case.n, case.k, case.residual), set()).add(case.m)
    for key, won in rows.items():
        tokens = sorted(won)
        between = {m for low, high in zip(tokens, tokens[1:]) if won[low] and won[high] for m in range(low, high + 1)}
        between |= {m for m in tokens if won[m]}
        assert between == served[key], f"{family} {key}: the records have M = {sorted(between)}, the table {sorted(served[key])}"


def test_what_the_docs_say_is_left_above_the_floor():
    text = (ROOT / "docs/benchmarks.md").read_text()
    head, table = re.search(r"^\| us beyond the floor \| (.+) \|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text, re.MULTILINE).groups()
    tokens = [int(word.removeprefix("M = ")) for word in head.split(" | ")]
    joined = report.join_tuned(map(report.read_record, TUNED["kimi_k3"]))
    found = {(mean.group, mean.m): mean.beyond_us for mean in report.summarise_record("kimi_k3", joined).means}
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert [name for name, *_ in rows] == list(dict.fromkeys(group for group, _ in found if "residual" not in group))
    for name, *said in rows:
        assert said == [f"{found[name, m]:.2f}" for m in tokens], name
    growth = [found[rows[-1][0], m] / found[rows[0][0], m] for m in tokens]
    assert "three to six times" in text and 3 <= min(growth) and max(growth) < 6.5, growth
    cells = {(c["n"], c["k"]): c for c in joined["cells"] if c["m"] == 64 and not c["residual"] and c["winner"]}
    size = {key: cell for key, cell in cells.items() if report.weight_group(*key) == "40 to 85 MB"}
    furthest = max(size, key=lambda key: size[key]["over_floor"])
    said = re.findall(r"(\d+)x(\d+), (?:as large, is )?at ([\d.]+)(?: x)? with ([\d.]+\d)", " ".join(text.split()))
    assert len(said) == 2 and tuple(map(int, said[0][:2])) == furthest
    for n, k, over, beyond in said:
        cell = cells[int(n), int(k)]
        assert (over, beyond) == (f"{cell['over_floor']:.3f}", f"{cell['us'] - cell['floor_us']:.2f}"), (n, k)


def test_what_the_docs_say_of_the_parts():
    text = (ROOT / "docs/benchmarks.md").read_text()
    head, table = re.search(r"^\| us \| (.+) \|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text, re.MULTILINE).groups()
    parts = [word.removeprefix("no ") for word in head.split(" | ")]
    cells = {
        f"{c['n']}x{c['k']}, M = {c['m']}": {name: f"{t['us']:.2f}" for name, t in c["timings"].items()}
        for c in said_of("h200-parts.json")["cells"] if c["mode"]["chain"] == "back_to_back"
    }  # fmt: skip
    for name, *said in (line.strip("| ").split(" | ") for line in table.splitlines()):
        assert dict(zip(parts, said, strict=True)) == cells[name], name
    linked = [c for c in said_of("h200-parts.json")["cells"] if c["mode"]["chain"] == "linked" and c["n"] == 2880]
    said = re.search(r"2880x7168 takes ([\d.]+) us at M = 1, ([\d.]+) at 16 and\s+([\d.]+) at 64", text).groups()
    assert list(said) == [f"{c['timings']['whole']['us']:.2f}" for c in sorted(linked, key=lambda c: c["m"])]


def test_what_the_readme_says_of_the_gpu_suite():
    """The record that it links to, with the number of tests, every cell of the tables, and those that changed since."""
    cells, passed, ran, name = re.search(
        r"all ([\d,]+) cells of the tables right, ([\d,]+) of ([\d,]+) tests passed \(\[record\]\(hw_matrix/records/(.+?)\)", README
    ).groups()
    record = json.loads((ROOT / "hw_matrix/records" / name).read_text())
    counted = [int(number.replace(",", "")) for number in (cells, passed, ran)]
    assert counted == [record["counts"]["kernel"], record["outcomes"]["passed"], sum(record["outcomes"].values())]
    assert record["counts"]["failed"] == 0
    states = cell_states(SM90, [Record(name, record)], load_runners()["sm90"])
    changed = sum(str(state.proof) != "hardware-run" for state in states)
    assert re.findall(r"([\d,]+) cells have another config since", README) == ([f"{changed:,}"] if changed else [])
    assert changed or counted[0] == len(table_cases(SM90))


def test_what_the_docs_say_of_glm():
    """From which token counts on its table is split_k's: what a ``Projection`` can ask for by name."""
    cells = [case for case in table_cases(SM90) if case.family == "glm_5_3_flash"]
    late = [str(case) for case in cells if case.m > 16 and case.k > 128 and case.cell.backend != "split_k"]
    names = {(s.n, s.k): s.name for tp in (4, 8) for s in projection_shapes("glm_5_3_flash", tp)}
    early = [
        str(case) for case in cells
        if case.m > 8 and names[case.n, case.k].startswith(("dsa_", "mtp_")) and case.cell.backend != "split_k"
    ]  # fmt: skip
    assert cells and late == early == []


def test_what_the_docs_say_of_peers():
    text = (ROOT / "docs/benchmarks.md").read_text()
    cells = said_of("h200-bench-tp8.json")["cells"]
    reached, won, ran = re.search(r"the (\d+) \(N, K, M\) that it\s+reached, in both chains, (\d+) of (\d+) won", text).groups()
    ahead = sum(max(cell["ours_over"].values()) < 1 for cell in cells)
    assert [int(reached), int(won), int(ran)] == [len({(c["n"], c["k"], c["m"]) for c in cells}), ahead, len(cells)]
    (one,) = (c for c in said_of("h200-bench-peers.json")["cells"] if c["mode"]["chain"] == "back_to_back")
    said = re.search(r"At 1536x7168, M = 1 ours took ([\d.]+) of `torch.compile`'s time\s+\(max-autotune\) and ([\d.]+) of", text).groups()
    assert list(said) == [f"{one['ours_over'][peer]:.3f}" for peer in ("torch.compile", "flashinfer-cublaslt")]
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", text)
    assert len(pictures) == 2 and all((ROOT / "docs" / picture).exists() for picture in pictures)
