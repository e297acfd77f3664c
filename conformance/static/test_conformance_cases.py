"""Cases are data: a row brings its own, every written kernel has standing cases, and ids are readable and unique."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conformance import cases, standing
from conformance.fakes import clean_settings, clear_caches  # noqa: F401
from lowlat_gemm.arch import ARCHES, SM90, SM103
from lowlat_gemm.kernels import flashinfer
from lowlat_gemm.kernels.registry import every_backend
from lowlat_gemm.projection import Projection
from lowlat_gemm.tables import load_table
from lowlat_gemm.tables.schema import frozen


def test_a_new_row_brings_its_cases(monkeypatch):
    table = load_table("kimi_k3", SM90)
    spec = next(iter(table.projections.values()))
    row = replace(spec, n=spec.n + 16, cells=frozen(dict(spec.cells)))
    longer = replace(table, projections=frozen({**table.projections, (row.n, row.k): row}))
    before = {str(case) for case in cases.table_cases(SM90)}
    monkeypatch.setattr(cases, "load_table", lambda family, arch: longer if (family, arch) == ("kimi_k3", "sm90") else load_table(family, arch))
    new = {str(case) for case in cases.table_cases(SM90)} - before
    assert len(new) == len(row.cells) and all(f"-{row.n}x{row.k}-" in name for name in new)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_a_cell_that_its_kernel_refuses_is_still_a_case(arch, monkeypatch, clean_settings):
    """It must fail the suite, not drop out of it."""
    refused = {name: replace(one, why_not=lambda *args, **options: "no") for name, one in every_backend().items()}
    with_kernel = len(cases.kernel_cases(arch))
    monkeypatch.setattr("lowlat_gemm.kernels.registry._BACKENDS", refused)
    clear_caches()
    assert all(case.entry.unit is None for case in cases.kernel_cases(arch))
    assert with_kernel and len(cases.kernel_cases(arch)) == with_kernel


def test_every_kernel_that_is_written_has_standing_cases():
    assert set(standing.DEFAULT_CONFIGS) == set(every_backend())
    for found in (standing.standing_cases(SM90), standing.lm_head_cases(SM90)):
        assert {case.cell.backend for case in found} == set(every_backend())
    residual = {case.cell.backend for case in standing.standing_cases(SM90) if case.residual}
    assert residual == set(every_backend())


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_ids_are_unique(arch):
    everything = cases.table_cases(arch) + standing.standing_cases(arch) + standing.lm_head_cases(arch)
    assert len({str(case) for case in everything}) == len(everything)
    units = cases.written_units(arch)
    assert len({cases.unit_id(unit) for unit in units}) == len(units)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_every_cell_is_found_by_the_unit_that_it_compiles_from(arch):
    for case in cases.table_cases(arch):
        unit = cases.written_unit(case)
        assert unit is None or case in cases.cells_of_unit(unit), str(case)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_what_projection_compiles_by_default_is_checked(arch, monkeypatch, clean_settings):
    """Asked of ``Projection`` itself, on the device that the generation's table names."""
    device = load_table("kimi_k3", arch).device
    monkeypatch.setattr("lowlat_gemm.projection.device_properties", lambda index: device)
    checked, reached = set(cases.written_units(arch)), 0
    rows = [(key.n, key.k) for key, cell in load_table("kimi_k3", arch).cells() if cell.backend == "skinny"]
    shapes = dict.fromkeys(rows, ()) | dict.fromkeys(cases.projection_shapes_by_default(), range(4, 65))
    for (n, k), split_k_tokens in shapes.items():
        projection = object.__new__(Projection)
        weight = SimpleNamespace(dtype=torch.bfloat16, device=SimpleNamespace(index=0))
        vars(projection).update(arch=arch, n=n, k=k, weight=weight)
        asked = [projection._split_k_unit(tokens) for tokens in split_k_tokens]
        for m in cases.SKINNY_TOKENS:
            named = projection._cell("skinny", m) is not None
            asked += [projection._skinny_unit(m)] if named or split_k_tokens else []
        units = [unit for unit in asked if unit is not None]
        reached += len(units)
        missing = {cases.unit_id(unit) for unit in units} - {cases.unit_id(unit) for unit in checked}
        assert not missing, f"{arch} {n}x{k}: not compile-checked: {sorted(missing)}"
    assert reached > 100


def test_another_packages_kernels_are_not_held_to_our_contract(monkeypatch):
    foreign = flashinfer.compile_unit(SM103, 6144, 7168, 3, flashinfer.FlashInferConfig("cute-dsl"))
    monkeypatch.setattr(cases, "overlap_units", lambda arch: [foreign])
    assert foreign not in cases.written_units(SM103)


def test_one_of_the_heads_has_more_than_2_to_the_31_bytes():
    assert any(2 * n * k > 2**31 for n, k in standing.LM_HEADS)
