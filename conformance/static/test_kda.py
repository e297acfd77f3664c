"""The predicate of the KDA pair: it serves the public configs at every M, and says why it refuses others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowlat_gemm.arch import ARCHES, SM90, SM100
from lowlat_gemm.kernels import kda

PUBLIC = json.loads((Path(__file__).parents[1] / "data" / "kimi_k3_public_vllm_0_33_0.json").read_text())["kda_overlap"]
F_A, F_B = (144, 7168), (1536, 128)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_public_configs_are_served_at_every_m(arch):
    for m in range(2, 17):
        few, many = PUBLIC["skinny_n_split"][str(m)], PUBLIC["skinny_k_split"][str(m)]
        assert kda.why_not(arch, *F_A, m, kda.skinny_n_config(few)) is None
        assert kda.why_not(arch, *F_B, m, kda.skinny_k_config(many)) is None
    for config, shape in ((kda.skinny_n_config(1), F_A), (kda.skinny_k_config(8), F_B)):
        assert kda.why_not(arch, *shape, 1, config) is None


@pytest.mark.parametrize(
    "shape, m, changes, fragment",
    [
        (F_A, 0, {}, "M = 0"),
        (F_A, 17, {}, "1 to 16 tokens"),
        ((144, 7176), 1, {}, "a multiple of 3584"),
        ((0, 7168), 1, {}, "N = 0"),
        (F_A, 1, {"vector_width": 3}, "vector_width 3"),
        (F_A, 1, {"k_warps": 33}, "1 to 32 warps"),
        (F_A, 1, {"row_warps": 0}, "1 to 32 warps"),
        (F_A, 16, {"rows_per_warp": 12}, "registers a thread"),
    ],
)
def test_each_refusal_by_an_input_of_its_own(shape, m, changes, fragment):
    assert fragment in (kda.why_not(SM90, *shape, m, replace(kda.skinny_n_config(1), **changes)) or "served")


def test_there_is_no_residual():
    assert "no residual" in kda.why_not(SM90, *F_A, 1, kda.skinny_n_config(1), residual=True)


def test_sm90_converts_and_later_generations_do_not():
    units = {arch: kda.compile_unit(arch, *F_B, 4, kda.skinny_k_config(16)) for arch in ARCHES}
    assert [units[arch].spec.mixed_fma for arch in ARCHES] == [False, True, True, True]
    assert units[SM100].spec.steps == 1 and kda.compile_unit(SM90, *F_A, 4, kda.skinny_n_config(3)).spec.steps == 2


def test_one_compile_serves_every_n():
    config = kda.skinny_k_config(8)
    assert len({kda.compile_unit(SM90, n, 128, 4, config) for n in (1, 768, 1536, 3072)}) == 1
