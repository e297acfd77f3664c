"""The tables say what the public figures say, cell for cell; recomputed here from the imported JSON alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowlat_cli.table_text import TableText
from lowlat_gemm.tables import load_table
from tools import import_public_tables

SOURCE = Path(__file__).parents[1] / "data" / "kimi_k3_public_vllm_0_33_0.json"
PUBLIC = json.loads(SOURCE.read_text(encoding="utf-8"))
ARCHES = ("sm90", "sm100", "sm103", "sm107")


def _public_rows(arch: str) -> list[dict]:
    entry = PUBLIC[arch]
    return entry["table"] if "table" in entry else _public_rows(entry["inherits"])


def _split_k_cells(arch: str) -> dict[tuple[int, int, int, bool], tuple[str, dict[str, int]]]:
    """From 4 tokens on, by the padded count; the public data says for SM100 and SM103."""
    if arch not in ("sm100", "sm103"):
        return _split_k_cells(PUBLIC[arch]["inherits"]) if "inherits" in PUBLIC[arch] else {}
    cells = {}
    for group in ("tp8", "tp16"):
        for row in PUBLIC["split_k_sm100"][group].values():
            for m in range(4, 65):
                padded = next(p for p in ("8", "16", "32", "64") if m <= int(p))
                rows, columns, split, stages = row["tactics_by_padded_tokens"][padded]
                config = {"rows": rows, "token_columns": columns, "split": split, "stages": stages}
                cells[row["n"], row["k"], m, False] = ("split_k", config)
    return cells


def _public_cells(arch: str) -> dict[tuple[int, int, int, bool], tuple[str, dict[str, int]]]:
    """(n, k, m, residual) -> (backend, config)."""
    cells = _split_k_cells(arch)
    for row in _public_rows(arch):
        for m in row["fused_a_tokens"]:
            cells[row["n"], row["k"], m, False] = ("fused_a", {})
        for m, config in row["skinny"].items():
            cells[row["n"], row["k"], int(m), False] = ("skinny", config)
        for m, config in row["skinny_residual"].items():
            cells[row["n"], row["k"], int(m), True] = ("skinny", config)
    return cells


def _ours(arch: str) -> set[tuple[int, int]]:
    """Shapes of which we measured a cell, or measured and kept none: they are not the public ones any more."""
    rows = {(key.n, key.k) for key, cell in load_table("kimi_k3", arch).cells() if (cell.provenance.origin or cell.provenance).kind == "measured"}
    text = (import_public_tables.TABLES / f"kimi_k3_{arch}.toml").read_text(encoding="utf-8")
    return rows | TableText.parse(text).lost


def _public_choice(arch: str, n: int, k: int, m: int, residual: bool) -> str | None:
    """What a selector reading the JSON would answer."""
    for row in _public_rows(arch):
        if (row["n"], row["k"]) == (n, k):
            if residual:
                return "skinny" if str(m) in row["skinny_residual"] else None
            if str(m) in row["skinny"]:
                return "skinny"
            if m in row["fused_a_tokens"]:
                return "fused_a"
    return "split_k" if (n, k, m, residual) in _split_k_cells(arch) else None


@pytest.mark.parametrize("arch", ARCHES)
def test_every_public_cell_is_in_the_table(arch):
    table = load_table("kimi_k3", arch)
    wrong, ours = [], _ours(arch)
    for (n, k, m, residual), expected in _public_cells(arch).items():
        if (n, k) in ours:
            continue
        cell = table.cell(n, k, m, residual=residual)
        found = None if cell is None else (cell.backend, dict(cell.config))
        if found != expected:
            wrong.append(f"{n}x{k} m={m} residual={residual}: expected {expected}, found {found}")
    assert not wrong, f"{arch}: {len(wrong)} cells differ:\n" + "\n".join(wrong)


@pytest.mark.parametrize("arch", ARCHES)
def test_no_public_cell_is_invented(arch):
    public = _public_cells(arch)
    invented = []
    for key, cell in load_table("kimi_k3", arch).cells():
        origin = cell.provenance.origin or cell.provenance
        if origin.kind == "public" and tuple(key) not in public:
            invented.append(f"{key}: found {cell.backend} {dict(cell.config)}, expected no cell")
    assert not invented, f"{arch}:\n" + "\n".join(invented)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_choice_is_the_public_one(arch):
    table = load_table("kimi_k3", arch)
    shapes = {(row["n"], row["k"]) for other in ARCHES for row in _public_rows(other)}
    shapes |= {(k, n) for n, k in shapes} | {(n + 8, k) for n, k in shapes} | {(n, k + 8) for n, k in shapes}
    for n, k in shapes - _ours(arch):
        for m in range(66):
            for residual in (False, True):
                cell = table.cell(n, k, m, residual=residual)
                found = None if cell is None else cell.backend
                expected = _public_choice(arch, n, k, m, residual)
                assert found == expected, f"{arch} {n}x{k} m={m} residual={residual}: expected {expected}, found {found}"


def test_sm107_inherits_every_cell_and_owns_none():
    table = load_table("kimi_k3", "sm107")
    assert table.inherits == PUBLIC["sm107"]["inherits"]
    assert {cell.provenance.kind for _, cell in table.cells()} == {"inherited"}
    assert {cell.provenance.inherited_from for _, cell in table.cells()} == {"sm103"}


def test_the_source_is_named_as_the_import_names_it():
    source = load_table("kimi_k3", "sm103").sources["vllm_0_33_0"]
    release, _, file = source.title.partition(", ")
    for said in (release, source.date, file, "not measured by this project"):
        assert said in PUBLIC["source"], f"{said!r} is not in the imported source line"
    assert source.kind == "public" and source.url.endswith(file) and "not measured by this project" in source.note


@pytest.mark.parametrize("arch", ARCHES)
def test_the_checked_in_file_is_what_the_tool_writes(arch):
    name = f"kimi_k3_{arch}.toml"
    expected = import_public_tables.outputs()[name].encode()
    assert (import_public_tables.TABLES / name).read_bytes() == expected, f"{name}: run python -m tools.import_public_tables"


MEASURED_ROW = """[[projection]]
n = 1536
k = 7168
label = "ours"
cells = [
  {m = 1, backend = "split_k", rows = 64, token_columns = 8, split = 4, stages = 11, provenance = "measured", source = "here", time_us = 5.9, baseline_us = 10.0},
]
"""
MEASURED_SOURCE = '[sources.here]\nkind = "measured"\ndevice = "H200"\ndate = 2026-12-01\nversions = {torch = "2"}\nnote = "n"\n'


def test_the_import_keeps_what_was_measured_and_brings_back_what_was_changed():
    public = import_public_tables.public_texts()["kimi_k3_sm90.toml"]
    assert import_public_tables.with_measured(public, public) == public
    changed = TableText.parse(public)
    changed.rows[1536, 7168], changed.sources["here"] = MEASURED_ROW, MEASURED_SOURCE
    changed.rows[2112, 7168] = changed.rows[2112, 7168].replace("block_size = 224", "block_size = 32")
    del changed.rows[1536, 128], changed.rows[3584, 7168]
    changed.lost.add((1536, 128))
    made = TableText.parse(import_public_tables.with_measured(public, changed.render()))
    original = TableText.parse(public)
    assert made.rows.pop((1536, 7168)) == MEASURED_ROW and made.sources.pop("here") == MEASURED_SOURCE
    assert made.lost == {(1536, 128)} and (1536, 128) not in made.rows
    assert changed.rows[2112, 7168] != original.rows[2112, 7168], "the test changed nothing"
    assert made.rows == {key: text for key, text in original.rows.items() if key not in ((1536, 7168), (1536, 128))}
    assert made.sources == original.sources
