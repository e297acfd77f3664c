"""The hardware report: the page, the table, and what changed since the last record."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from conformance.cases import table_cases
from conformance.fake_records import cell_of, record_of
from hw_matrix import markdown, page
from hw_matrix.coverage import Proof, Record, load_records
from hw_matrix.summary import changes, newest_times, summarize
from lowlat_gemm.arch import ARCHES, SM90, SM103
from lowlat_gemm.kernels.registry import backend
from lowlat_gemm.tables import PROVENANCE_KINDS, available_tables, load_table

ROOT = Path.cwd()  # pytest's root, with and without Bazel


class _Tags(HTMLParser):
    """Every element is closed, nothing is loaded from elsewhere."""

    VOID = {"meta", "br", "img", "input", "path", "use", "rect", "line", "circle"}

    def __init__(self):
        super().__init__()
        self.open, self.loaded, self.cells = [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.loaded += [
            value
            for name, value in given.items()
            if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]
        if "cell" in given.get("class", "").split():
            self.cells.append(given["class"].split()[-1])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag, tag


def test_the_page_is_whole_and_has_every_cell(tmp_path):
    (tmp_path / "sm103").mkdir(parents=True)
    (tmp_path / "sm103" / "x.json").write_text(
        json.dumps(record_of([cell_of(table_cases(SM103)[0], "compiled")], gpu=None))
    )
    for path in (ROOT / "hw_matrix/records/sm90").glob("*.json"):
        (tmp_path / "sm90").mkdir(exist_ok=True)
        (tmp_path / "sm90" / path.name).write_text(path.read_text())
    summary = summarize(tmp_path)
    text = page.render(summary)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == [] and tags.loaded == [] and "<script" not in text
    assert len(tags.cells) == sum(len(table_cases(arch)) for arch in ARCHES)
    assert all(str(word) in text for word in (*Proof, *PROVENANCE_KINDS))
    assert text.count("<svg") == 2 and "time / floor" in text and text.count("<title>Time over the floor") == 2
    assert text == page.render(summarize(tmp_path)), "two reports of the same records differ"


def test_the_table_has_a_row_for_every_generation_and_every_word():
    text = markdown.render(summarize(ROOT / "hw_matrix/records"))
    rows = [line for line in text.splitlines() if line.startswith("| SM")]
    assert [row.split()[1] for row in rows] == [arch.name.upper() for arch in ARCHES]
    assert all(f"**{word}**: " in text for word in (*Proof, *PROVENANCE_KINDS))


def test_the_checked_in_table_is_what_the_records_say():
    wanted = markdown.render(summarize(ROOT / "hw_matrix/records"))
    assert (ROOT / "docs/hardware.md").read_text() == wanted, (
        "docs/hardware.md: run ./tools/bazelw run //hw_matrix -- report"
    )


def _bench(started: str, ours: float, k: int = 128, most: int = 12) -> Record:
    timings = {"floor": {"us": 10.0}, "ours": {"us": ours}, "cublas": {"us": 20.0}}
    cells = [{"n": 64, "k": k, "m": m, "timings": timings, "backend": "skinny"} for m in range(1, most + 1)]
    cells.append(
        cells[0]
        | {
            "mode": {"weights": "warm", "pdl": True, "chain": "back_to_back"},
            "timings": timings | {"ours": {"us": 1.0}},
        }
    )
    return Record(f"bench {started}", record_of(cells, started=started))


def test_changes_are_those_of_the_last_two_records_of_a_kind():
    cases = table_cases(SM90)[:4]
    before = Record("before", record_of([cell_of(c) for c in cases[:3]]))
    after = Record(
        "after", record_of([cell_of(cases[0], "failed"), cell_of(cases[1], worst_share=0.75), cell_of(cases[3])])
    )
    said = changes([before, after])
    assert said == [
        "before to after: 1 cells ran that had not run before; 1 cells that had run did not run; 1 cells became wrong; "
        "worst error 0.250 to 0.750 of its bound"
    ]
    said = changes([_bench("2026-12-01", 12.0), _bench("2026-12-02", 15.0)])
    assert said == [
        "bench 2026-12-01 to bench 2026-12-02: ours over cuBLAS changed by +25.0 % over 12 cells; "
        "0 faster, 12 slower by more than 3 %"
    ]


def test_times_are_compared_with_the_newest_record_that_has_enough_of_the_cells():
    first, other, few = _bench("1", 12.0), _bench("2", 9.0, k=256), _bench("3", 6.0, most=9)
    assert changes([first, other]) == changes([first, few]) == []
    assert [text.split(":")[0] for text in changes([first, other, few, _bench("4", 12.0)])] == ["bench 1 to bench 4"]


def test_times_of_shapes_that_no_table_has_are_not_in_the_means(tmp_path):
    (tmp_path / "sm90").mkdir()
    case = next(case for case in table_cases(SM90) if not case.residual)
    record = _bench("1", 12.0).data
    (tmp_path / "sm90" / "x.json").write_text(json.dumps(record))
    assert summarize(tmp_path).generations[0].times == ()
    record["cells"][0] |= {"n": case.n, "k": case.k}
    (tmp_path / "sm90" / "x.json").write_text(json.dumps(record))
    assert [(times.n, times.k) for times in summarize(tmp_path).generations[0].times] == [(case.n, case.k)]


def test_a_failed_test_of_a_run_that_cells_rest_on_is_named(tmp_path):
    (tmp_path / "sm90").mkdir()
    cells = [cell_of(case) for case in table_cases(SM90)]
    for outcome in ("failed", "passed"):
        record = record_of(cells) | {"tests": [{"id": "conformance/gpu/test_x.py::test_a[1]", "outcome": outcome}]}
        (tmp_path / "sm90" / "x.json").write_text(json.dumps(record))
        summary = summarize(tmp_path)
        for text in (markdown.render(summary), page.render(summary)):
            assert ("sm90/x.json: conformance/gpu/test_x.py::test_a[1] failed" in text) == (outcome == "failed")


def test_a_long_command_is_folded_and_whole(tmp_path):
    (tmp_path / "sm90").mkdir()
    long = "python -m pytest " + " ".join(f"conformance/gpu/test_{i}.py" for i in range(9))
    for command, folded in ((long, True), ("lowlat check", False)):
        (tmp_path / "sm90" / "x.json").write_text(json.dumps(record_of([], command=command)))
        text = page.render(summarize(tmp_path))
        assert f"<code>{command}</code>" in text and ("<details>" in text) == folded, command


def test_only_records_of_one_series_are_compared():
    cases = table_cases(SM90)[:3]
    suite = Record("suite", record_of([cell_of(c) for c in cases], suite="gpu_sm90"))
    check = Record("check", record_of([cell_of(cases[0])], kind=None, command="lowlat check --require-gpu"))
    assert changes([suite, check]) == [], "a check covers fewer cells than a suite: nothing changed"
    later = Record("later", record_of([cell_of(c) for c in cases], suite="gpu_sm90"))
    assert changes([suite, check, later]) == ["suite to later: worst error 0.250 to 0.250 of its bound"]
    tuned = Record("tuned", _bench("2026-12-02", 15.0).data | {"kind": None, "command": "lowlat tune"})
    assert changes([_bench("2026-12-01", 12.0), tuned]) == []


def test_the_worst_error_is_a_share_of_its_bound_and_unsaid_by_older_records(tmp_path):
    cases = table_cases(SM90)[:2]
    (tmp_path / "sm90").mkdir()
    for shares, wanted in (([0.25, 0.875], "0.875"), ([None, None], "-")):
        cells = [cell_of(case, worst_ulps=53249.75, worst_share=share) for case, share in zip(cases, shares)]
        if shares[0] is None:
            cells = [{key: value for key, value in cell.items() if key != "worst_share"} for cell in cells]
        (tmp_path / "sm90" / "x.json").write_text(json.dumps(record_of(cells)))
        summary = summarize(tmp_path)
        lines = markdown.render(summary).splitlines()
        row = dict(zip(*([word.strip() for word in line.split("|")] for line in (
            next(line for line in lines if line.startswith("| generation")),
            next(line for line in lines if line.startswith("| SM90")),
        ))))
        assert row["worst error / bound"] == wanted, row
        assert ("worst error / its bound" in page.render(summary)) == (wanted != "-")
        assert "53249" not in page.render(summary)


def test_the_newest_times_in_the_usual_mode_count():
    times = newest_times([_bench("2026-12-01", 12.0, most=2), _bench("2026-12-02", 15.0, most=2)])
    assert [(t.m, t.over_floor("ours"), t.over_floor("cublas")) for t in times] == [(1, 1.5, 2.0), (2, 1.5, 2.0)]


def test_records_are_read_oldest_first(tmp_path):
    (tmp_path / "sm90").mkdir()
    for name, started in (("a", "2026-12-02"), ("b", "2026-12-01")):
        (tmp_path / "sm90" / f"{name}.json").write_text(json.dumps(record_of([], started=started)))
    assert [record.name for record in load_records(tmp_path)["sm90"]] == ["sm90/b.json", "sm90/a.json"]


def test_a_tuning_run_has_times_too():
    cell = {
        "n": 64,
        "k": 128,
        "m": 1,
        "residual": False,
        "floor_us": 2.0,
        "us": 3.0,
        "baseline_us": 5.0,
        "winner": {"backend": "split_k"},
    }
    lost = cell | {"m": 2, "us": None, "winner": None}
    times = newest_times([Record("tune", record_of([cell, lost, cell | {"m": 3, "residual": True}]))])
    assert [(t.m, t.over_floor("ours"), t.over_floor("cublas"), t.backend) for t in times] == [
        (1, 1.5, 2.5, "split_k"),
        (2, None, 2.5, None),
    ]


def test_optional_cells_are_said_to_be_beside_and_kept_from_dispatch():
    """What the report says of them: how many, and that the dispatcher does not have their backend there."""
    summary = summarize(ROOT / "hw_matrix/records")
    for generation in summary.generations:
        names = [cell.backend for family, name in available_tables() if name == generation.arch.name
                 for _, cell in load_table(family, name).optional_cells()]  # fmt: skip
        assert generation.optional == len(names)
        assert not any(backend(name, generation.arch) for name in names), f"{generation.arch}: say what is shown of them"
    assert f"{summary.generations[2].optional} on SM103" in markdown.render(summary)
