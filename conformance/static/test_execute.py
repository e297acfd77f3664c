"""try_low_latency_gemm on a pretended GPU: what runs, every reason of one call, failures, capture, and never a raise."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, cuda, device_of, execute, public_world  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import settings
from lowlat_gemm.arch import ARCHES, SM90, SM100, DeviceProperties
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.settings import parse_deny

try_gemm, run_or_refuse = execute.try_low_latency_gemm, execute.run_or_refuse
pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")


def reason_of(*tensors) -> Reason:
    refusal = run_or_refuse(*tensors)
    assert isinstance(refusal, Refusal), f"ran a kernel: {refusal}"
    assert try_gemm(*tensors) is None
    return refusal.reason


@pytest.mark.parametrize("m", [1, 2, 4])
def test_a_planned_call_runs_on_its_kernel(gpu, m):
    x, weight = bf16(m, K), bf16(N, K, seed=1)
    y = try_gemm(x, weight)
    report = parity(y, reference_gemm(x, weight))
    assert report.ok and y.dtype == torch.bfloat16 and y.shape == (m, N) and y.is_contiguous(), report
    assert [(unit.target, unit.spec.tokens, unit.spec.residual) for unit, _ in gpu.calls] == [("sm_90a", m, False)]
    assert try_gemm(x, weight) is not None and gpu.cache.compiles == 1 and len(gpu.calls) == 2


@pytest.mark.parametrize("stride", [K, K + 8, K + 3, 8, 1, 0])
def test_a_kernel_sees_the_stride_of_a_packed_row_for_any_of_a_single_one(gpu, stride):
    """A tensor map has rules for strides, and that of a caller's single row means nothing."""
    x, strides = bf16(1, 2 * K).as_strided((1, K), (stride, 1)), []
    execute.launch(lambda x, *rest: strides.append(x.stride()), x, bf16(N, K))
    assert strides == [(K, 1)]
    execute.READY.add(settings.current(), None, torch.device("cuda", 0), N, K, 1, lambda x, *rest: strides.append(x.stride()))
    execute.run_ready(x, bf16(N, K))
    assert strides[1:] == ([(K, 1)] if stride == K else []), "the short way passed it on"


def test_a_kernel_that_was_denied_while_it_compiled_is_not_kept_ready(gpu, monkeypatch):
    """A compile takes seconds; what it makes is known under the settings that it was asked for."""
    x, weight = bf16(1, K), bf16(N, K, seed=1)
    compiled_for = execute.compiled_for

    def slow(entry, ordinal):
        settings.change(deny=settings.parse_deny("skinny"))
        return compiled_for(entry, ordinal)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "compiled_for", slow)
        assert try_gemm(x, weight) is not None
    assert execute.run_ready(x, weight) is None and try_gemm(x, weight) is None


def test_the_residual_has_its_own_kernel(gpu):
    x, weight, residual = bf16(1, K), bf16(N, K, seed=1), bf16(1, N, seed=2)
    assert parity(try_gemm(x, weight, residual), reference_gemm(x, weight, residual)).ok
    assert gpu.calls[0][0].spec.residual


REASONS = {
    "M = 0": (Reason.TOKENS, lambda: (bf16(0, K), bf16(N, K))),
    "M = 5": (Reason.TOKENS, lambda: (bf16(5, K), bf16(N, K))),
    "residual at M = 2": (Reason.TOKENS, lambda: (bf16(2, K), bf16(N, K), bf16(2, N))),
    "not built": (Reason.BACKEND_NOT_BUILT, lambda: (bf16(3, K), bf16(N, K))),
    "shape": (Reason.SHAPE, lambda: (bf16(1, K), bf16(N + 8, K))),
    "fp16": (Reason.DTYPE, lambda: (bf16(1, K).half(), bf16(N, K).half())),
    "fp32": (Reason.DTYPE, lambda: (bf16(1, K).float(), bf16(N, K).float())),
    "int8": (Reason.DTYPE, lambda: (torch.zeros(1, K, dtype=torch.int8), torch.zeros(N, K, dtype=torch.int8))),
    "complex": (Reason.DTYPE, lambda: (torch.zeros(1, K, dtype=torch.complex64), torch.zeros(N, K, dtype=torch.complex64))),
    "mixed dtypes": (Reason.DTYPE, lambda: (bf16(1, K), bf16(N, K).half())),
    "K": (Reason.K_MISMATCH, lambda: (bf16(1, K - 8), bf16(N, K))),
    "1-D": (Reason.RANK, lambda: (bf16(K), bf16(N, K))),
    "3-D": (Reason.RANK, lambda: (bf16(1, 1, K), bf16(N, K))),
    "columns": (Reason.INNER_STRIDE, lambda: (bf16(K, 2).t(), bf16(N, K))),
    "pitch": (Reason.ROW_STRIDE, lambda: (bf16(2, K + 1)[:, :K], bf16(N, K))),
    "start": (Reason.ALIGNMENT, lambda: (bf16(1, 2 * K)[:, 1 : K + 1], bf16(N, K))),
    "weight 1-D": (Reason.WEIGHT_LAYOUT, lambda: (bf16(1, K), bf16(K))),
    "weight transposed": (Reason.WEIGHT_LAYOUT, lambda: (bf16(1, K), bf16(K, N).t())),
    "weight pitched": (Reason.WEIGHT_LAYOUT, lambda: (bf16(1, K), bf16(N, K + 8)[:, :K])),
    "residual shape": (Reason.RESIDUAL_LAYOUT, lambda: (bf16(1, K), bf16(N, K), bf16(1, N - 8))),
    "x is None": (Reason.TENSOR_TYPE, lambda: (None, bf16(N, K))),
    "weight is a number": (Reason.TENSOR_TYPE, lambda: (bf16(1, K), 3)),
    "residual is a list": (Reason.TENSOR_TYPE, lambda: (bf16(1, K), bf16(N, K), [1.0])),
    "numpy": (Reason.TENSOR_TYPE, lambda: (np.zeros((1, K), np.float32), np.zeros((N, K), np.float32))),
    "buffer": (Reason.TENSOR_TYPE, lambda: (torch.nn.Buffer(bf16(1, K)).as_subclass(Subclass), bf16(N, K))),
    "subclass weight": (Reason.TENSOR_TYPE, lambda: (bf16(1, K), bf16(N, K).as_subclass(Subclass))),
    "fake tensor": (Reason.TENSOR_TYPE, lambda: (fake_tensor(1, K), fake_tensor(N, K))),
    "meta": (Reason.CAPABILITY, lambda: (torch.empty(1, K, device="meta"), bf16(N, K))),
    "everything swapped": (Reason.K_MISMATCH, lambda: (bf16(N, K), bf16(1, N))),
}


