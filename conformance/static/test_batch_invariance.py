"""Batch-invariant plans: one split for every M is served at every M, anything else is declined whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.fakes import bf16, clean_settings, cuda, device_of, execute, fake_table, public_world, use_table  # noqa: F401
from lowlat_gemm import explain, plan_for, settings
from lowlat_gemm.arch import SM90
from lowlat_gemm.dispatch import entry_refusal
from lowlat_gemm.kernels import registry
from lowlat_gemm.operands import Reason

pytestmark = pytest.mark.usefixtures("clean_settings", "public_world", "split_k_proven")


@pytest.fixture
def split_k_proven(monkeypatch):
    """The dispatcher as it is where split_k's run is recorded."""
    proven = frozenset(registry._BACKENDS["split_k"].kernel_modules)
    monkeypatch.setitem(registry._BACKENDS, "split_k", replace(registry._BACKENDS["split_k"], proven=proven))


N, K = 64, 1024
SKINNY = ("skinny", {"block_size": 64, "outputs_per_block": 2, "k_unroll": 1, "vector_width": 8})


def split(columns: int, split: int = 2):
    return "split_k", {"rows": 64, "token_columns": columns, "split": split, "stages": 4}


ONE_SPLIT = {1: split(8), 2: split(8), 16: split(16), 64: split(64)}
MIXED = {
    "two splits": {**ONE_SPLIT, 64: split(64, 3)},
    "two backends": {**ONE_SPLIT, 1: SKINNY},
    "a backend that depends on M": {1: SKINNY},
    "a backend that is not there": {**ONE_SPLIT, 4: ("fused_a", {})},
    "a config that does not fit": {**ONE_SPLIT, 4: split(20)},
}


def test_a_row_of_one_split_says_so(monkeypatch):
    use_table(monkeypatch, fake_table(ONE_SPLIT, n=N, k=K))
    decision = explain(2, N, K, arch="sm90")
    assert decision.runs and decision.batch_invariant and "the same over M" in str(decision)
    refusal = explain(3, N, K, arch="sm90").refusal
    assert refusal.reason is Reason.TOKENS, "without the mode, an M that the table lacks is the caller's own"


@pytest.mark.parametrize("m, columns", [(1, 8), (3, 16), (16, 16), (17, 64), (64, 64), (65, 64), (100_000, 64)])
def test_in_the_mode_it_serves_every_m(monkeypatch, m, columns):
    settings.change(batch_invariant=True)
    use_table(monkeypatch, fake_table(ONE_SPLIT, n=N, k=K))
    plan = plan_for(SM90, N, K)
    assert entry_refusal(plan, m, False) is None and plan.entry(m, False).config.token_columns == columns
    assert explain(m, N, K, arch="sm90").runs
    assert entry_refusal(plan, 0, False).reason is Reason.TOKENS
    assert entry_refusal(plan, m, True).reason is Reason.RESIDUAL, "the row has no residual epilogue"


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_row_is_declined_whole(monkeypatch, name):
    use_table(monkeypatch, fake_table(MIXED[name], n=N, k=K))
    assert not any(plan_for(SM90, N, K).invariant), name
    settings.change(batch_invariant=True)
    plan = plan_for(SM90, N, K)
    assert plan.units() == [] and all(entry.refusal is not None for entry in plan.entries.values())
    assert entry_refusal(plan, 2, False).reason in (Reason.BATCH_INVARIANT, Reason.TOKENS)
    assert entry_refusal(plan, 300, False).reason is Reason.TOKENS


def test_denying_one_m_declines_the_row(monkeypatch):
    use_table(monkeypatch, fake_table(ONE_SPLIT, n=N, k=K))
    settings.change(batch_invariant=True, deny=settings.parse_deny(f"{N}x{K}@16"))
    plan = plan_for(SM90, N, K)
    assert plan.units() == [] and entry_refusal(plan, 1, False).reason is Reason.BATCH_INVARIANT


def test_the_residual_epilogue_is_judged_by_itself(monkeypatch):
    use_table(monkeypatch, fake_table(ONE_SPLIT, residual_cells={1: SKINNY}, n=N, k=K))
    settings.change(batch_invariant=True)
    plan = plan_for(SM90, N, K)
    assert plan.invariant == (True, False)
    assert entry_refusal(plan, 5, False) is None and entry_refusal(plan, 1, True).reason is Reason.BATCH_INVARIANT


def test_what_is_not_proven_is_not_dispatched(monkeypatch):
    monkeypatch.setitem(registry._BACKENDS, "split_k", replace(registry._BACKENDS["split_k"], proven=frozenset()))
    use_table(monkeypatch, fake_table(ONE_SPLIT, n=N, k=K))
    plan = plan_for(SM90, N, K)
    assert plan.units() == [] and entry_refusal(plan, 1, False).reason is Reason.BACKEND_NOT_BUILT


@pytest.fixture
def gpu(monkeypatch):
    """A GPU in batch-invariant mode, whose row has one split with and without residual."""
    use_table(monkeypatch, fake_table(ONE_SPLIT, residual_cells=ONE_SPLIT, n=N, k=K))
    settings.change(batch_invariant=True)
    with torch.no_grad(), cuda(device_of(SM90)) as fake:
        yield fake


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("columns", [8, 64])
def test_a_kernel_that_does_not_compile_declines_the_row_whole(gpu, columns, residual):
    compiler = gpu.compiler

    def broken(unit):
        if unit.spec.config.token_columns == columns and unit.spec.residual == residual:
            raise RuntimeError("no such instruction")
        return compiler(unit)

    gpu.compiler = broken
    weight = bf16(N, K)
    for m in (16, 1, 64, 300, 16):  # the first is not the one that fails
        added = bf16(m, N) if residual else None
        assert execute.try_low_latency_gemm(bf16(m, K), weight, added) is None
        assert execute.run_or_refuse(bf16(m, K), weight, added).reason is Reason.BACKEND_UNAVAILABLE
    assert gpu.calls == [] and gpu.cache.compiles <= 3
    other = None if residual else bf16(16, N)
    assert execute.try_low_latency_gemm(bf16(16, K), weight, other) is not None, "that epilogue is judged by itself"


def test_a_capture_takes_the_row_in_whole_or_not_at_all(gpu):
    weight, plan = bf16(N, K), execute.device_plan(0, N, K)
    execute.compile_ahead([plan.entry(1, False).unit])
    gpu.capturing = True
    assert execute.run_or_refuse(bf16(1, K), weight).reason is Reason.CAPTURE, "M = 64 would be refused"
    execute.compile_ahead(plan.units())
    late = gpu.cache.late
    assert all(execute.try_low_latency_gemm(bf16(m, K), weight) is not None for m in (1, 64, 65))
    assert gpu.cache.late == late


def test_without_the_mode_one_failure_is_its_own(gpu):
    settings.change(batch_invariant=False)
    execute.compile_ahead([execute.device_plan(0, N, K).entry(1, False).unit])
    gpu.compile_error = RuntimeError("no")
    assert execute.try_low_latency_gemm(bf16(1, K), bf16(N, K)) is not None
    assert execute.try_low_latency_gemm(bf16(16, K), bf16(N, K)) is None
