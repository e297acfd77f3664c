"""The tables that are shipped load, and every way to break one is refused with its place in the message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.backends import BACKEND_NAMES, CONFIG_KEYS
from lowlat_gemm.tables import TableError, available_tables, load_table, load_table_file

#: (rows, cells, of them fused_a, residual cells)
COUNTS = {
    "sm100": (25, 257, 27, 0),
    "sm103": (29, 408, 182, 4),
    "sm107": (29, 408, 182, 4),
}

GOOD = """\
format = 1
family = "toy"
arch = "sm103"

[device]
name = "B300"
sm_count = 148
memory = "HBM3e"
bandwidth_gbs = 8000
evidence = "a test"

[defaults]
provenance = "public"
source = "paper"

[sources.paper]
kind = "public"
title = "A paper"
url = "https://example.org/paper"
date = 2026-11-01
retrieved = 2026-11-30
note = "not ours"

[sources.lab]
kind = "measured"
device = "NVIDIA B300"
date = 2026-11-30
versions = {driver = "580.1", dsl = "4.8.1"}
note = "one session"

[[projection]]
n = 1536
k = 7168
label = "first"
cells = [
  {m = 1, backend = "skinny", block_size = 224, outputs_per_block = 2, k_unroll = 4, vector_width = 8},
  {m = "5..7", backend = "fused_a"},
]
residual_cells = [
  {m = 3, backend = "skinny", block_size = 64, outputs_per_block = 4, k_unroll = 2, vector_width = 8},
]

[[projection]]
n = 3072
k = 128
label = "second"
cells = [
  {m = 2, backend = "fused_a", provenance = "measured", source = "lab", time_us = 2.0, baseline_us = 3.0},
  {m = "3..4", backend = "fused_a", provenance = "interpolated"},
  {m = 5, backend = "fused_a", provenance = "measured", time_us = 2.0, baseline_us = 2.1, device = "NVIDIA B300", date = 2026-11-29, versions = {driver = "580.2"}},
]
"""

CHILD = """\
format = 1
family = "toy"
arch = "sm107"
inherits = "sm103"

