"""Select, plan and explain say the same for every cell, and every reason to fall back can be seen."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from conformance.fakes import clean_settings, clear_caches, cuda, device_of, fake_table, public_world, use_table  # noqa: F401
from lowlat_gemm import dispatch, settings
from lowlat_gemm.arch import ARCHES, SM90, SM100, SM103, SM107, DeviceProperties
from lowlat_gemm.dispatch import explain, plan_for, select_kimi_k3_backend
from lowlat_gemm.kernels.registry import built_backends
from lowlat_gemm.operands import Reason
from lowlat_gemm.settings import parse_deny
from lowlat_gemm.tables import load_table

pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")

#: A served skinny cell of SM90: (M, N, K).
SERVED = (1, 1536, 7168)
SKINNY = {"block_size": 128, "outputs_per_block": 2, "k_unroll": 1, "vector_width": 8}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Kernel packages count as installed, whatever this Python has."""
    monkeypatch.setattr(dispatch, "missing_packages", lambda: ())


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_a_cell_of_a_backend_that_is_not_built_is_selected_and_says_so(arch):
    keys = [key for key, cell in load_table("kimi_k3", arch).cells() if cell.backend not in built_backends(arch)]
    for n, k, m, residual in keys:
        decision = explain(m, n, k, arch=arch, has_residual=residual)
        assert decision.refusal.reason is Reason.BACKEND_NOT_BUILT and decision.backend in str(decision), str(decision)


def test_the_units_of_a_plan_are_those_of_its_entries():
    plan = plan_for(SM90, 1536, 7168)
    assert len(plan.units()) == len(set(plan.units())) == len({e.unit for e in plan.entries.values() if e.unit})
    assert plan.units() and plan is plan_for(SM90, 1536, 7168)


REASONS = {
    Reason.SHAPE: (1, 1536, 7176, {}, "1536x7176 is in no table for sm90"),
    Reason.TOKENS: (17, 1536, 7168, {}, "M = 17; the row has M = 1, 2, 3"),
    Reason.RESIDUAL: (*SERVED, {"has_residual": True}, "1536x7168 has none on sm90"),
    Reason.DTYPE: (*SERVED, {"dtype": "float16"}, "float16; the table is for bfloat16"),
    Reason.BIAS: (*SERVED, {"bias": True}, "bias present"),
    Reason.BACKEND_NOT_BUILT: (7, 1536, 7168, {}, "fused_a; this build has skinny"),
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_reasons_of_the_question_itself(reason):
    m, n, k, options, detail = REASONS[reason]
    decision = explain(m, n, k, arch="sm90", **options)
    assert not decision.runs and decision.refusal.reason is reason and detail in str(decision), str(decision)


@pytest.mark.parametrize("m", [0, -1, 17, 65, 10**9])
def test_a_residual_row_names_its_own_tokens(m):
    decision = explain(m, 7168, 3584, arch="sm103", has_residual=True)
    assert decision.refusal.reason is Reason.TOKENS and f"M = {m}; the row has M = 1, 2, 3, 4" in str(decision)
    assert select_kimi_k3_backend(m, 7168, 3584, has_residual=True, arch="sm103") is None


def test_disabled(clean_settings):  # noqa: F811
    settings.change(disabled=True)
    assert explain(*SERVED, arch="sm90").refusal.reason is Reason.DISABLED
    assert explain(1, 8, 8, arch="sm90").refusal.reason is Reason.DISABLED
    assert "LOWLAT_GEMM_DISABLE" in str(explain(*SERVED, arch="sm90"))
    assert select_kimi_k3_backend(*SERVED, arch="sm90") == "skinny"  # the table alone answers
    settings.change(problem="LOWLAT_GEMM_DENY entry 'x'")
    assert "LOWLAT_GEMM_DENY entry 'x'" in str(explain(*SERVED, arch="sm90"))


@pytest.mark.parametrize(
    ("entry", "denied"),
    [
        ("skinny", {(1, 1536), (2, 1536), (1, 3072)}),
        ("1536x7168", {(1, 1536), (2, 1536)}),
        ("1536x7168@2", {(2, 1536)}),
        ("skinny:1536x7168", {(1, 1536), (2, 1536)}),
        ("skinny:1536x7168@1,3072x7168", {(1, 1536), (1, 3072)}),
        ("fused_a", set()),
        ("1536x128", set()),
    ],
)
def test_the_deny_list(entry, denied):
    before = explain(*SERVED, arch="sm90")
    settings.change(deny=parse_deny(entry))
    refused = {(m, n) for m, n in ((1, 1536), (2, 1536), (1, 3072)) if not explain(m, n, 7168, arch="sm90").runs}
    assert refused == denied
    for m, n in denied:
        decision = explain(m, n, 7168, arch="sm90")
        assert decision.refusal.reason is Reason.DISABLED and "deny" in str(decision) and decision.backend == "skinny"
    settings.restore(settings.Settings())
    assert explain(*SERVED, arch="sm90") == before and before.runs


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_batch_invariant_mode_declines_every_skinny_cell(arch):
    settings.change(batch_invariant=True)
    for key, cell in load_table("kimi_k3", arch).cells():
        decision = explain(key.m, key.n, key.k, arch=arch, has_residual=key.residual)
        assert not decision.runs and not decision.batch_invariant
        if cell.backend == "skinny":
            assert decision.refusal.reason is Reason.BATCH_INVARIANT, (key, str(decision))


def test_strict_changes_no_decision():
    before = [explain(m, 1536, 7168, arch="sm90") for m in range(18)]
    settings.change(strict=True)
    assert [explain(m, 1536, 7168, arch="sm90") for m in range(18)] == before


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(dispatch, "missing_packages", lambda: ("apache-tvm-ffi",))
    decision = explain(*SERVED, arch="sm90")
    assert decision.refusal.reason is Reason.BACKEND_UNAVAILABLE and "apache-tvm-ffi" in str(decision)
    assert explain(7, 1536, 7168, arch="sm90").refusal.reason is Reason.BACKEND_NOT_BUILT  # said first: it is nearer


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 1), (11, 0), (12, 0), (12, 1)])
def test_an_unlisted_device_is_answered_with_its_capability(capability):
    with cuda(DeviceProperties("NVIDIA New", capability, 148, 8000.0)):
        decision = explain(*SERVED)
        assert select_kimi_k3_backend(*SERVED) is None
        assert decision.refusal.reason is Reason.CAPABILITY and decision.arch is None and decision.backend is None
        assert "NVIDIA New" in str(decision) and "%d.%d" % capability in str(decision) and "unlisted" in str(decision)
        assert select_kimi_k3_backend(*SERVED, arch="sm90") == "skinny"  # a named one is not the device


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_no_arch_is_the_current_device(arch):
    rows = load_table("kimi_k3", arch).projections
    n, k = next((n, k) for n, k in rows if plan_for(arch, n, k).units())
    m = next(m for m, entry in plan_for(arch, n, k).entries.items() if entry.refusal is None)
    with cuda(device_of(arch)):
        assert explain(m, n, k) == explain(m, n, k, arch=arch) and explain(m, n, k).runs
    with cuda(device_of(arch, sm_count=78, name="sibling")):
        decision = explain(m, n, k)
        assert decision.refusal.reason is Reason.DEVICE_CLASS and "sibling has 78 SMs" in str(decision)
        assert "LOWLAT_GEMM_ANY_DEVICE" in str(decision) and decision.backend == "skinny"
        assert explain(m, n, k, arch=arch).runs
        settings.change(any_device=True)
        assert explain(m, n, k).runs


