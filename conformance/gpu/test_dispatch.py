"""Dispatch on the device itself: what falls back does, with its reason, and a model is served through its linears."""

from __future__ import annotations

import copy

import pytest
import torch

from conformance.cases import kernel_cases
from conformance.harness import operands
from lowlat_gemm import disable_low_latency_gemm, enable_low_latency_gemm, execute, explain, settings
from lowlat_gemm import try_low_latency_gemm
from lowlat_gemm.arch import DeviceProperties
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import parity


def test_cells_without_a_kernel_fall_back_with_their_reason(table_case):
    case = table_case
    decision = explain(case.m, case.n, case.k, has_residual=case.residual)
    assert decision.arch == case.arch.name, f"{case}: the device is asked as {decision.arch}"
    assert decision.backend == case.cell.backend, f"{case}: explain says {decision.backend}"
    if decision.runs:
        return
    data = operands(case.n, case.k, "random")
    residual = data.residual[: case.m] if case.residual else None
    result = execute.run_or_refuse(data.x[: case.m], data.weight, residual)
    assert isinstance(result, Refusal) and result.reason is decision.refusal.reason, f"{case}: {result}"
    assert try_low_latency_gemm(data.x[: case.m], data.weight, residual) is None


def _first(arch):
    return next(case for case in kernel_cases(arch) if not case.residual and case.m == 2)


def _reason(*tensors) -> Reason:
    result = execute.run_or_refuse(*tensors)
    assert isinstance(result, Refusal), "expected a fall back"
    return result.reason


def test_calls_that_fall_back(arch):
    case = _first(arch)
    data = operands(case.n, case.k, "random")
    x, w = data.x[:2], data.weight
    assert _reason(x[:0], w) is Reason.TOKENS
    assert _reason(data.x.repeat(5, 1), w) is Reason.TOKENS
    assert _reason(x.half(), w.half()) is Reason.DTYPE
    assert _reason(x.cpu(), w) is Reason.CAPABILITY
    assert _reason(x, w.cpu()) is Reason.DEVICE_MISMATCH
    assert _reason(x[0], w) is Reason.RANK
    assert _reason(x, w[:, : case.k - 8]) is Reason.WEIGHT_LAYOUT
    assert _reason(x[:, 8:], w) is Reason.K_MISMATCH
    assert _reason(x, w[: case.n - 8]) is Reason.SHAPE
    assert _reason(x.clone().requires_grad_(), w) is Reason.AUTOGRAD
    odd = torch.empty(2 * case.k + 1, dtype=x.dtype, device="cuda")[1:].view(2, case.k)
    assert _reason(odd, w) is Reason.ALIGNMENT
    torch.cuda.synchronize()  # nothing above may leave an error behind
    assert torch.isfinite(try_low_latency_gemm(x, w)).all()


def test_switches(arch):
    rows_that_depend_on_m = (
        case for case in kernel_cases(arch)
        if not case.residual and case.m == 2 and not explain(2, case.n, case.k, arch=arch.name).batch_invariant
    )  # fmt: skip
    case = next(rows_that_depend_on_m)
    data = operands(case.n, case.k, "random")
    x, w = data.x[:2], data.weight
    for fields, reason in (
        ({"disabled": True}, Reason.DISABLED),
        ({"deny": settings.parse_deny(f"{case.n}x{case.k}@2")}, Reason.DISABLED),
        ({"batch_invariant": True}, Reason.BATCH_INVARIANT),
    ):
        before = settings.change(**fields)
        try:
            assert _reason(x, w) is reason, fields
        finally:
            settings.restore(before)
    assert try_low_latency_gemm(x, w) is not None


def test_a_sibling_device_is_declined_unless_told_otherwise(arch, monkeypatch):
    case = _first(arch)
    data = operands(case.n, case.k, "random")
    sibling = DeviceProperties("a sibling", arch.capability, 78, 4000.0)
    monkeypatch.setattr(execute, "device_properties", lambda ordinal: sibling)
    execute._device_plan.cache_clear()
    try:
        assert _reason(data.x[:2], data.weight) is Reason.DEVICE_CLASS
        before = settings.change(any_device=True)
        try:
            assert try_low_latency_gemm(data.x[:2], data.weight) is not None
        finally:
            settings.restore(before)
    finally:
        execute._device_plan.cache_clear()


class _Tower(torch.nn.Module):
    """Two linears of the table's shapes, one that no table has, one with a bias."""

    def __init__(self, n: int, k: int):
        super().__init__()
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.up = torch.nn.Linear(k, n, bias=False, **options)
        self.twin = torch.nn.Linear(k, n, bias=False, **options)
        self.small = torch.nn.Linear(n, 24, bias=False, **options)
        self.biased = torch.nn.Linear(k, n, **options)

    def forward(self, x):
        return self.small(self.up(x) + self.twin(x)) + self.biased(x)[..., :24]


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
def test_a_model_is_served_through_its_linears(arch, shape):
    case = _first(arch)
    torch.manual_seed(0)
    model = _Tower(case.n, case.k)
    report = enable_low_latency_gemm(model, torch.bfloat16)
    assert report.installed == ("up", "twin"), report
    assert enable_low_latency_gemm(model, torch.bfloat16).installed == report.installed
    compiles = execute.COMPILE_CACHE.compiles
    x = torch.randn(*shape, case.k, device="cuda").bfloat16()
    with torch.inference_mode():
        y = model.up(x)
        assert y.shape == (*shape, case.n)
        data_y, rows = y.reshape(-1, case.n), x.reshape(-1, case.k)
        assert torch.equal(data_y, try_low_latency_gemm(rows, model.up.weight.detach()))
        assert parity(data_y, operands_reference(rows, model.up.weight)).ok
        large = torch.randn(300, case.k, device="cuda").bfloat16()
        want = torch.nn.functional.linear(large, model.up.weight)
        assert torch.equal(model.up(large), want), "above the plan the module's own GEMM runs"
        assert model.up(x[:0]).shape == (*x[:0].shape[:-1], case.n)
        twin = copy.deepcopy(model)
        twin.up.weight.zero_()
        assert (twin.up(x) == 0).all() and torch.equal(model.up(x), y), "a copied model uses its own weights"
        model(x)
    assert execute.COMPILE_CACHE.compiles == compiles, "a kernel was compiled while serving"
    with torch.enable_grad():
        loss = model(x.detach().requires_grad_()).float().sum()
        loss.backward()
    assert model.up.weight.grad is not None and torch.isfinite(model.up.weight.grad).all()
    assert disable_low_latency_gemm(model) == 2
    assert type(model.up) is torch.nn.Linear


def operands_reference(x, weight):
    from lowlat_gemm.reference import reference_gemm

    return reference_gemm(x, weight.detach())
