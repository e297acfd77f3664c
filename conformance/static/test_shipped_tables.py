"""Select, plan and explain say the same for every cell of the tables that ship, and every cell of a built backend runs."""

from __future__ import annotations

import itertools

import pytest

from conformance.fakes import ROWS, clean_settings  # noqa: F401
from lowlat_gemm import dispatch
from lowlat_gemm.dispatch import explain, plan_for, select_kimi_k3_backend
from lowlat_gemm.kernels.registry import built_backends
from lowlat_gemm.tables import load_table

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Kernel packages count as installed, whatever this Python has."""
    monkeypatch.setattr(dispatch, "missing_packages", lambda: ())


@pytest.mark.parametrize(("arch", "n", "k"), ROWS, ids=lambda value: str(value))
def test_select_plan_and_explain_agree_with_the_table(arch, n, k):
    spec, plan = load_table("kimi_k3", arch).projections[n, k], plan_for(arch, n, k)
    wrong = {}
    for residual, m in itertools.product((False, True), range(66)):
        cell = (spec.residual_cells if residual else spec.cells).get(m)
        entry, decision = plan.entry(m, residual), explain(m, n, k, arch=arch, has_residual=residual)
        said = {
            "select": select_kimi_k3_backend(m, n, k, has_residual=residual, arch=arch),
            "select by name": select_kimi_k3_backend(m, n, k, has_residual=residual, arch=arch.name),
            "plan": entry and entry.cell.backend,
            "explain": decision.backend,
        }
        expected = cell and cell.backend
        if set(said.values()) != {expected}:
            wrong[m, residual] = (expected, said)
        # What runs is what the table names and this build has: nothing more, nothing less.
        if decision.runs != (expected in built_backends(arch)) or decision.runs != (entry is not None and entry.refusal is None):
            wrong[m, residual] = (expected, str(decision))
        if cell and (decision.config, decision.provenance) != (cell.config, cell.provenance):
            wrong[m, residual] = (cell, decision)
    assert wrong == {}