def test_no_arch_without_cuda_is_sm103(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert explain(1, 3072, 7168) == explain(1, 3072, 7168, arch=SM103)
    assert select_kimi_k3_backend(1, 3072, 7168) == select_kimi_k3_backend(1, 3072, 7168, arch="sm103") == "skinny"


def test_sm107_inherits_from_sm103_and_says_so():
    table = load_table("kimi_k3", SM107)
    for key, cell in table.cells():
        parent = load_table("kimi_k3", SM103).cell(key.n, key.k, key.m, residual=key.residual)
        decision = explain(key.m, key.n, key.k, arch=SM107, has_residual=key.residual)
        if cell.provenance.kind == "inherited":
            assert (parent.backend, parent.config) == (decision.backend, decision.config)
            assert "inherited from sm103: public" in str(decision)
            assert decision.to_json()["provenance"]["origin"]["kind"] == "public"
    assert any(cell.provenance.kind == "inherited" for _, cell in table.cells())


@pytest.mark.parametrize("arch", ["sm80", "SM90", "", 90])
def test_an_unknown_arch_is_an_error(arch):
    for ask in (explain, select_kimi_k3_backend):
        with pytest.raises(ValueError, match="known are sm90, sm100, sm103, sm107"):
            ask(*SERVED, arch=arch)


def test_the_families_that_are_asked():
    assert explain(*SERVED, arch="sm90", names=("kimi_k3",)).runs
    assert explain(*SERVED, arch="sm90", names="kimi_k3").family == "kimi_k3"
    assert explain(*SERVED, arch="sm90", names=()).refusal.reason is Reason.SHAPE
    assert plan_for(SM90, 1536, 7168, ()) is None
    with pytest.raises(ValueError, match="'no_such_model'.*kimi_k3"):
        explain(*SERVED, arch="sm90", names=("kimi_k3", "no_such_model"))
    assert dispatch.families() == ("kimi_k3",)


BAD_CELLS = {
    "predicate": {1: ("skinny", SKINNY | {"vector_width": 16})},
    "parser": {1: ("skinny", SKINNY | {"stages": 2})},
    "too many registers": {1: ("skinny", SKINNY | {"outputs_per_block": 64, "k_unroll": 8})},
    "not an integer": {1: ("skinny", SKINNY | {"block_size": "128"})},
}


@pytest.mark.parametrize("kind", BAD_CELLS)
def test_a_bad_row_falls_back_with_one_warning(monkeypatch, caplog, kind):
    use_table(monkeypatch, fake_table(BAD_CELLS[kind] | {2: ("skinny", SKINNY)}))
    with caplog.at_level(logging.WARNING, "lowlat_gemm"):
        for _ in range(3):
            decision = explain(1, 64, 1024, arch="sm90")
            assert decision.refusal.reason is Reason.CONFIG and decision.backend == "skinny"
            assert explain(2, 64, 1024, arch="sm90").runs  # the row's good cells still run
        plan_for(SM90, 64, 1024)
    assert len(caplog.records) == 1, caplog.text
    assert "64x1024" in caplog.text and "sm90" in caplog.text and "M = 1" in caplog.text


def test_a_bad_row_is_not_warned_of_again_after_a_setting_changed(monkeypatch, caplog):
    use_table(monkeypatch, fake_table(BAD_CELLS["predicate"]))
    with caplog.at_level(logging.WARNING, "lowlat_gemm"):
        explain(1, 64, 1024, arch="sm90")
        settings.change(strict=True)
        explain(1, 64, 1024, arch="sm90")
    assert len(caplog.records) == 1, caplog.text


@pytest.mark.parametrize("m", [-1, 0, 65, 10**9, 1.5, "1", None, float("nan"), np.int64(0)])
def test_token_counts_that_no_row_has(m):
    decision = explain(m, 1536, 7168, arch="sm90")
    assert decision.refusal.reason is Reason.TOKENS and str(m) in str(decision)
    assert select_kimi_k3_backend(m, 1536, 7168, arch="sm90") is None


def test_a_boolean_is_the_integer_that_it_is():
    assert select_kimi_k3_backend(True, 1536, 7168, arch="sm90") == "skinny"
    assert select_kimi_k3_backend(False, 1536, 7168, arch="sm90") is None


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_integers(kind):
    n, k = np.int64(1536), np.int64(7168)
    assert select_kimi_k3_backend(kind(1), n, k, arch="sm90") == "skinny"
    decision = explain(kind(1), n, k, arch="sm90")
    assert decision.runs
    assert json.loads(json.dumps(decision.to_json())) == explain(*SERVED, arch="sm90").to_json()


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_every_decision_is_plain_json_and_readable(arch):
    for key, _ in load_table("kimi_k3", arch).cells():
        decision = explain(key.m, key.n, key.k, arch=arch, has_residual=key.residual)
        found = json.loads(json.dumps(decision.to_json()))
        assert found["arch"] == arch.name and found["backend"] == decision.backend and found["config"] == dict(decision.config)
        assert found["runs"] == (found["reason"] is None) == decision.runs
        text = str(decision)
        assert f"M={key.m} N={key.n} K={key.k}" in text and decision.label in text and str(decision.provenance) in text
        assert ("falls back" in text) != decision.runs


def test_plans_are_per_generation():
    plans = {arch.name: plan_for(arch, 7168, 3584) for arch in ARCHES}
    assert all(plan.arch.name == name and plan.table.arch == name for name, plan in plans.items() if plan)
    targets = {unit.target for plan in plans.values() if plan for unit in plan.units()}
    assert targets == {arch.compile_target for arch in ARCHES}


def test_the_first_family_with_the_shape_answers(monkeypatch):
    tables = {name: fake_table({1: (backend, SKINNY if backend == "skinny" else {})}, family=name) for name, backend in (("a", "skinny"), ("b", "fused_a"))}
    tables["b"] = replace(tables["b"], projections=dict(tables["b"].projections) | {(8, 8): next(iter(tables["b"].projections.values()))})
    monkeypatch.setattr(dispatch, "available_tables", lambda: [("a", "sm90"), ("b", "sm90")])
    monkeypatch.setattr(dispatch, "load_table", lambda family, arch: tables[family])
    clear_caches()
    assert explain(1, 64, 1024, arch=SM90).family == "a" and explain(1, 64, 1024, arch=SM90, names=("b", "a")).family == "b"
    assert explain(1, 8, 8, arch=SM90).family == "b"
    assert explain(1, 64, 1024, arch=SM100).refusal.reason is Reason.SHAPE
