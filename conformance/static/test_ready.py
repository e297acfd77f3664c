"""The short way of a call never serves what the long way would not, and is the way that served calls take."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, device_of, execute, toy_linear  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import enable_low_latency_gemm, settings
from lowlat_gemm.arch import SM90
from lowlat_gemm.operands import Refusal
from lowlat_gemm.ready import READY, run_ready
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.fixture
def served(gpu):
    """(x, weight) that were served once, at M = 1, 2 and 4."""
    weight = bf16(N, K, seed=1)
    for m in (4, 2, 1):
        assert run_ready(bf16(m, K), weight) is None, "nothing is ready before it was served"
        assert execute.try_low_latency_gemm(bf16(m, K), weight) is not None
    return bf16(2, K), weight


def test_a_served_call_takes_the_short_way(served, gpu, monkeypatch):
    x, weight = served
    monkeypatch.setattr(execute, "run_or_refuse", None)  # the long way is not there
    before = len(gpu.calls)
    y = execute.try_low_latency_gemm(x, weight)
    assert parity(y, reference_gemm(x, weight)).ok and y.is_contiguous() and len(gpu.calls) == before + 1
    other = bf16(N, K, seed=2)  # another weight of that shape is as good
    assert parity(execute.try_low_latency_gemm(x, other), reference_gemm(x, other)).ok


def test_a_module_takes_the_short_way_from_its_second_call(gpu, monkeypatch):
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16)
    module(bf16(2, K))
    monkeypatch.setattr(type(module), "run_or_refuse", None)
    for shape in [(2, K), (1, 2, K), (2, 1, K), (1, 1, 2, K)]:
        x = bf16(*shape)
        y = module(x)
        assert y.shape == (*shape[:-1], N) and parity(y.view(-1, N), reference_gemm(x.view(-1, K), module.weight)).ok


def test_families_do_not_share_kernels(gpu):
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16, ["toy"])
    module(bf16(2, K))
    assert run_ready(bf16(2, K), module.weight) is None
    assert run_ready(bf16(2, K), module.weight, ("toy",)) is not None


class Subclass(torch.Tensor):
    pass


def swapped(data):
    """A parameter that was a good weight and whose data is now ``data``."""
    parameter = nn.Parameter(bf16(N, K, seed=1))
    parameter.data = data(parameter.data)
    return parameter


#: What differs from the served call: (x, weight).
OPERANDS = {
    "M = 3": lambda: (bf16(3, K), bf16(N, K)),
    "M = 0": lambda: (bf16(0, K), bf16(N, K)),
    "x 1-D": lambda: (bf16(K), bf16(N, K)),
    "x 3-D": lambda: (bf16(2, 1, K), bf16(N, K)),
    "x 0-D": lambda: (bf16(1)[0], bf16(N, K)),
    "x fp16": lambda: (bf16(2, K).half(), bf16(N, K)),
    "both fp16": lambda: (bf16(2, K).half(), bf16(N, K).half()),
    "x transposed": lambda: (bf16(K, 2).t(), bf16(N, K)),
    "x pitched": lambda: (bf16(2, K + 8)[:, :K], bf16(N, K)),
    "x misaligned": lambda: (bf16(2 * K + 4)[4:].view(2, K), bf16(N, K)),
    "K": lambda: (bf16(2, K - 8), bf16(N, K)),
    "K of both": lambda: (bf16(2, K - 8), bf16(N, K - 8)),
    "x a number": lambda: (3, bf16(N, K)),
    "x None": lambda: (None, bf16(N, K)),
    "x a subclass": lambda: (bf16(2, K).as_subclass(Subclass), bf16(N, K)),
    "x nested": lambda: (torch.nested.nested_tensor([bf16(2, K)]), bf16(N, K)),
    "x sparse": lambda: (bf16(2, K).to_sparse(), bf16(N, K)),
    "x sparse csr": lambda: (bf16(2, K).to_sparse_csr(), bf16(N, K)),
    "x meta": lambda: (torch.empty(2, K, dtype=torch.bfloat16, device="meta"), bf16(N, K)),
    "weight None": lambda: (bf16(2, K), None),
    "weight 1-D": lambda: (bf16(2, K), bf16(K)),
    "weight 3-D": lambda: (bf16(2, K), bf16(1, N, K)),
    "weight N": lambda: (bf16(2, K), bf16(N + 8, K)),
    "weight a subclass": lambda: (bf16(2, K), bf16(N, K).as_subclass(Subclass)),
    "weight sparse": lambda: (bf16(2, K), bf16(N, K).to_sparse()),
    "data transposed": lambda: (bf16(2, K), swapped(lambda w: w.view(K, N).t())),
    "data narrowed": lambda: (bf16(2, K), swapped(lambda w: w[: N - 8])),
    "data pitched": lambda: (bf16(2, K), swapped(lambda w: bf16(N, K + 8)[:, :K])),
    "data misaligned": lambda: (bf16(2, K), swapped(lambda w: bf16(N * K + 4)[4:].view(N, K))),
    "data fp16": lambda: (bf16(2, K), swapped(lambda w: w.view(torch.float16))),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_are_not_those_that_were_served(served, gpu, name):
    x, weight = OPERANDS[name]()
    launches = len(gpu.calls)
    assert run_ready(x, weight) is None and len(gpu.calls) == launches
    pitched = name == "x pitched"  # servable, by the long way
    refused = execute.run_or_refuse(x, weight)
    assert isinstance(refused, Refusal) != pitched


@pytest.mark.parametrize("which", [0, 1])
def test_operands_of_another_device(served, gpu, which):
    gpu.devices.append(device_of(SM90))
    moved = served[which].clone()
    gpu.place(moved, "cuda:1")
    operands = [moved if i == which else operand for i, operand in enumerate(served)]
    assert run_ready(*operands) is None
    both = [gpu.place(operand.clone(), "cuda:1") for operand in served]
    assert run_ready(*both) is None, "what is ready on one device is not on another"
    assert execute.try_low_latency_gemm(*both) is not None
    gpu.entered.clear()
    assert run_ready(*both) is not None and gpu.entered == [1], "the launch is on the tensors' device"
    gpu.entered.clear()
    assert run_ready(*served) is not None and gpu.entered == []


@contextlib.contextmanager
def autocast(dtype):
    torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False), torch.set_autocast_dtype("cuda", torch.float16)


@contextlib.contextmanager
def changed(**fields):
    before = settings.change(**fields)
    yield
    settings.restore(before)


@contextlib.contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


CONTEXTS = {
    "dispatch mode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "forward AD": lambda: torch.autograd.forward_ad.dual_level(),
    "autocast fp16": lambda: autocast(torch.float16),
    "export": lambda: patched(torch.compiler, "_is_compiling_flag", True),
    "disabled": lambda: changed(disabled=True),
    "denied": lambda: changed(deny=settings.parse_deny("64x1024@2")),
    "batch-invariant": lambda: changed(batch_invariant=True),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_in_which_nothing_is_launched(served, gpu, name):
    launches = len(gpu.calls)
    with torch.inference_mode(False), CONTEXTS[name]():
        assert run_ready(*served) is None and len(gpu.calls) == launches, name
    assert run_ready(*served) is not None, "afterwards all is as before"


@pytest.mark.parametrize("name", ["vmap", "jit.trace"])
def test_transforms_in_which_nothing_is_launched(served, gpu, name):
    x, weight = served
    seen, launches = [], len(gpu.calls)

    def f(row):
        seen.append(run_ready(row, weight))
        return row

    if name == "vmap":
        torch.vmap(f)(x.clone()[None])
    else:
        torch.jit.trace(f, (x,), check_trace=False)
    assert seen == [None] and len(gpu.calls) == launches


def test_bf16_autocast_is_served(served):
    with autocast(torch.bfloat16):
        assert run_ready(*served) is not None


def test_gradients_are_not_lost(served):
    x, weight = served
    with torch.inference_mode(False), torch.enable_grad():
        assert run_ready(x, weight) is not None
        assert run_ready(x.clone().requires_grad_(), weight) is None
        assert run_ready(x, nn.Parameter(weight.clone())) is None
        assert run_ready(x, nn.Parameter(weight.clone(), requires_grad=False)) is not None


def test_the_errors_of_a_launch_are_not_swallowed(served):
    def kernel(*operands):
        raise RuntimeError("launch failed")

    x, weight = served
    READY.add(settings.current(), None, x.device, N, K, 2, kernel)
    with pytest.raises(RuntimeError, match="launch failed"):
        execute.try_low_latency_gemm(x, weight)


def test_former_settings_leave_nothing_behind(served):
    before = settings.change(any_device=True)
    assert run_ready(*served) is None
    assert execute.try_low_latency_gemm(*served) is not None and run_ready(*served) is not None
    assert len(READY.state[1]) == 1, "the kernels of the former settings are gone"
    settings.restore(before)
    assert run_ready(*served) is None


def test_a_full_table_starts_anew(served, monkeypatch):
    monkeypatch.setattr("lowlat_gemm.ready.LIMIT", 3)
    x, weight = served
    assert len(READY.state[1]) == 3 and run_ready(x, weight) is not None
    READY.add(settings.current(), None, x.device, N, K, 77, None)
    assert len(READY.state[1]) == 1 and run_ready(x, weight) is None
    assert execute.try_low_latency_gemm(x, weight) is not None and run_ready(x, weight) is not None


@pytest.mark.parametrize("how", ["bias", "attribute", "parametrized"])
def test_a_module_that_is_no_longer_what_was_taken(gpu, how):
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16)
    x = bf16(2, K)
    module(x)
    launches = len(gpu.calls)
    other = bf16(N, K, seed=9)
    if how == "bias":
        module.bias = nn.Parameter(bf16(N))
        expected = nn.functional.linear(x, module.weight, module.bias)
        assert torch.equal(module(x), expected) and len(gpu.calls) == launches
    elif how == "attribute":
        module.__dict__["weight"] = other
        assert parity(module(x), reference_gemm(x, other)).ok
    else:
        nn.utils.parametrize.register_parametrization(module, "weight", Negative())
        assert parity(module(x), reference_gemm(x, -toy_linear().weight)).ok


class Negative(nn.Module):
    def forward(self, weight):
        return -weight