class Subclass(torch.Tensor):
    pass


def fake_tensor(*shape):
    with FakeTensorMode():
        return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_of_one_call(gpu, name):
    expected, make = REASONS[name]
    assert reason_of(*make()) is expected
    assert gpu.calls == [] and gpu.cache.compiles == 0


def test_under_a_compiler_it_falls_back(gpu, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert reason_of(bf16(1, K), bf16(N, K)) is Reason.TRACING


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_tensors_of_another_device(gpu, which, device):
    gpu.devices.append(device_of(SM90))
    tensors = [bf16(1, K), bf16(N, K), bf16(1, N)]
    gpu.place(tensors[which], device)
    expected = Reason.CAPABILITY if (which, device) == (0, "cpu") else Reason.DEVICE_MISMATCH
    assert reason_of(*tensors) is expected


def test_the_launch_is_on_the_tensors_device(gpu):
    gpu.devices.append(device_of(SM90))
    x, weight = gpu.place(bf16(1, K), "cuda:1"), gpu.place(bf16(N, K), "cuda:1")
    assert try_gemm(x, weight) is not None and set(gpu.entered) == {1}
    assert try_gemm(bf16(1, K), bf16(N, K)) is not None and set(gpu.entered) == {1}
    assert gpu.cache.compiles == 1  # one generation, one compile


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 1), (12, 0)])
def test_an_unlisted_device(capability):
    with cuda(DeviceProperties("New", capability, 132, 4917.0)) as fake, torch.inference_mode():
        assert reason_of(bf16(1, 7168), bf16(1536, 7168)) is Reason.CAPABILITY and fake.calls == []


def test_a_sibling_device_unless_it_is_allowed(gpu):
    gpu.devices[0] = device_of(SM90, bandwidth_gbs=3352.0)
    execute._device_plan.cache_clear()
    assert reason_of(bf16(1, K), bf16(N, K)) is Reason.DEVICE_CLASS
    settings.change(any_device=True)
    assert try_gemm(bf16(1, K), bf16(N, K)) is not None


def test_settings_are_followed_at_once(gpu):
    x, weight = bf16(1, K), bf16(N, K)
    assert try_gemm(x, weight) is not None
    for fields in ({"disabled": True}, {"deny": parse_deny("64x1024@1")}, {"deny": parse_deny("skinny")}):
        before = settings.change(**fields)
        assert reason_of(x, weight) is Reason.DISABLED, fields
        settings.restore(before)
    before = settings.change(batch_invariant=True)
    assert reason_of(x, weight) is Reason.BATCH_INVARIANT
    settings.restore(before)
    assert try_gemm(x, weight) is not None


def test_a_kernel_that_does_not_compile_is_tried_once(gpu, caplog):
    gpu.compile_error = KeyError("sm_90a")
    with caplog.at_level(logging.WARNING, "lowlat_gemm"):
        for _ in range(3):
            assert reason_of(bf16(1, K), bf16(N, K)) is Reason.BACKEND_UNAVAILABLE
    assert gpu.cache.compiles == 1 and [record.levelname for record in caplog.records] == ["WARNING"], caplog.text
    gpu.compile_error = None
    assert try_gemm(bf16(2, K), bf16(N, K)) is not None  # another unit


