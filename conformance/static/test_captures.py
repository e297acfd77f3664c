"""Weights that move: what notices it, before the next launch, in a capture, and of graphs that were captured before."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from conformance.fakes import TOY_K, TOY_N, bf16, clean_settings, toy_linear  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import PreparedProjection, Projection, enable_low_latency_gemm, forget_captures, stale_weights
from lowlat_gemm import disable_low_latency_gemm, weight_map
from lowlat_gemm.adapters.methods import PlannedMethod
from lowlat_gemm.captures import _AT, _OF_MODULES, WeightPlace, note_operator, watch
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.torch_op import linear

N, K, M = TOY_N, TOY_K, 2
pytestmark = pytest.mark.usefixtures("clean_settings")


class _Method:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight)


class _Planned(PlannedMethod, _Method):
    pass


class _Layer(torch.nn.Module):
    """A framework's layer, whose method is a planned one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(bf16(N, K), requires_grad=False)
        self.method = _Planned()

    def forward(self, x):
        return self.method.apply(self, x)


class _Compiled(_Layer):
    """The same layer where a compiler has put the operator in its place: the launch sees the weight alone."""

    def forward(self, x):
        return linear(x, self.weight)


class Owner:
    """One of the owners of a weight: the module with it, how to launch, and what says that a graph is stale."""

    def __init__(self, kind: str):
        self.module = {"method": _Layer, "operator": _Compiled}.get(kind, toy_linear)()
        if kind == "linear":
            enable_low_latency_gemm(self.module, torch.bfloat16)
            self.launch, self.stale = self.module, self.module.stale
            self.forget = lambda: forget_captures(self.module)
            return
        if kind in ("method", "operator"):
            watch(self.module)  # as an install does
            self.launch, self.stale = self.module, lambda: stale_weights(self.module) == ("",)
            self.forget = lambda: forget_captures(self.module)
            self.launch(bf16(M, K))  # compiled before a capture
            return
        if kind == "projection":
            made = Projection(self.module.weight)
            self.launch = made
        else:
            made = PreparedProjection(self.module.weight, {M: (64, 8, 2, 4)}).prepare()
            self.launch = lambda x: made.run(x, torch.empty(M, N, dtype=x.dtype))
        self.made, self.stale, self.forget = made, made.stale, made.forget_captures

    def replace(self, weight) -> None:
        """Other storage for the weight: the parameter is replaced where it is looked up in the module, else its data."""
        if hasattr(self, "made"):
            self.module.weight.data = weight
        else:
            self.module.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.fixture(params=["linear", "method", "operator", "projection", "prepared"])
def owner(request, gpu):
    return Owner(request.param)


def capture(gpu, launch) -> None:
    gpu.capturing = True
    try:
        launch(bf16(M, K))
    finally:
        gpu.capturing = False


def test_a_graph_over_a_replaced_weight_is_stale_and_launches_read_the_new_one(gpu, owner):
    owner.launch(bf16(M, K))
    owner.replace(bf16(N, K, seed=5))
    assert not owner.stale(), "nothing was captured"
    capture(gpu, owner.launch)
    assert not owner.stale()
    new, x = bf16(N, K, seed=6), bf16(M, K, seed=7)
    owner.replace(new)
    assert owner.stale()
    assert parity(owner.launch(x), reference_gemm(x, new)).ok, "a launch read the old storage"
    assert owner.stale(), "an eager launch makes no graph right"
    owner.forget()
    assert not owner.stale()
    capture(gpu, owner.launch)
    assert not owner.stale()


def test_a_weight_written_in_place_is_not_stale(gpu, owner):
    capture(gpu, owner.launch)
    owner.module.weight.data.copy_(bf16(N, K, seed=5))
    assert not owner.stale()
    x = bf16(M, K, seed=7)
    assert parity(owner.launch(x), reference_gemm(x, bf16(N, K, seed=5))).ok


