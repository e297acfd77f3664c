"""``lowlat_gemm::linear``: torch's own checks of an operator, one graph for every M, fall back inside, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, cuda, device_of, same_bits, toy_table, use_table  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import settings, torch_op
from lowlat_gemm.arch import SM90
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.ready import READY
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.torch_op import linear, linear_or_refuse

pytestmark = pytest.mark.usefixtures("clean_settings")

#: M -> whether the toy table serves it.
TOKENS = {1: True, 2: True, 3: False, 4: True, 8: False, 16: False}


def test_its_name_is_the_packages():
    assert linear.name() == "lowlat_gemm::linear" and torch.ops.lowlat_gemm.linear.default is linear


@pytest.mark.parametrize("shape", [(1, K), (3, K), (2, 2, K), (K,), (0, K)], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_own_checks_of_an_operator(shape, gradients):
    x, weight = bf16(*shape), bf16(N, K, seed=1)
    x.requires_grad_(gradients)
    weight.requires_grad_(gradients)
    assert set(torch.library.opcheck(linear, (x, weight)).values()) == {"SUCCESS"}


def test_the_fake_refuses_what_the_real_one_would():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x, weight = mode.from_tensor(bf16(2, K)), mode.from_tensor(bf16(N, K))
        y = linear(x, weight)
        assert (y.shape, y.dtype, y.stride()) == ((2, N), torch.bfloat16, (N, 1))
        with pytest.raises(RuntimeError):
            linear(x[:, :-8], weight)
    with pytest.raises(RuntimeError):
        linear(bf16(2, K - 8), bf16(N, K))


@pytest.mark.parametrize("m", TOKENS)
def test_kernel_or_torchs_linear(gpu, m):
    x, weight = bf16(m, K, seed=m), bf16(N, K, seed=1)
    y = linear(x, weight)
    assert [rows for _, rows in gpu.calls] == [m] * TOKENS[m]
    assert parity(y, reference_gemm(x, weight)).ok if TOKENS[m] else same_bits(y, F.linear(x, weight))


def test_a_call_that_was_served_goes_the_short_way(gpu, monkeypatch):
    x, weight = bf16(2, 1, K), bf16(N, K)
    first = linear_or_refuse(x, weight)
    monkeypatch.setattr(torch_op, "run_or_refuse", lambda *args, **names: pytest.fail("the long way"))
    assert same_bits(linear_or_refuse(x, weight), first) and same_bits(linear(x, weight), first) and len(gpu.calls) == 3


def test_the_families_asked_for(gpu):
    x, weight = bf16(1, K), bf16(N, K)
    linear(x, weight, "toy")
    assert len(gpu.calls) == 1
    assert [key[0] for key in READY.state[1]] == [("toy",)], "a kernel that is ready is so for the families asked for"
    linear(x, weight, "other,third")
    assert len(gpu.calls) == 1


@pytest.mark.parametrize("names", [None, ("toy",), ("toy", "other")])
def test_families_there_and_back(names):
    assert torch_op.names_of(torch_op.tables_argument(names)) == names


def traced(function, *example):
    """``function`` compiled for any number of rows of its first argument, and the graphs made so far.

    Traced outside of the fake GPU, whose patches are not for compilers.
    """
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=keep, fullgraph=True)
    torch._dynamo.decorators.mark_unbacked(example[0], 0)
    with torch.no_grad():
        compiled(*example)
    return compiled, found


def test_one_graph_serves_every_m(monkeypatch):
    weight = bf16(N, K, seed=1)
    compiled, found = traced(lambda x, weight: linear(x, weight), bf16(2, K), weight)
    assert "lowlat_gemm.linear.default" in [str(node.target) for node in found[0].graph.nodes]
    use_table(monkeypatch, toy_table())
    with torch.no_grad(), cuda(device_of(SM90)) as gpu:
        for m, served in TOKENS.items():
            x = bf16(m, K, seed=m)
            y, launches = compiled(x, weight), len(gpu.calls)
            assert parity(y, reference_gemm(x, weight)).ok if served else same_bits(y, F.linear(x, weight)), f"M = {m}"
            assert launches == sum(served for other, served in TOKENS.items() if other <= m), f"M = {m}"
    assert len(found) == 1


def test_a_lookup_in_plain_python_makes_m_a_constant():
    """Why there is an operator at all."""
    plan = {1: 10.0, 2: 20.0, 4: 40.0}
    with pytest.raises(Exception, match="(?i)data.dependent|specialize"):
        traced(lambda x, weight: F.linear(x, weight) * plan.get(x.shape[0], 0.0), bf16(2, K), bf16(N, K))


def test_gradients_are_torchs(gpu):
    x, weight = bf16(4, K), bf16(N, K, seed=1)
    results = []
    with torch.enable_grad():
        for function in (linear, F.linear):
            operands = [tensor.clone().requires_grad_() for tensor in (x, weight)]
            function(*operands).float().square().sum().backward()
            results.append([operand.grad for operand in operands])
    for ours, theirs in zip(*results):
        assert torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=1.0)


class Labelled(torch.nn.Parameter):
    """A Parameter that a framework has put attributes on, as vLLM's are."""


def test_a_parameter_with_python_attributes_is_its_storage(gpu):
    weight = Labelled(bf16(N, K), requires_grad=False)
    assert type(linear_or_refuse(bf16(1, K), weight)) is Refusal  # plain calls take plain tensors
    linear(bf16(1, K), weight)
    assert len(gpu.calls) == 1 and torch_op.storage_of(weight).data_ptr() == weight.data_ptr()


class Quantized(torch.Tensor):
    __torch_dispatch__ = classmethod(lambda cls, *args, **kwargs: NotImplemented)


def test_a_subclass_that_means_something_else_stays_what_it_is():
    tensor = torch.Tensor._make_subclass(Quantized, bf16(N, K))
    assert torch_op.storage_of(tensor) is tensor


LAYOUTS = {
    "odd pitch": lambda: bf16(2, K + 1)[:, :K],
    "transposed": lambda: bf16(K, 2).t(),
    "misaligned": lambda: bf16(1, 2 * K)[:, 1 : K + 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_mode_copies_an_odd_x_rather_than_mix_kernels(gpu, monkeypatch, layout, batch_invariant):
    real = torch_op.run_or_refuse
    seen = []

    def spy(x, weight, residual=None, names=None):
        seen.append(x)
        settings.change(batch_invariant=False)  # the toy plan is not invariant: what is shown is the copy
        try:
            return real(x, weight, residual, names)
        finally:
            settings.change(batch_invariant=batch_invariant)

    monkeypatch.setattr(torch_op, "run_or_refuse", spy)
    settings.change(batch_invariant=batch_invariant)
    x = LAYOUTS[layout]()
    y = linear_or_refuse(x, bf16(N, K))
    assert len(seen) == 1 + batch_invariant and (type(y) is Refusal) != batch_invariant
    if batch_invariant:
        assert parity(y, reference_gemm(x, bf16(N, K))).ok and same_bits(seen[1], x)


def test_wrong_extents_are_a_refusal(gpu):
    assert linear_or_refuse(bf16(2, 2, K - 8), bf16(N, K)).reason is Reason.K_MISMATCH
    assert linear_or_refuse(bf16(2, K - 8), bf16(N, K)).reason is Reason.K_MISMATCH
