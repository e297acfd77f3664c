"""``[kda_overlap]`` of a table: how it is read, what is refused, what is inherited; the shipped ones are the public figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowlat_gemm.arch import ARCHES, SM90, SM103
from lowlat_gemm.kda_branches import GEOMETRY
from lowlat_gemm.tables import TableError, load_table, load_table_file

PUBLIC = json.loads((Path(__file__).parents[1] / "data" / "kimi_k3_public_vllm_0_33_0.json").read_text())["kda_overlap"]


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_sections_are_the_public_figures(arch):
    section = load_table("kimi_k3", arch).kda_overlap
    split = [(m, section.fa_beta[int(m)].config["rows_per_warp"]) for m in PUBLIC["skinny_n_split"]]
    assert dict(split) == PUBLIC["skinny_n_split"] and dict(section.fa_beta[1].config) == PUBLIC["fab_skinny_m1"]
    if arch == SM90:
        assert not section.qkvg and not section.f_b
        assert section.limit is None or section.limit.provenance.kind == "measured"
        return
    assert {str(m): cell.config["row_warps"] for m, cell in section.f_b.items()} == PUBLIC["skinny_k_split"]
    assert {str(m): dict(section.qkvg[m].config) for m in (1, 2)} == PUBLIC["qkvg_skinny"]
    if arch == SM103:
        assert section.limit.max_tokens == PUBLIC["max_tokens"] and PUBLIC["device"] == load_table("kimi_k3", arch).device.name


HEAD = """\
format = 1
family = "toy"
arch = "sm90"
[device]
name = "H200"
sm_count = 132
memory = "HBM3e"
bandwidth_gbs = 4814
evidence = "here"
[sources.here]
kind = "measured"
device = "H200"
date = 2026-12-01
versions = {torch = "2"}
note = "n"
[sources.there]
kind = "public"
title = "t"
url = "u"
date = 2026-12-01
retrieved = 2026-12-01
note = "n"
[[projection]]
n = 8
k = 8
label = "toy"
cells = [{m = 1, backend = "fused_a", provenance = "public", source = "there"}]
[kda_overlap]
"""
MEASURED = 'limit = {max_tokens = 3, provenance = "measured", source = "here", time_us = 20.0, baseline_us = 21.0}\n'
FAB = 'fa_beta = [{m = "1..2", backend = "kda", rows_per_warp = 1, row_warps = 1, k_warps = 14, vector_width = 8, '
FAB += 'provenance = "public", source = "there"}]\n'


def load(tmp_path, section: str):
    (tmp_path / "toy_sm90.toml").write_text(HEAD + section)
    return load_table_file(tmp_path / "toy_sm90.toml")


def test_a_section_is_read(tmp_path):
    section = load(tmp_path, MEASURED + FAB).kda_overlap
    assert section.limit.max_tokens == 3 and section.limit.provenance.device == "H200"
    assert (section.limit.provenance.time_us, section.limit.provenance.baseline_us) == (20.0, 21.0)
    assert sorted(section.fa_beta) == [1, 2] and section.fa_beta[2].backend == "kda"
    never = MEASURED.replace("max_tokens = 3", "max_tokens = 0").replace("time_us = 20.0", "time_us = 22.0")
    assert load(tmp_path, never).kda_overlap.limit.max_tokens == 0
    assert load(tmp_path, FAB).kda_overlap.limit is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (MEASURED.replace("= 3", "= 17"), "limit: max_tokens: found 17, need 0 to 16"),
        (MEASURED.replace("20.0", "21.0"), "time_us: found 21.0 against a baseline_us of 21.0, max_tokens 3, need less"),
        (MEASURED.replace("= 3", "= 0"), "max_tokens 0, need less than baseline_us, or max_tokens 0 and not less"),
        (MEASURED.replace("time_us = 20.0, ", ""), "time_us: found nothing"),
        (MEASURED.replace('"here"', '"there"'), "need a key of .sources. of kind 'measured'"),
        ('limit = {max_tokens = 3, source = "there"}\n', "provenance: found nothing, need one of measured, public"),
        (FAB.replace('"1..2"', "17"), "fa_beta: m: found M = 17, need at most 16"),
        (FAB.replace("rows_per_warp = 1, ", ""), "rows_per_warp: found nothing"),
        (FAB.replace("fa_beta", "f_a"), "unknown key 'f_a'"),
        ("", None),
    ],
)
def test_a_broken_section_is_refused_with_its_place(tmp_path, section, message):
    if message is None:
        assert load(tmp_path, section).kda_overlap.limit is None
        return
    with pytest.raises(TableError, match=message) as error:
        load(tmp_path, section)
    assert "kda_overlap" in str(error.value)


def test_kda_is_no_backend_of_a_row(tmp_path):
    with pytest.raises(TableError, match="backend: found 'kda', need one of skinny"):
        text = HEAD.replace('backend = "fused_a"', 'backend = "kda", rows_per_warp = 1')
        (tmp_path / "toy_sm90.toml").write_text(text)
        load_table_file(tmp_path / "toy_sm90.toml")


def test_an_inherited_section_is_marked():
    section = load_table("kimi_k3", "sm107").kda_overlap
    parent = load_table("kimi_k3", "sm103").kda_overlap
    assert section.limit.max_tokens == parent.limit.max_tokens and section.limit.provenance.origin == parent.limit.provenance
    for name in GEOMETRY.shapes:
        cells = getattr(section, name).values()
        assert cells and {cell.provenance.kind for cell in cells} == {"inherited"}