def test_graphs_over_two_places_are_stale_wherever_the_weight_is(gpu, owner):
    first = owner.module.weight.data
    capture(gpu, owner.launch)
    owner.replace(bf16(N, K, seed=5))
    capture(gpu, owner.launch)
    assert owner.stale(), "the first graph reads the old weight"
    owner.replace(first)
    assert owner.stale(), "the second graph reads the other one"


def test_a_weight_that_moved_and_came_back_is_not_stale(gpu, owner):
    first = owner.module.weight.data
    capture(gpu, owner.launch)
    owner.replace(bf16(N, K, seed=5))
    assert owner.stale()
    owner.replace(first)
    assert not owner.stale()


def test_a_place_is_a_storage_and_not_an_address():
    """The same bytes as another storage, as when an allocator gives a freed block out again."""
    block = bytearray(2 * N * K)
    first, second = (torch.frombuffer(block, dtype=torch.bfloat16).view(N, K) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    place = WeightPlace(first)
    assert place.is_of(first) and place.is_of(first[:]) and not place.is_of(second)
    assert not place.is_of(first[1:]) and not place.is_of(first.T) and not place.is_of(first.view(torch.float16))
    kept = first.untyped_storage()
    del first
    assert place.is_of(torch.empty(0, dtype=torch.bfloat16).set_(kept, 0, (N, K), (K, 1)))
    del kept
    gc.collect()
    assert place._storage.expired() and not place.is_of(second)


def test_a_storage_that_got_other_memory_is_another_place():
    weight = bf16(N, K)
    place = WeightPlace(weight)
    weight.untyped_storage().resize_(4 * weight.numel() * 2)
    weight.set_(bf16(N, K, seed=1))
    assert not place.is_of(weight)


def test_nothing_is_kept_alive_and_what_is_known_is_bounded(gpu):
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16)
    gc.collect()  # what other tests left in cycles is not to go in the middle
    before = len(_OF_MODULES)
    for seed in range(5):
        module.weight = torch.nn.Parameter(bf16(N, K, seed=seed), requires_grad=False)
        for _ in range(3):
            capture(gpu, module)
    assert len(_OF_MODULES) == before + 1
    parameter = weakref.ref(module.weight)
    module.weight = torch.nn.Parameter(bf16(N, K), requires_grad=False)
    gc.collect()
    assert parameter() is None, "a note keeps the old weight alive"
    del module
    gc.collect()
    assert len(_OF_MODULES) == before, "a note outlives its module"


def test_names_of_stale_modules_and_copies_that_have_none(gpu):
    model = torch.nn.ModuleDict({name: toy_linear() for name in ("a", "b", "c")})
    enable_low_latency_gemm(model, torch.bfloat16)
    for name in ("a", "b"):
        capture(gpu, model[name])
    assert stale_weights(model) == ()
    for module in model.values():
        module.weight = torch.nn.Parameter(bf16(N, K, seed=5), requires_grad=False)
    assert stale_weights(model) == ("a", "b")
    assert stale_weights(copy.deepcopy(model)) == () == stale_weights(pickle.loads(pickle.dumps(model)))
    disable_low_latency_gemm(model)
    assert stale_weights(model) == ("a", "b"), "the graphs are still there"
    del model["a"].weight
    assert stale_weights(model) == ("a", "b"), "a weight that is gone"
    forget_captures(model)
    assert stale_weights(model) == ()


def test_what_falls_back_is_not_ours_to_note(gpu):
    module = toy_linear()
    enable_low_latency_gemm(module, torch.bfloat16)
    gpu.capturing = True
    module(bf16(5, K))
    gpu.capturing = False
    module.weight = torch.nn.Parameter(bf16(N, K, seed=5), requires_grad=False)
    assert not module.stale()


