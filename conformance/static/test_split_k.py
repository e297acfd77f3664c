"""The predicate and the config of ``split_k``: what it refuses, and why."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lowlat_gemm.arch import SM90, SM100, SM103, SM107
from lowlat_gemm.backends import CONFIG_KEYS
from lowlat_gemm.kernels.split_k import SplitKConfig, compile_unit, parse_config, shared_memory_bytes, why_not

GOOD = SplitKConfig(56, 8, 4, 13)


def test_the_tables_may_name_what_the_config_has():
    keys = CONFIG_KEYS["split_k"]
    assert [*keys.required, *keys.optional] == [field.name for field in fields(SplitKConfig)]


@pytest.mark.parametrize("m", [1, 64, 300])
def test_what_is_served(m):
    assert why_not(SM90, 1536, 7168, m, GOOD) is None


@pytest.mark.parametrize("arch", [SM100, SM103, SM107], ids=str)
def test_other_generations_are_refused_by_name(arch):
    assert arch.name in why_not(arch, 1536, 7168, 8, GOOD)


@pytest.mark.parametrize(
    "shape, changes, fragment",
    [
        ((1536, 7168, 0), {}, "M = 0"),
        ((1536, 7172, 1), {}, "multiple of 8"),
        ((1536, 7168, 1), {"rows": 60}, "rows 60"),
        ((1536, 7168, 1), {"rows": 136}, "rows 136"),
        ((1536, 7168, 1), {"token_columns": 24}, "token_columns 24"),
        ((1536, 7168, 1), {"split": 9}, "split 9"),
        ((1536, 384, 1), {}, "has only 3 units"),
        ((1536, 7168, 1), {"k_blocks": 4}, "k_blocks 4"),
        ((1536, 7168, 1), {"stages": 1}, "stages 1"),
        ((1536, 7168, 1), {"token_stages": 1}, "token_stages 1"),
        ((1536, 7168, 1), {"rows": 128, "stages": 32}, "bytes of shared memory"),
    ],
)
def test_each_refusal_by_an_input_of_its_own(shape, changes, fragment):
    n, k, m = shape
    assert fragment in (why_not(SM90, n, k, m, replace(GOOD, **changes)) or "served")


@pytest.mark.parametrize("values", [{}, {"rows": 56}, {**vars(GOOD), "tile": 1}, {**vars(GOOD), "rows": 0}, {**vars(GOOD), "split": True}, {**vars(GOOD), "trigger": -1}])  # fmt: skip
def test_bad_mappings(values):
    with pytest.raises(ValueError, match="split_k config"):
        parse_config(values)
    assert parse_config({"rows": 56, "token_columns": 8, "split": 4, "stages": 13}) == GOOD


def test_one_compile_serves_every_shape_and_m():
    units = {compile_unit(SM90, n, k, m, GOOD) for n in (8, 1536) for k in (1024, 7168) for m in (1, 64, 300)}
    assert len(units) == 1
    assert compile_unit(SM90, 8, 1024, 1, replace(GOOD, prefetch=9)) in units, "the default prefetch is two thirds"


def test_two_kernels_share_an_sm_with_the_public_ring():
    """The ring of 13 stages of 56 rows was chosen so: 228 KB an SM, one KB a CTA for the system."""
    assert 2 * (shared_memory_bytes(GOOD) + 1024) <= 228 * 1024