[device]
name = "Rubin"
sm_count = 212
memory = "HBM4"
bandwidth_gbs = 22000
evidence = "a test"
"""

FIRST, SECOND = "projection 1536x7168", "projection 3072x128"
M1, M5 = (FIRST, "cell m=1"), (SECOND, "cell m=5")
SKINNY = 'backend = "skinny", block_size = 224'
LAB = 'provenance = "measured", source = "lab", time_us = 2.0, baseline_us = 3.0'
OWN_ROW = '[[projection]]\nn = 1536\nk = 7168\nlabel = "own"\ncells = [{m = 1, backend = "fused_a"}]\n'

#: What is replaced by what, and what the message must say besides the file.
MUTATIONS = {
    "format of the future": ("format = 1", "format = 2", ["format", "found 2", "need 1"]),
    "format as a boolean": ("format = 1", "format = true", ["format", "found True"]),
    "no format": ("format = 1\n", "", ["format", "found nothing"]),
    "no family": ('family = "toy"\n', "", ["family", "found nothing"]),
    "family as a path": ('"toy"', '"../toy"', ["family", "'../toy'"]),
    "unknown arch": ('arch = "sm103"', 'arch = "sm120"', ["arch", "'sm120'", "sm90, sm100, sm103, sm107"]),
    "unknown key at the top": ("format = 1", 'format = 1\ncolour = "red"', ["unknown key 'colour'", "'red'", "projection"]),
    "no rows": (GOOD[GOOD.index("[[projection]]") :], "", ["projection", "no row"]),
    "rows are a table": (GOOD[GOOD.index("[[projection]]") :], "[projection]\nn = 1\n", ["projection", "need a list"]),
    "no device": (GOOD[GOOD.index("[device]") : GOOD.index("[defaults]")], "", ["device", "found nothing"]),
    "device key missing": ("sm_count = 148\n", "", ["device", "sm_count", "found nothing", "integer > 0"]),
    "device key unknown": ("sm_count = 148", "sm_count = 148\nsms = 148", ["device", "unknown key 'sms'", "sm_count"]),
    "SM count as text": ("sm_count = 148", 'sm_count = "148"', ["device", "sm_count", "'148'", "integer > 0"]),
    "bandwidth not positive": ("bandwidth_gbs = 8000", "bandwidth_gbs = -1", ["bandwidth_gbs", "-1", "number > 0"]),
    "bandwidth not finite": ("bandwidth_gbs = 8000", "bandwidth_gbs = inf", ["bandwidth_gbs", "inf", "number > 0"]),
    "default provenance unknown": ('[defaults]\nprovenance = "public"', '[defaults]\nprovenance = "rumour"', ["defaults", "'rumour'", "measured, interpolated, public"]),
    "defaults key unknown": ("[defaults]", '[defaults]\nbackend = "skinny"', ["defaults", "unknown key 'backend'"]),
    "defaults without provenance": ('[defaults]\nprovenance = "public"', "[defaults]", ["defaults", "provenance", "found nothing"]),
    "source kind unknown": ('kind = "public"', 'kind = "hearsay"', ["sources.paper", "kind", "'hearsay'", "public, measured"]),
    "source without url": ('url = "https://example.org/paper"\n', "", ["sources.paper", "url", "found nothing"]),
    "source without title": ('title = "A paper"\n', "", ["sources.paper", "title", "found nothing"]),
    "source without note": ('note = "not ours"\n', "", ["sources.paper", "note", "found nothing"]),
    "source without date": ("date = 2026-11-01\n", "", ["sources.paper", "date", "found nothing"]),
    "source date as text": ("retrieved = 2026-11-30", 'retrieved = "yesterday"', ["sources.paper", "retrieved", "'yesterday'", "a date"]),
    "source key unknown": ('title = "A paper"', 'title = "A paper"\nauthor = "me"', ["sources.paper", "unknown key 'author'"]),
    "measured source without versions": ('versions = {driver = "580.1", dsl = "4.8.1"}\n', "", ["sources.lab", "versions", "found nothing"]),
    "versions are numbers": ('{driver = "580.1", dsl = "4.8.1"}', "{driver = 580.1}", ["sources.lab", "versions", "version strings"]),
    "n is zero": ("n = 1536", "n = 0", ["projection 0x7168", "n: found 0", "integer > 0"]),
    "n is text": ("n = 1536", 'n = "1536"', ["projection row 1", "n", "'1536'", "integer > 0"]),
    "no n": ("n = 1536\n", "", ["projection row 1", "n", "found nothing"]),
    "k not a multiple of 8": ("k = 7168", "k = 7164", ["projection 1536x7164", "k: found 7164", "multiple of 8"]),
    "k negative": ("k = 7168", "k = -8", ["projection 1536x-8", "k", "-8"]),
    "no label": ('label = "first"\n', "", [FIRST, "label", "found nothing"]),
    "empty label": ('label = "first"', 'label = " "', [FIRST, "label", "non-empty"]),
    "row key unknown": ('label = "first"', 'label = "first"\nproj = "x"', [FIRST, "unknown key 'proj'", "residual_cells"]),
    "row twice": ("n = 3072\nk = 128", "n = 1536\nk = 7168", [FIRST, "n, k", "second row (row 2)"]),
    "row without cells": ('label = "second"\ncells = [', 'label = "second"\nresidual_cells = [', [SECOND, "cells", "found nothing"]),
    "row with no cell": (GOOD[GOOD.index("cells = [\n  {m = 2") :], "cells = []\n", [SECOND, "cells: found none", "at least one"]),
    "cells are a table": (GOOD[GOOD.index("cells = [\n  {m = 2") :], "cells = {m = 1}\n", [SECOND, "cells", "a list of tables"]),
    "cell is a number": ("{m = 2, backend", "3, {m = 2, backend", [SECOND, "cell 1", "m", "found nothing"]),
    "no m": ("{m = 1, ", "{", [FIRST, "cell 1", "m", "found nothing"]),
    "m is zero": ("m = 1,", "m = 0,", [FIRST, "cell 1", "m", "found 0", "1..64"]),
    "m is too large": ("m = 1,", "m = 65,", [FIRST, "cell 1", "m", "found 65", "1..64"]),
    "m is a boolean": ("m = 1,", "m = true,", [FIRST, "cell 1", "m", "found True"]),
    "m is a float": ("m = 1,", "m = 1.0,", [FIRST, "cell 1", "m", "found 1.0"]),
    "range backwards": ('"5..7"', '"7..5"', [FIRST, "cell 2", "m", "'7..5'", "a..b"]),
    "range from zero": ('"5..7"', '"0..7"', [FIRST, "cell 2", "m", "'0..7'"]),
    "range too far": ('"5..7"', '"5..65"', [FIRST, "cell 2", "m", "'5..65'", "1..64"]),
    "range with words": ('"5..7"', '"5 to 7"', [FIRST, "cell 2", "m", "'5 to 7'"]),
    "ranges overlap": ('"5..7"', '"1..7"', [FIRST, "cell m=1..7", "M = 1 in two cells", "one cell per M"]),
    "m twice": ('{m = "5..7"', "{m = 1", [*M1, "M = 1 in two cells"]),
    "no backend": ('m = 1, backend = "skinny", ', "m = 1, ", [*M1, "backend", "found nothing", "skinny, fused_a, split_k, flashinfer"]),
    "public name of a backend": (SKINNY, 'backend = "cute", block_size = 224', [*M1, "backend", "'cute'", "skinny, fused_a"]),
    "config value zero": ("block_size = 224", "block_size = 0", [*M1, "block_size: found 0", "integer > 0"]),
    "config value a float": ("k_unroll = 4", "k_unroll = 4.0", [*M1, "k_unroll: found 4.0", "integer > 0"]),
    "config value a boolean": ("k_unroll = 4", "k_unroll = true", [*M1, "k_unroll: found True"]),
    "config key missing": (" k_unroll = 4,", "", [*M1, "k_unroll: found nothing"]),
    "config key unknown": ("k_unroll = 4", "unroll = 4, k_unroll = 4", [*M1, "unknown key 'unroll'", "block_size"]),
    "config of another backend": ('"5..7", backend = "fused_a"', '"5..7", backend = "fused_a", stages = 4', [FIRST, "cell m=5..7", "unknown key 'stages'"]),
    "residual cell": ("block_size = 64", "block_size = -64", [FIRST, "residual cell m=3", "block_size: found -64"]),
    "provenance misspelt": ('m = 1, backend = "skinny"', 'm = 1, provenence = "public", backend = "skinny"', [*M1, "unknown key 'provenence'", "provenance"]),
    "provenance unknown": (SKINNY, f'{SKINNY}, provenance = "guessed"', [*M1, "provenance", "'guessed'", "measured, interpolated, public"]),
    "inherited in a file": (SKINNY, f'{SKINNY}, provenance = "inherited"', [*M1, "provenance", "'inherited'", "measured, interpolated, public"]),
    "no provenance": (GOOD[GOOD.index("[defaults]") : GOOD.index("[sources.paper]")], "", [*M1, "provenance", "found nothing"]),
    "public without source": ('source = "paper"\n', "", [*M1, "source", "found nothing"]),
    "source not there": ('source = "paper"', 'source = "paper2"', [*M1, "source", "'paper2'", "there are: paper"]),
    "source of another kind": ('source = "paper"', 'source = "lab"', [*M1, "source", "'lab'", "kind 'public'", "there are: paper"]),
    "public with times": (SKINNY, f"{SKINNY}, time_us = 1.0", [*M1, "unknown key 'time_us'"]),
    "measured without time": (LAB, LAB.replace("time_us = 2.0, ", ""), [SECOND, "cell m=2", "time_us", "found nothing"]),
    "measured without baseline": (LAB, LAB.replace(", baseline_us = 3.0", ""), [SECOND, "cell m=2", "baseline_us", "found nothing"]),
    "measured without device": ('device = "NVIDIA B300", date = 2026-11-29', "date = 2026-11-29", [*M5, "device", "found nothing"]),
    "measured without date": ("date = 2026-11-29, ", "", [*M5, "date", "found nothing", "a date"]),
    "measured without versions": (', versions = {driver = "580.2"}', "", [*M5, "versions", "found nothing"]),
    "measured source is a paper": ('source = "lab"', 'source = "paper"', [SECOND, "cell m=2", "source", "'paper'", "kind 'measured'", "there are: lab"]),
    "measured over a range": ('{m = 2, backend = "fused_a"', '{m = "1..2", backend = "fused_a"', [SECOND, "cell m=1..2", "m", "one M"]),
    "less than 5 % faster": ("baseline_us = 2.1,", "baseline_us = 2.09,", [*M5, "time_us", "2.0 against a baseline_us of 2.09", "1.99"]),
    "time negative": ("time_us = 2.0, baseline_us = 3.0", "time_us = -2.0, baseline_us = 3.0", [SECOND, "time_us", "-2.0", "number > 0"]),
    "interpolated above the range": ('m = "3..4"', 'm = "6..8"', [SECOND, "cell m=6", "provenance", "no measured cell above"]),
    "interpolated below the range": ('m = "3..4"', "m = 1", [SECOND, "cell m=1", "provenance", "no measured cell below"]),
    "interpolated across configs": (
        '{m = "3..4", backend = "fused_a", ',
        '{m = 3, backend = "skinny", block_size = 32, outputs_per_block = 1, k_unroll = 1, vector_width = 8, ',
        [SECOND, "cell m=3", "provenance", "m=5 above", "those of the measured cell above"],
    ),
    "interpolated next to public": ('m = 5, backend = "fused_a", provenance = "measured", time_us = 2.0, baseline_us = 2.1, device = "NVIDIA B300", date = 2026-11-29, versions = {driver = "580.2"}', 'm = 5, backend = "fused_a"', [SECOND, "cell m=3", "no measured cell above"]),
    "interpolated with a time": ('provenance = "interpolated"', 'provenance = "interpolated", time_us = 2.0', [SECOND, "cell m=3..4", "unknown key 'time_us'"]),
    "parent not there": ('arch = "sm103"', 'arch = "sm103"\ninherits = "sm100"', ["inherits", "'sm100'", "toy_sm100.toml", "there are: none"]),
    "parent unknown": ('arch = "sm103"', 'arch = "sm103"\ninherits = "sm999"', ["inherits", "'sm999'", "sm90, sm100"]),
    "parent is itself": ('arch = "sm103"', 'arch = "sm103"\ninherits = "sm103"', ["inherits", "sm103 -> sm103", "no cycle"]),
    "TOML not closed": ('label = "first"', 'label = "first', ["not valid TOML", "line 34, column"]),
    "TOML key twice": ("n = 1536", "n = 1536\nn = 1536", ["not valid TOML", "line 33, column"]),
}


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _message(path: Path) -> str:
    with pytest.raises(TableError) as raised:
        load_table_file(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: "), f"{message!r} does not name the file first"
    return message


def test_the_good_file_loads(tmp_path):
    table = load_table_file(_write(tmp_path, "toy_sm103.toml", GOOD))
    assert list(table.projections) == [(1536, 7168), (3072, 128)]
    first, second = table.projections.values()
    assert list(first.cells) == [1, 5, 6, 7] and list(first.residual_cells) == [3]
    assert first.cells[1].config == {"block_size": 224, "outputs_per_block": 2, "k_unroll": 4, "vector_width": 8}
    assert {m: cell.provenance.kind for m, cell in second.cells.items()} == {
        2: "measured",
        3: "interpolated",
        4: "interpolated",
        5: "measured",
    }
    by_source, by_itself = second.cells[2].provenance, second.cells[5].provenance
    assert (by_source.device, by_source.date) == ("NVIDIA B300", "2026-11-30")
    assert by_source.versions == {"driver": "580.1", "dsl": "4.8.1"}
    assert (by_itself.source, by_itself.date, by_itself.versions) == (None, "2026-11-29", {"driver": "580.2"})
    assert by_itself.to_json()["versions"] == {"driver": "580.2"}
    assert table.cell(1536, 7168, 3) is None and table.cell(1536, 7168, 3, residual=True).backend == "skinny"
    assert table.cell(1, 8, 1) is None


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_file_is_refused_with_its_place(tmp_path, name):
    old, new, fragments = MUTATIONS[name]
    assert old in GOOD, f"the mutation {name!r} changes nothing"
    message = _message(_write(tmp_path, "toy_sm103.toml", GOOD.replace(old, new, 1)))
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{name}: {message!r} does not say {missing}"
    assert "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path):
    assert "cannot be read" in _message(tmp_path / "none.toml")
    binary = tmp_path / "toy_sm103.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in _message(binary)


def test_inheritance(tmp_path):
    parent = load_table_file(_write(tmp_path, "toy_sm103.toml", GOOD))
    child_path = _write(tmp_path, "toy_sm107.toml", CHILD)
    child = load_table_file(child_path)
    assert (child.inherits, child.device.sm_count) == ("sm103", 212)
    parents = dict(parent.cells())
    cells = dict(child.cells())
    assert cells.keys() == parents.keys()
    for key, cell in cells.items():
        origin = parents[key]
        assert (cell.backend, cell.config) == (origin.backend, origin.config), key
        assert (cell.provenance.kind, cell.provenance.inherited_from) == ("inherited", "sm103"), key
        assert cell.provenance.origin == origin.provenance, key
        assert cell.provenance.source is None or cell.provenance.source in child.sources, key
    _write(tmp_path, "toy_sm107.toml", CHILD + GOOD[GOOD.index("[defaults]") : GOOD.index("[[projection]]")] + OWN_ROW)
    own = load_table_file(child_path)
    assert [own.cell(1536, 7168, m) is not None for m in (1, 5)] == [True, False], "an own row replaces the whole row"
    assert own.cell(1536, 7168, 3, residual=True) is None
    assert own.cell(1536, 7168, 1).provenance.kind == "public"
    assert own.cell(3072, 128, 2).provenance.kind == "inherited"


def test_broken_inheritance(tmp_path):
    child = _write(tmp_path, "toy_sm107.toml", CHILD)
    _write(tmp_path, "toy_sm103.toml", GOOD.replace('arch = "sm103"', 'arch = "sm103"\ninherits = "sm107"'))
    with pytest.raises(TableError, match="toy_sm103.toml: inherits: found sm107 -> sm103 -> sm107, need no cycle"):
        load_table_file(child)
    parent = _write(tmp_path, "toy_sm103.toml", GOOD.replace("block_size = 224", "block_size = 0"))
    with pytest.raises(TableError, match="toy_sm103.toml: projection 1536x7168: cell m=1: block_size"):
        load_table_file(child)
    parent.write_text(GOOD.replace('arch = "sm103"', 'arch = "sm100"'))
    assert "found toy sm100 in toy_sm103.toml" in _message(child)
    parent.write_text(GOOD)
    other = GOOD[GOOD.index("[sources.paper]") : GOOD.index("[sources.lab]")].replace("A paper", "Another paper")
    child.write_text(CHILD + other)
    assert "sources.paper" in _message(child)


def test_the_measured_table_says_where_its_figures_are_from():
    """SM90: which rows are measured changes with each tuning run; each of their cells names a run on the table's device."""
    table = load_table("kimi_k3", "sm90")
    kinds = [cell.provenance.kind for _, cell in table.cells()]
    assert kinds.count("measured") > 200 and {"measured", "interpolated"} <= set(kinds) <= {"measured", "interpolated", "public"}
    for key, cell in table.cells():
        if cell.provenance.kind == "measured":
            source = table.sources[cell.provenance.source]
            assert table.device.name in source.device and "lowlat tune" in source.note, f"{key}: {source}"