def test_the_operator_notes_the_module_that_has_the_weight_at_the_capture(gpu):
    layers = [_Compiled() for _ in range(3)]
    for layer in layers[:2]:
        watch(layer)
    model = torch.nn.ModuleList(layers)
    layers[0](bf16(M, K))  # compiled before a capture
    layers[0].weight = torch.nn.Parameter(bf16(N, K, seed=5), requires_grad=False)  # after the install, before the capture
    for layer in layers:
        capture(gpu, layer)
    assert stale_weights(model) == ()
    for layer in layers:
        layer.weight = torch.nn.Parameter(bf16(N, K, seed=6), requires_grad=False)
    assert stale_weights(model) == ("0", "1"), "nobody knows whose the third one's weight was"


def test_the_operator_notes_nothing_of_a_fall_back_or_of_an_eager_call(gpu):
    layer = _Compiled()
    watch(layer)
    layer(bf16(M, K))
    capture(gpu, lambda x: layer(bf16(5, K)))
    assert layer not in _OF_MODULES


def test_what_operators_know_is_bounded_and_dies_with_its_modules(gpu):
    gc.collect()
    gpu.capturing = True
    for seed in range(5):
        layer = _Compiled()
        watch(layer)
        for _ in range(3):
            layer.weight = torch.nn.Parameter(bf16(N, K, seed=seed), requires_grad=False)
            note_operator(layer.weight)
        gone = weakref.ref(layer)
        del layer
        gc.collect()
        assert gone() is None
        note_operator(bf16(N, K))
        assert not [reference for reference in _AT.values() if reference() is None]


def test_a_residual_launch_of_a_method_is_noted_too(gpu):
    layer, x, residual = _Layer(), bf16(1, K), bf16(1, N)
    layer.method.apply_with_residual(layer, x, residual)
    capture(gpu, lambda _: layer.method.apply_with_residual(layer, x, residual))
    layer.weight = torch.nn.Parameter(bf16(N, K, seed=5), requires_grad=False)
    assert stale_weights(layer) == ("",)


def test_a_call_that_was_refused_in_a_capture_is_in_no_graph(gpu):
    weight = torch.nn.Parameter(bf16(N, K), requires_grad=False)
    projection, prepared = Projection(weight), PreparedProjection(weight, {M: (64, 8, 2, 4)}).prepare()
    x, out, gpu.capturing = bf16(M, K), bf16(M, N), True
    refused = [
        lambda: projection(bf16(3, K)),
        lambda: prepared.run(bf16(3, K), out),
        lambda: prepared.run(x, out[:1]),
        lambda: prepared.run(x, out, out),
        lambda: prepared.run(x, weight.data[:M, :N]),  # refused by the launch itself
    ]
    for call in refused:
        with pytest.raises(ValueError):
            call()
    gpu.capturing = False
    weight.data = bf16(N, K, seed=5)
    assert not projection.stale() and not prepared.stale()


def test_a_map_is_not_made_in_a_capture(gpu):
    owner = torch.nn.Parameter(bf16(N, K), requires_grad=False)
    prepared = PreparedProjection(owner, {M: (64, 8, 2, 4)}).prepare()
    kept, gpu.capturing = prepared.weight_map(64), True
    assert prepared.weight_map(64) is kept, "one that is there can be had"
    owner.data = bf16(N, K, seed=5)
    with pytest.raises(RuntimeError, match="tensor map of .64, 1024. would be uploaded during graph capture"):
        prepared.weight_map(64)
    with pytest.raises(RuntimeError, match="prepare it before, and again where the weight moved"):
        weight_map(owner, 8)
    gpu.capturing = False
    assert prepared.weight_map(64) is not kept


def test_a_map_of_a_freed_and_reused_address_is_made_again(gpu):
    block = bytearray(2 * N * K)
    first, second = (torch.frombuffer(block, dtype=torch.bfloat16).view(N, K) for _ in range(2))
    owner = torch.nn.Parameter(first, requires_grad=False)
    prepared = PreparedProjection(owner, {M: (64, 8, 2, 4)}).prepare()
    kept = prepared.weight_map(64)
    assert prepared.weight_map(64) is kept
    owner.data = second
    assert owner.data_ptr() == first.data_ptr() and prepared.weight_map(64) is not kept
