"""The predicate and the config of ``split_k``: what it refuses, and why."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from conformance.cases import SPLIT_K_CONFIGS
from lowlat_gemm.arch import ARCHES, SM90, SM100, SM107
from lowlat_gemm.backends import CONFIG_KEYS
from lowlat_gemm.kernels.registry import built_backends, kernel_module
from lowlat_gemm.kernels.split_k import (
    SplitKConfig,
    compile_unit,
    parse_config,
    shared_memory_bytes,
    tensor_columns,
    why_not,
)

GOOD = SplitKConfig(56, 8, 4, 13)


def test_the_tables_may_name_what_the_config_has():
    keys = CONFIG_KEYS["split_k"]
    assert [*keys.required, *keys.optional] == [field.name for field in fields(SplitKConfig)]


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_what_is_served(arch, m):
    for config in (GOOD, *SPLIT_K_CONFIGS):
        assert why_not(arch, 1536, 7168, m, config) is None, config


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_public_tactics_are_served(arch, rows, tokens):
    """(weight rows, token columns, split 1 to 4, stages) from a ring that fills less than half of an SM to what fits."""
    for split in (1, 2, 3, 4):
        stages = [n for n in range(2, 33) if why_not(arch, 1536, 7168, tokens, SplitKConfig(rows, tokens, split, n)) is None]
        least, most = (shared_memory_bytes(SplitKConfig(rows, tokens, split, n)) for n in (stages[0], stages[-1]))
        assert stages == list(range(stages[0], stages[-1] + 1)), stages
        assert least <= arch.shared_memory_bytes // 2 and most > 0.7 * min(arch.shared_memory_bytes, 32 * rows * 128)


def test_each_generation_has_its_module():
    assert kernel_module("split_k", "sm_90a") == "split_k_sm90_kernel"
    assert {kernel_module("split_k", arch.compile_target) for arch in ARCHES if arch != SM90} == {"split_k_sm100_kernel"}
    assert len({kernel_module("skinny", arch.compile_target) for arch in ARCHES}) == 1
    with pytest.raises(KeyError):
        kernel_module("split_k", "sm_80")


@pytest.mark.parametrize("arch", [SM100, SM107], ids=str)
def test_no_mix_of_ctas_runs_out_of_tensor_memory(arch):
    """512 columns an SM (PTX ISA, tcgen05): as many CTAs as shared memory admits, the hungriest for columns first."""
    per_sm = arch.shared_memory_bytes + 1024
    served = 0
    for rows, tokens, stages in [(rows, n, s) for rows in (8, 56, 72, 128) for n in (8, 32, 64) for s in range(2, 20)]:
        config = SplitKConfig(rows, tokens, 1, stages)
        if why_not(arch, 1536, 7168, tokens, config) is None:
            served += 1
            ctas = per_sm // (shared_memory_bytes(config) + 1024)
            assert ctas * tensor_columns(config) <= 512, f"{config}: {ctas} CTAs of {tensor_columns(config)} columns"
    assert served > 50


def test_a_small_ring_with_much_tensor_memory_is_refused():
    small = SplitKConfig(72, 64, 1, 2)
    assert why_not(SM90, 1536, 7168, 64, small) is None
    assert why_not(SM100, 1536, 7168, 64, small) is None
    assert "with 128 columns of tensor memory" in why_not(SM107, 1536, 7168, 64, small)


@pytest.mark.parametrize(
    "shape, changes, fragment",
    [
        ((1536, 7168, 0), {}, "M = 0"),
        ((1536, 7172, 1), {}, "multiple of 8"),
        ((1536, 7168, 1), {"rows": 60}, "rows 60"),
        ((1536, 7168, 1), {"rows": 136}, "rows 136"),
        ((1536, 7168, 1), {"token_columns": 20}, "token_columns 20"),
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

@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_split_k_is_dispatched_where_its_code_has_been_run(arch):
    """wgmma has a record, tcgen05 has none; skinny and fused_a are one source for all generations."""
    assert ("split_k" in built_backends(arch)) == (arch == SM90)
    assert {"skinny", "fused_a"} <= set(built_backends(arch))
