"""Measured rows go into a table that the library reads, whole or not at all, and leave everything else as it was."""

from __future__ import annotations

import datetime

import pytest

from conformance.fakes import device_of
from lowlat_cli import table_text
from lowlat_cli.table_text import TableText, replace_table, row_text
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.choose import Times
from lowlat_cli.tuning.table_writer import RowResult, Session, new_head, write_table
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.kernels.split_k import SplitKConfig, token_columns
from lowlat_gemm.tables import TableError, load_table, load_table_file
from tools.import_public_tables import public_texts

A, B = (Candidate("split_k", SplitKConfig(64, 8, 4, stages)) for stages in (4, 5))
SESSION = Session("NVIDIA H200", datetime.date(2026, 12, 1), {"torch": "2.13.0", "nvidia-cutlass-dsl": "4.8.1"}, 'a "note"')
HEAD = new_head("toy", SM90, device_of(SM90))
PUBLIC = TableText.parse(public_texts()["kimi_k3_sm90.toml"])


def row(chosen: dict[int, Candidate], measured=None, *, n=1536, k=7168, residual=False, us=5.0) -> RowResult:
    times = {m: {one: Times((us, us + 0.5), (), (10.0, 10.0))} for m, one in chosen.items()}
    return RowResult(n, k, "label", residual, tuple(measured or chosen), chosen, times, token_columns(SM90))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "toy_sm90.toml"


def test_a_new_table(path):
    table = write_table(path, HEAD, [row({1: A, 4: A, 8: B}), row({1: B}, residual=True)], SESSION)
    assert load_table_file(path) == table and (table.family, table.arch, table.device.memory) == ("toy", "sm90", "HBM3e")
    spec = table.projections[1536, 7168]
    assert sorted(spec.cells) == [1, 2, 3, 4, 5, 6, 7, 8] and sorted(spec.residual_cells) == [1]
    kinds = {m: cell.provenance.kind for m, cell in spec.cells.items()}
    assert kinds == {m: "measured" if m in (1, 4, 8) else "interpolated" for m in range(1, 9)}
    assert [dict(spec.cells[m].config) for m in (2, 3, 5, 7)] == [A.mapping()] * 2 + [B.mapping()] * 2
    provenance = spec.cells[8].provenance
    assert (provenance.time_us, provenance.baseline_us, provenance.date) == (5.5, 10.0, "2026-12-01")
    assert provenance.device == "NVIDIA H200" and dict(provenance.versions) == SESSION.versions
    assert dict(spec.cells[8].config) == B.mapping() and not device_of(SM90).name == "" and table.device.mismatch(device_of(SM90)) is None


def test_other_rows_stay_word_for_word_and_tuned_ones_are_replaced(path):
    start = PUBLIC.render().replace('family = "kimi_k3"', 'family = "toy"')
    write_table(path, start, [row({m: A for m in range(1, 17)})], SESSION)
    made = TableText.parse(path.read_text())
    assert {key: text for key, text in made.rows.items() if key != (1536, 7168)} == {
        key: text for key, text in PUBLIC.rows.items() if key != (1536, 7168)
    }
    cells = load_table_file(path).projections[1536, 7168].cells
    assert {cell.provenance.kind for cell in cells.values()} == {"measured"} and len(cells) == 16
    assert load_table_file(path).projections[1536, 7168].label == load_table("kimi_k3", SM90).projections[1536, 7168].label
    assert made.sources["vllm_0_33_0"] == PUBLIC.sources["vllm_0_33_0"] and made.head.replace("toy", "kimi_k3") == PUBLIC.head


def test_cells_at_other_m_stay_and_what_lost_goes(path):
    start = PUBLIC.render().replace('family = "kimi_k3"', 'family = "toy"')
    path.write_text(start)
    before = load_table_file(path).projections[1536, 7168].cells
    assert {1, 2, 3} <= set(before), "the row that this test is about has changed"
    write_table(path, start, [row({1: A}, measured=(1, 2))], SESSION)
    after = load_table_file(path).projections[1536, 7168].cells
    assert after[1].backend == "split_k" and 2 not in after
    assert {m: (c.backend, dict(c.config), c.provenance.kind) for m, c in after.items() if m > 2} == {
        m: (c.backend, dict(c.config), "public") for m, c in before.items() if m > 2
    }


