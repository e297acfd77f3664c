"""try_low_latency_gemm on what a kernel must not see: odd tensors, function transforms, tracing, gradients."""

from __future__ import annotations

import pytest
import torch

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, execute  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm.operands import Reason, Refusal

try_gemm, run_or_refuse = execute.try_low_latency_gemm, execute.run_or_refuse
pytestmark = pytest.mark.usefixtures("clean_settings")


def reason_of(*tensors) -> Reason:
    refusal = run_or_refuse(*tensors)
    assert isinstance(refusal, Refusal), f"ran a kernel: {refusal}"
    assert try_gemm(*tensors) is None
    return refusal.reason


GARBAGE = {
    "sparse COO x": lambda: (bf16(1, K).to_sparse(), bf16(N, K)),
    "sparse CSR weight": lambda: (bf16(1, K), bf16(N, K).to_sparse_csr()),
    "sparse residual": lambda: (bf16(1, K), bf16(N, K), bf16(1, N).to_sparse()),
    "nested x": lambda: (torch.nested.nested_tensor([bf16(K)]), bf16(N, K)),
    "quantized weight": lambda: (bf16(1, K), torch.quantize_per_tensor(torch.zeros(N, K), 1.0, 0, torch.qint8)),
    "mkldnn x": lambda: (torch.zeros(1, K).to_mkldnn(), bf16(N, K)),
    "0-D": lambda: (torch.tensor(1.0).bfloat16(), bf16(N, K)),
    "5-D": lambda: (bf16(1, 1, 1, 1, K), bf16(N, K)),
    "5-D weight": lambda: (bf16(1, K), bf16(1, 1, 1, N, K)),
    "types": lambda: (torch.Tensor, object()),
    "empty K": lambda: (bf16(1, 0), bf16(N, 0)),
    "empty N": lambda: (bf16(1, K), bf16(0, K)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_never_raises(gpu, name):
    assert try_gemm(*GARBAGE[name]()) is None and gpu.calls == []


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_under_a_function_transform_it_falls_back(gpu, transform):
    """Such a tensor is of plain type and has no storage; a kernel knows nothing of its batch or its derivative."""
    x, weight, seen = bf16(3, 1, K), bf16(N, K), []

    def f(x):
        seen.append(try_gemm(x, weight))
        return torch.nn.functional.linear(x, weight).float().sum()

    with torch.inference_mode(False), torch.no_grad():
        x, weight = x.clone(), weight.clone()
        if transform == "vmap":
            torch.vmap(f)(x)
        elif transform == "grad":
            torch.func.grad(f)(x[0])
        else:
            torch.func.jvp(f, (x[0],), (x[0],))
    assert seen == [None] and gpu.calls == []


def test_forward_mode_derivatives_are_not_lost(gpu):
    with torch.inference_mode(False), torch.autograd.forward_ad.dual_level():
        x, weight = bf16(1, K).clone(), bf16(N, K).clone()
        assert try_gemm(torch.autograd.forward_ad.make_dual(x, x), weight) is None


def test_jit_tracing_falls_back(gpu):
    """A traced graph cannot hold the launch: it would keep an output that nothing writes."""
    weight = bf16(N, K)

    def f(x):
        y = try_gemm(x, weight)
        return torch.nn.functional.linear(x, weight) if y is None else y

    with torch.no_grad():
        traced = torch.jit.trace(f, (bf16(1, K),), check_trace=False)
        assert gpu.calls == [], "a kernel was launched while torch.jit.trace recorded"
        x = bf16(1, K, seed=9)
        assert torch.equal(traced(x), torch.nn.functional.linear(x, weight))


def test_autograd_falls_back_unless_it_is_off(gpu):
    x, weight = torch.zeros(1, K, dtype=torch.bfloat16), torch.zeros(N, K, dtype=torch.bfloat16)
    with torch.inference_mode(False), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(N, K, dtype=torch.bfloat16))
        assert reason_of(x, parameter) is Reason.AUTOGRAD
        assert reason_of(torch.zeros(1, K, dtype=torch.bfloat16, requires_grad=True), weight) is Reason.AUTOGRAD
        assert try_gemm(x, weight) is not None
        with torch.no_grad():
            assert try_gemm(x, parameter) is not None
        frozen = torch.nn.Parameter(weight.clone(), requires_grad=False)
        assert try_gemm(x, frozen) is not None


def test_a_residual_that_needs_a_gradient_falls_back(gpu):
    with torch.inference_mode(False), torch.enable_grad():
        x, weight = torch.zeros(1, K).bfloat16(), torch.zeros(N, K).bfloat16()
        residual = torch.zeros(1, N, dtype=torch.bfloat16, requires_grad=True)
        assert reason_of(x, weight, residual) is Reason.AUTOGRAD