def test_missing_packages_fall_back_without_a_compile(gpu, monkeypatch):
    monkeypatch.setattr("lowlat_gemm.dispatch.missing_packages", lambda: ("nvidia-cutlass-dsl",))
    assert reason_of(bf16(1, K), bf16(N, K)) is Reason.BACKEND_UNAVAILABLE and gpu.cache.compiles == 0


def test_nothing_compiles_during_capture(gpu):
    x, weight = bf16(1, K), bf16(N, K)
    gpu.capturing = True
    assert reason_of(x, weight) is Reason.CAPTURE and gpu.cache.compiles == 0
    gpu.capturing = False
    assert try_gemm(x, weight) is not None
    gpu.capturing = True
    assert try_gemm(x, weight) is not None and gpu.cache.compiles == 1
    assert reason_of(bf16(2, K), weight) is Reason.CAPTURE  # warm at one M says nothing of another


def test_launches_before_their_kernel_was_made_are_counted(gpu):
    weight = bf16(N, K)
    for capturing, m, late in [(True, 1, 1), (True, 1, 2), (False, 1, 3), (False, 1, 3), (True, 1, 3), (False, 2, 4)]:
        gpu.capturing = capturing
        try_gemm(bf16(m, K), weight)
        assert gpu.cache.late == late, f"M = {m}, capturing {capturing}"
    try_gemm(bf16(5, K), weight)  # not in the plan
    execute.compile_ahead([execute.device_plan(0, N, K).entry(4, False).unit])
    assert try_gemm(bf16(4, K), weight) is not None and gpu.cache.late == 4, "a warm launch was counted"


@pytest.mark.parametrize("capturing", [False, True])
def test_strict_mode_says_so_loudly(gpu, capturing):
    """No launch compiles, in a capture or outside."""
    settings.change(strict=True)
    gpu.capturing = capturing
    with pytest.raises(execute.NotCompiledError, match="M = 1 was not compiled before its launch"):
        try_gemm(bf16(1, K), bf16(N, K))
    assert gpu.cache.compiles == 0
    assert try_gemm(bf16(5, K), bf16(N, K)) is None  # nothing would compile here
    assert execute.compile_ahead([execute.device_plan(0, N, K).entry(1, False).unit]) == {}
    assert try_gemm(bf16(1, K), bf16(N, K)) is not None


@pytest.mark.parametrize("broken", ["packages", "compile"])
def test_strict_mode_is_silent_where_no_warm_up_could_help(gpu, monkeypatch, broken):
    settings.change(strict=True)
    if broken == "packages":
        monkeypatch.setattr("lowlat_gemm.dispatch.missing_packages", lambda: ("nvidia-cutlass-dsl",))
    gpu.compile_error = KeyError("sm_90a")
    execute.compile_ahead([execute.device_plan(0, N, K).entry(1, False).unit])
    assert reason_of(bf16(1, K), bf16(N, K)) is Reason.BACKEND_UNAVAILABLE
    gpu.capturing = True
    assert try_gemm(bf16(1, K), bf16(N, K)) is None


def test_a_broken_table_does_not_raise(gpu, monkeypatch):
    from lowlat_gemm.tables import TableError

    def load(family, arch):
        raise TableError("toy_sm90.toml: not valid TOML")

    monkeypatch.setattr("lowlat_gemm.dispatch.load_table", load)
    assert try_gemm(bf16(1, K), bf16(N, K)) is None


def test_the_debug_log_has_each_reason_once(gpu, caplog):
    with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
        for _ in range(3):
            try_gemm(bf16(5, K), bf16(N, K))
            try_gemm(None, bf16(N, K))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "(5, 1024)" in lines[0] and str(Reason.TOKENS) in lines[0], lines


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_each_generation_compiles_for_its_own_target(arch):
    from lowlat_gemm.dispatch import plan_for
    from lowlat_gemm.tables import load_table

    n, k = next(shape for shape in load_table("kimi_k3", arch).projections if plan_for(arch, *shape).units())
    m = next(m for m, entry in plan_for(arch, n, k).entries.items() if entry.unit)
    with torch.inference_mode(), cuda(device_of(arch)) as fake:
        assert try_gemm(bf16(m, k), bf16(n, k)) is not None
        assert fake.calls[0][0].target == arch.compile_target


def test_two_generations_in_one_machine(monkeypatch):
    with torch.inference_mode(), cuda([device_of(SM90), device_of(SM100)]) as fake:
        tensors = bf16(1, 7168), bf16(3072, 7168)
        assert try_gemm(*tensors) is not None
        assert try_gemm(*(fake.place(tensor, "cuda:1") for tensor in tensors)) is not None
        assert [unit.target for unit, _ in fake.calls] == ["sm_90a", "sm_100a"]


@pytest.mark.parametrize("residual", [None, bf16(1, 1536)], ids=["plain", "residual"])
def test_on_a_machine_without_a_gpu_everything_falls_back(residual):
    refusal = run_or_refuse(bf16(1, 7168), bf16(1536, 7168), residual)
    assert refusal.reason is Reason.CAPABILITY and "cpu" in refusal.detail
    assert try_gemm(bf16(1, 7168), bf16(1536, 7168), residual) is None