def test_a_row_without_a_winner_is_named_as_lost_until_it_wins(path):
    start = PUBLIC.render().replace('family = "kimi_k3"', 'family = "toy"')
    every = tuple(range(1, 65))
    table = write_table(path, start, [row({}, measured=every)], SESSION)
    assert (1536, 7168) not in table.projections and TableText.parse(path.read_text()).lost == {(1536, 7168)}
    assert "[sources.nvidia" not in path.read_text(), "a source that no cell names"
    table = write_table(path, start, [row({1: A}, measured=every)], SESSION)
    assert set(table.projections[1536, 7168].cells) == {1} and not TableText.parse(path.read_text()).lost


def test_tuning_again(path):
    write_table(path, HEAD, [row({1: A, 4: A}), row({1: A}, n=64, k=128)], SESSION)
    one = path.read_text()
    write_table(path, HEAD, [row({1: A, 4: A}), row({1: A}, n=64, k=128)], SESSION)
    assert path.read_text() == one, "the same result wrote another file"
    later = Session("NVIDIA H200", SESSION.date, {"torch": "2.14.0"}, "n")
    table = write_table(path, HEAD, [row({4: B})], later)
    cells = table.projections[1536, 7168].cells
    assert [dict(cells[m].config) for m in (1, 2, 3, 4)] == [A.mapping(), *[B.mapping()] * 3], "not those of the cell above"
    assert [dict(source.versions)["torch"] for source in table.sources.values()] == ["2.13.0", "2.14.0"]
    table = write_table(path, HEAD, [row({1: B, 4: B}), row({1: B}, n=64, k=128)], later)
    assert [dict(source.versions)["torch"] for source in table.sources.values()] == ["2.14.0"], "an unused source stayed"


WIDE = Candidate("split_k", SplitKConfig(64, 24, 4, 4))
WIDER = Candidate("split_k", SplitKConfig(64, 40, 4, 4))


@pytest.mark.parametrize(
    "again, served",
    [
        (row({}, measured=(17,)), {16, 24, *range(33, 41)}),  # the lower end was lost: so 18 to 23 are between 16 and 24
        (row({}, measured=(20,)), {16, 17, 24, *range(33, 41)}),  # lost in the middle
        (row({}, measured=(24,)), {16, 17, *range(33, 41)}),  # the upper end was lost: 40's config is of another class
        (row({36: WIDER}), {*range(16, 25), *range(33, 41)}),  # won in the middle
        (row({24: A}), {*range(16, 25), *range(33, 41)}),
    ],
    ids=["lower", "middle", "upper", "won", "another"],
)
def test_what_was_between_two_cells_follows_them(path, again, served):
    write_table(path, HEAD, [row({16: B, 17: WIDE, 24: WIDE, 33: WIDER, 40: WIDER})], SESSION)
    assert sorted(load_table_file(path).projections[1536, 7168].cells) == [*range(16, 25), *range(33, 41)]
    cells = write_table(path, HEAD, [again], SESSION).projections[1536, 7168].cells
    assert set(cells) == served
    for m in {18, 23, 34, 39} & served:
        above = min(o for o in cells if o > m and cells[o].provenance.kind == "measured")
        assert cells[m].provenance.kind == "interpolated" and cells[m].config == cells[above].config


def test_nothing_to_keep_writes_nothing(path):
    assert write_table(path, HEAD, [row({}, measured=(1,))], SESSION) is None and not path.exists()


def test_a_table_that_would_not_load_replaces_nothing(path):
    write_table(path, HEAD, [row({1: A})], SESSION)
    before = path.read_text()
    bad = RowResult(64, 128, "x", False, (1,), {1: A}, {1: {A: Times((9.9, 9.9), (), (10.0, 10.0))}}, (8,))
    with pytest.raises(TableError, match="time_us"):
        write_table(path, HEAD, [bad], SESSION)
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    write_table(path, HEAD, [row({1: A})], SESSION)
    before = path.read_text()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(table_text.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        replace_table(path, before + "\n")
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_parts_of_a_table_are_all_of_it(arch):
    text = open(load_table("kimi_k3", arch).path).read()
    assert TableText.parse(text).render() == text


def test_equal_cells_that_were_not_measured_are_one_range():
    text = row_text(8, 16, 'a "b"', {1: {"backend": "fused_a"}, 2: {"backend": "fused_a"}, 4: {"backend": "fused_a"}})
    assert '{m = "1..2", backend = "fused_a"}' in text and "{m = 4, " in text and r'label = "a \"b\""' in text
