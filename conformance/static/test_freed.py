"""A tensor whose storage was freed (an offloaded weight, say) is refused on every way to a kernel."""

from __future__ import annotations

import pytest
import torch

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, execute, toy_linear  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import PreparedProjection, Projection, enable_low_latency_gemm, weight_map
from lowlat_gemm.adapters.methods import PlannedMethod
from lowlat_gemm.operands import Reason, check_operands, check_weight
from lowlat_gemm.ready import run_ready
from lowlat_gemm.torch_op import linear_or_refuse

M = 2
pytestmark = pytest.mark.usefixtures("clean_settings")


def free(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def slices() -> list[torch.Tensor]:
    """A weight with its storage to itself, and one inside of a packed one: its address is then not 0."""
    return [bf16(N, K), bf16(3 * N, K)[N : 2 * N]]


@pytest.mark.parametrize("which", ["x", "weight", "residual"])
@pytest.mark.parametrize("offset", [0, 8])
def test_the_operand_contract(which, offset):
    shapes = {"x": (M, K), "weight": (N, K), "residual": (M, N)}
    operands = {name: bf16(offset + rows, columns)[offset:] for name, (rows, columns) in shapes.items()}
    assert check_operands(*operands.values()) is None
    free(operands[which])
    assert operands[which].data_ptr() % 16 == 0, "aligned, as nothing is"
    refusal = check_operands(*operands.values())
    assert refusal.reason is Reason.FREED and refusal.detail.startswith(f"{which} has ")


def test_no_elements_need_no_memory():
    assert check_weight(torch.empty(0, K)) is None and check_operands(torch.empty(0, K), torch.empty(N, K)) is None


@pytest.mark.parametrize("index", [0, 1])
def test_dispatch_and_the_short_way(gpu, index):
    x, weight = bf16(M, K), slices()[index]
    assert execute.try_low_latency_gemm(x, weight) is not None and run_ready(x, weight) is not None
    free(weight)
    gpu.calls.clear()
    assert run_ready(x, weight) is None and execute.try_low_latency_gemm(x, weight) is None
    assert linear_or_refuse(x, weight).reason is Reason.FREED and gpu.calls == []


@pytest.mark.parametrize("offset", [0, 8])
def test_x_on_the_short_way(gpu, offset):
    x, weight = bf16(offset + M, K)[offset:], bf16(N, K)
    assert execute.try_low_latency_gemm(x, weight) is not None and run_ready(x, weight) is not None
    assert run_ready(free(x), weight) is None


def test_memory_at_a_low_address_is_served_the_short_way(gpu, monkeypatch):
    x, weight = bf16(M, K), bf16(N, K)
    execute.try_low_latency_gemm(x, weight)
    monkeypatch.setattr("lowlat_gemm.ready._SURELY_MEMORY", 1 << 64)
    assert run_ready(x, weight) is not None


def test_a_planned_linear_and_a_planned_method(gpu, monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: "its own")
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16)

    class Own:
        def apply(self, layer, x, bias=None):
            return "its own"

    method = type("Planned", (PlannedMethod, Own), {})()
    for call in (module, lambda x: method.apply(module, x)):
        assert call(bf16(M, K)).shape == (M, N)
    free(module.weight.data)
    gpu.calls.clear()
    for call in (module, lambda x: method.apply(module, x)):
        assert call(bf16(M, K)) == "its own" and gpu.calls == []
    assert enable_low_latency_gemm(module, torch.bfloat16).skipped[""].reason is Reason.FREED


@pytest.mark.parametrize("index", [0, 1])
def test_projection_objects(gpu, index):
    weight = slices()[index]
    projection, prepared = Projection(weight), PreparedProjection(weight, {M: (64, 8, 2, 4)}).prepare()
    x, out = bf16(M, K), bf16(M, N)
    free(weight)
    calls = {
        "projection": lambda: projection(x),
        "run": lambda: prepared.run(x, out),
        "map": lambda: prepared.weight_map(64),
        "free map": lambda: weight_map(weight, 64),
        "made": lambda: Projection(weight),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="storage was freed"):
            call()
            pytest.fail(name)
    assert gpu.calls == []


@pytest.mark.parametrize("which", ["out", "residual"])
@pytest.mark.parametrize("offset", [0, 8])
def test_what_a_prepared_projection_writes_and_adds(gpu, which, offset):
    prepared = PreparedProjection(bf16(N, K), {M: (64, 8, 2, 4)}, residual=True).prepare()
    tensors = {name: bf16(offset + M, N)[offset:] for name in ("out", "residual")}
    prepared.run(bf16(M, K), **tensors)
    free(tensors[which])
    gpu.calls.clear()
    with pytest.raises(ValueError, match="expected a matrix in memory"):
        prepared.run(bf16(M, K), **tensors)
    assert gpu.calls == []
