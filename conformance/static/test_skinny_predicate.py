"""The one predicate of the skinny kernel: every table cell passes, and every way to be refused has its own input."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat_gemm.arch import ARCHES, SM90, Arch
from lowlat_gemm.backends import BACKEND_NAMES, CONFIG_KEYS
from lowlat_gemm.kernels import skinny
from lowlat_gemm.kernels.registry import backend, built_backends
from lowlat_gemm.kernels.skinny import SkinnyConfig, compile_unit, parse_config, registers, shared_memory_bytes, why_not
from lowlat_gemm.tables import available_tables, load_table

GOOD = SkinnyConfig(block_size=128, outputs_per_block=2, k_unroll=2, vector_width=8)
CELLS = [
    (arch, key, cell)
    for family, arch in available_tables()
    for key, cell in load_table(family, arch).cells()
    if cell.backend == "skinny"
]


def with_(**changes) -> SkinnyConfig:
    return dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_every_skinny_cell_of_the_tables_is_served(arch):
    cells = [(key, cell) for name, key, cell in CELLS if name == arch.name]
    assert cells
    refused = {}
    for key, cell in cells:
        config = parse_config(cell.config)
        problem = why_not(arch, key.n, key.k, key.m, config, residual=key.residual)
        if problem is not None:
            refused[tuple(key)] = problem
    assert refused == {}


TINY = Arch("sm0", (0, 0), "sm_0", "a CTA with next to no shared memory", 16)

REFUSED = {
    "no token": (SM90, 64, 4096, 0, GOOD, "M = 0: skinny serves 1 to 16"),
    "negative M": (SM90, 64, 4096, -1, GOOD, "M = -1"),
    "too many tokens": (SM90, 64, 4096, 17, GOOD, "M = 17: skinny serves 1 to 16"),
    "no N": (SM90, 0, 4096, 1, GOOD, "N = 0"),
    "no K": (SM90, 64, 0, 1, GOOD, "K = 0"),
    "vector of 16": (SM90, 64, 4096, 1, with_(vector_width=16), "vector_width 16: expected 2, 4 or 8"),
    "vector of 3": (SM90, 64, 4096, 1, with_(vector_width=3), "vector_width 3"),
    "vector of 1": (SM90, 64, 4096, 1, with_(vector_width=1), "vector_width 1"),
    "K of half words": (SM90, 64, 4100, 1, GOOD, "K = 4100: expected a multiple of 8"),
    "another static K": (SM90, 64, 4096, 1, with_(static_k=7168), "config is for K = 7168, not 4096"),
    "K shorter than a step": (SM90, 64, 1016, 1, GOOD, "K = 1016 is shorter than one step of 1024"),
    "half a warp": (SM90, 64, 4096, 1, with_(block_size=16), "block_size 16: expected whole warps"),
    "a warp and a half": (SM90, 64, 4096, 1, with_(block_size=48), "block_size 48"),
    "too many threads": (SM90, 64, 65536, 1, with_(block_size=1056), "block_size 1056: expected whole warps, 32 to 1024"),
    "too many outputs": (SM90, 64, 4096, 1, with_(outputs_per_block=65, k_unroll=1, vector_width=2), "outputs_per_block 65"),
    "too many registers": (SM90, 64, 4096, 16, with_(outputs_per_block=8), "registers a thread at M = 16, 208 are there"),
    "registers of a full SM": (SM90, 64, 65536, 4, with_(block_size=1024), "registers a thread at M = 4, 32 are there"),
    "shared memory": (TINY, 64, 4096, 1, GOOD, "needs 32 bytes of shared memory, sm0 has 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_refusal_by_an_input_of_its_own(name):
    *inputs, message = REFUSED[name]
    found = why_not(*inputs)
    assert found is not None and message in found, found


@pytest.mark.parametrize("k", [1024, 2040, 2048, 2056, 7168])
def test_the_good_config_is_served(k):
    assert why_not(SM90, 64, k, 4, GOOD) is None
    assert why_not(SM90, 1, k, 4, GOOD) is None  # fewer rows than outputs_per_block: the kernel masks
    assert why_not(SM90, 64, k, 4, with_(static_k=k)) is None


VALUES = {"block_size": 128, "outputs_per_block": 2, "k_unroll": 2, "vector_width": 8}


def test_a_config_is_read_from_a_tables_mapping():
    assert parse_config(VALUES) == GOOD and parse_config(VALUES | {"static_k": 7168}) == with_(static_k=7168)
    assert GOOD.step == 1024 and GOOD.chunk == 2048


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({key: value for key, value in VALUES.items() if key != "k_unroll"}, "missing ['k_unroll']"),
        (VALUES | {"stages": 4}, "unknown ['stages']"),
        (VALUES | {"block_size": 0}, "'block_size': 0"),
        (VALUES | {"k_unroll": -1}, "'k_unroll': -1"),
        (VALUES | {"vector_width": 8.0}, "'vector_width': 8.0"),
        (VALUES | {"vector_width": "8"}, "'vector_width': '8'"),
        (VALUES | {"static_k": 0}, "'static_k': 0"),
        (VALUES | {"k_unroll": True}, "'k_unroll': True"),
        ({}, "missing ['block_size'"),
    ],
)
def test_a_bad_mapping_is_refused_with_its_value(values, message):
    with pytest.raises(ValueError) as error:
        parse_config(values)
    assert message in str(error.value)


def test_the_tables_keys_are_the_configs_fields():
    fields = dataclasses.fields(SkinnyConfig)
    keys = CONFIG_KEYS["skinny"]
    assert set(keys.required) == {field.name for field in fields if field.default is dataclasses.MISSING}
    assert set(keys.optional) == {field.name for field in fields if field.default is not dataclasses.MISSING}
    assert tuple(CONFIG_KEYS) == BACKEND_NAMES


configs = st.builds(
    SkinnyConfig,
    block_size=st.integers(1, 32).map(lambda warps: 32 * warps),
    outputs_per_block=st.integers(1, 64),
    k_unroll=st.integers(1, 8),
    vector_width=st.sampled_from([2, 4, 8]),
)


@given(configs, st.integers(1, 15))
def test_more_tokens_never_need_less(config, m):
    assert registers(config, m) < registers(config, m + 1)
    assert shared_memory_bytes(config, m) < shared_memory_bytes(config, m + 1)
    if why_not(SM90, 64, 65536, m + 1, config) is None:
        assert why_not(SM90, 64, 65536, m, config) is None


@given(configs, st.integers(1, 16), st.sampled_from(["outputs_per_block", "k_unroll"]))
def test_a_larger_config_never_needs_fewer_registers(config, m, name):
    larger = dataclasses.replace(config, **{name: getattr(config, name) + 1})
    assert registers(config, m) < registers(larger, m)


@given(configs, st.integers(1, 16), st.integers(1, 2_000))
def test_what_is_served_fits_and_its_unit_has_a_whole_first_chunk(config, m, words):
    k = 8 * words
    if why_not(SM90, 64, k, m, config) is None:
        compiled = compile_unit(SM90, 64, k, m, config).spec.config  # the kernel loads its first chunk unmasked
        assert config.step == compiled.step and compiled.chunk <= k
        # The register file holds at least one CTA of what is estimated.
        assert registers(compiled, m) <= 208 and registers(compiled, m) * config.block_size <= 65_536
        assert shared_memory_bytes(compiled, m) <= SM90.shared_memory_bytes


def test_a_unit_is_for_every_n_and_every_k_that_has_a_whole_chunk():
    same = {compile_unit(SM90, n, k, 4, GOOD) for n in (1, 64, 20480) for k in (2048, 2056, 7168)}
    assert len(same) == 1 and same.pop().spec.config == GOOD
    assert compile_unit(SM90, 64, 2040, 4, GOOD).spec.config == with_(k_unroll=1)
    different = [(SM90, 4, False), (ARCHES[1], 4, False), (SM90, 3, False), (SM90, 4, True)]
    assert len({compile_unit(arch, 64, 7168, m, GOOD, residual=residual) for arch, m, residual in different}) == 4


def test_the_registry_has_the_predicate_that_is_tested_here():
    found = backend("skinny", SM90)
    assert found.why_not is skinny.why_not and found.parse_config is parse_config and found.name == "skinny"
    for arch in ARCHES:
        assert built_backends(arch) == tuple(name for name in BACKEND_NAMES if backend(name, arch) is not None)
    with pytest.raises(ValueError, match="'cute'.*skinny, fused_a, split_k, flashinfer"):
        backend("cute", SM90)