@pytest.mark.parametrize("arch", COUNTS)
def test_shipped_table(arch):
    table = load_table("kimi_k3", arch)
    cells = dict(table.cells())
    plain = [cell for key, cell in cells.items() if not key.residual]
    found = (
        len(table.projections),
        len(plain),
        sum(cell.backend == "fused_a" for cell in plain),
        len(cells) - len(plain),
    )
    assert found == COUNTS[arch], f"{arch}: (rows, cells, fused_a, residual) are {found}, expected {COUNTS[arch]}"
    for key, cell in cells.items():
        provenance = cell.provenance
        assert provenance.source in table.sources, f"{arch} {key}: no source {provenance.source!r}"
        assert (provenance.kind == "inherited") == (arch == "sm107"), f"{arch} {key}: {provenance}"
        assert str(provenance), key
    assert all(spec.label for spec in table.projections.values())


def test_every_arch_has_a_table():
    assert available_tables() == [("glm_5_3_flash", "sm90"), *(("kimi_k3", arch.name) for arch in ARCHES)]


def test_the_config_keys_are_those_of_the_backends():
    assert tuple(CONFIG_KEYS) == BACKEND_NAMES


def test_loading_is_cached_and_takes_an_arch():
    assert load_table("kimi_k3", SM90) is load_table("kimi_k3", "sm90")


def test_a_table_is_read_only():
    table = load_table("kimi_k3", "sm90")
    spec = next(iter(table.projections.values()))
    for mapping in (table.projections, table.sources, spec.cells, spec.residual_cells, spec.cells[1].config):
        with pytest.raises(TypeError):
            mapping[1] = None


def test_missing_tables():
    with pytest.raises(TableError, match=r"no table for model family 'llama' on sm90; there are: glm_5_3_flash sm90, kimi_k3 sm90, kimi_k3 sm100"):
        load_table("llama", "sm90")
    with pytest.raises(ValueError, match="unknown arch 'sm120'"):
        load_table("kimi_k3", "sm120")


def test_tables_import_neither_torch_nor_cutlass():
    code = (
        "import sys; from lowlat_gemm.tables import available_tables, load_table; import lowlat_gemm.models\n"
        "for item in available_tables(): load_table(*item)\n"
        "print(sorted({'torch', 'cutlass', 'numpy'} & set(sys.modules)))"
    )
    root = Path(sys.modules["lowlat_gemm.tables"].__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env={"PYTHONPATH": str(root)})
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr
