"""The KDA projection overlap in vLLM's own layer: our limit, our branches, and what stays vLLM's."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from conformance.fakes import bf16, cuda, device_of
from conformance.ordering import Event, Stream, ordered
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.adapters import vllm_kda_overlap
from lowlat_gemm.arch import SM90
from lowlat_gemm.captures import stale_weights
from lowlat_gemm.execute import NotCompiledError
from lowlat_gemm.kda_branches import GEOMETRY
from lowlat_gemm.kernels.compile_cache import CompileError
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.settings import Settings

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")

KDA, THEIRS = (importlib.import_module(f"vllm.models.kimi_k3.nvidia.{name}") for name in ("kda", "low_latency_gemm"))
#: vLLM's limit after its constructor (``max(KDA_QKVG_CONFIGS)``).
BEFORE = max(THEIRS.KDA_QKVG_CONFIGS)


@pytest.fixture
def gpu():
    with torch.no_grad(), cuda(device_of(SM90)) as fake, ordered(fake):
        yield fake


@pytest.fixture(autouse=True)
def nothing_left():
    before = {name: getattr(THEIRS, name) for name in vllm_kda_overlap.FUNCTIONS}
    yield
    for layer in list(vllm_kda_overlap._TAKEN):
        adapter.uninstall(layer)
    adapter.uninstall(nn.Module())  # where the last layer went without being uninstalled
    assert {name: getattr(THEIRS, name) for name in before} == before, "vLLM's functions were not put back"


@pytest.fixture
def limit(monkeypatch):
    """Sets what the table says, for the adapter and the branches alike."""

    def says(found):
        for module in (vllm_kda_overlap, importlib.import_module("lowlat_gemm.kda_overlap")):
            monkeypatch.setattr(module, "kda_overlap_limit", lambda ordinal: found)

    return says


class Stop(Exception):
    """Ends the layer's forward after its projections."""


def make_layer(stream=True) -> nn.Module:
    """vLLM's layer with what its projections need at TP 8, and the limit that its constructor sets."""
    layer = nn.Module.__new__(KDA.KimiK3DeltaAttention)
    nn.Module.__init__(layer)
    layer.hidden_size, layer.head_dim, layer.local_num_heads = GEOMETRY.hidden, GEOMETRY.f_a, GEOMETRY.beta
    layer.local_projection_size, layer.in_proj_padding = GEOMETRY.f_b, 4
    layer.in_proj_qkvgfab = ReplicatedLinear(GEOMETRY.hidden, GEOMETRY.packed, bias=False, params_dtype=torch.bfloat16)
    layer.f_b_proj = ReplicatedLinear(GEOMETRY.f_a, GEOMETRY.f_b, bias=False, params_dtype=torch.bfloat16)
    for linear in (layer.in_proj_qkvgfab, layer.f_b_proj):
        linear.weight.data.copy_(WEIGHTS[linear.weight.shape[0]])
    layer._projection_aux_stream = Stream() if stream else None
    layer._projection_events = (Event(), Event()) if stream else None
    layer._projection_overlap_max_tokens = BEFORE
    return layer


WEIGHTS = {n: bf16(n, k) for n, k in ((GEOMETRY.packed, GEOMETRY.hidden), (GEOMETRY.f_b, GEOMETRY.f_a))}


def projections(layer, x) -> dict:
    """What vLLM's own forward has of its projections, when it goes on to the attention."""
    seen = {}

    def stop(**inputs):
        seen.update(inputs)
        raise Stop

    layer._forward = stop
    with pytest.raises(Stop):
        layer.forward(x, None)
    return seen


@pytest.fixture
def theirs_ran(monkeypatch):
    """M of each call of vLLM's own overlap, whose place a stand-in of the same signature takes."""
    calls = []

    def run_kda_projection_overlap(hidden_states, packed_weight, f_b_weight, aux_stream, events):
        calls.append(hidden_states.shape[0])
        qkvg, rest = (hidden_states @ packed_weight.data.T).split([GEOMETRY.qkvg, GEOMETRY.fa_beta], dim=-1)
        return qkvg, rest[:, : GEOMETRY.f_a] @ f_b_weight.data.T, rest[:, GEOMETRY.f_a : GEOMETRY.f_a + GEOMETRY.beta]

    monkeypatch.setattr(THEIRS, "run_kda_projection_overlap", run_kda_projection_overlap)
    yield calls


@pytest.fixture
def vllm_tunes(monkeypatch):
    """vLLM's autotune on a machine without FlashInfer's backend: what raises the limit of layers."""
    monkeypatch.setattr(THEIRS, "_kda_qkvg_flashinfer_backend", lambda: None)


# ---- what the adapter names


@pytest.mark.parametrize("name", vllm_kda_overlap.FUNCTIONS)
def test_vllms_functions_take_what_the_adapter_passes(name):
    assert tuple(inspect.signature(getattr(THEIRS, name)).parameters) == vllm_kda_overlap.FUNCTIONS[name][0]


def test_what_is_read_of_the_layer():
    source = inspect.getsource(KDA.KimiK3DeltaAttention)
    for used in (vllm_kda_overlap.LIMIT, "_projection_aux_stream", "_projection_events", "in_proj_qkvgfab", "f_b_proj"):
        assert f"self.{used} = " in source, used
    assert "low_latency_gemm import (\n                run_kda_projection_overlap" in source, "imported at the call"


# ---- limits


def test_with_0_a_layer_runs_its_linears_through_their_plans_and_stays_so(gpu, theirs_ran, vllm_tunes):
    """The H200's own table says 0."""
    layer, x = make_layer(), bf16(2, GEOMETRY.hidden, seed=3)
    installed = adapter.install(layer).installed
    assert installed == ("in_proj_qkvgfab", "f_b_proj") and layer._projection_overlap_max_tokens == 0
    THEIRS.autotune_kda_qkvg(layer)
    assert layer._projection_overlap_max_tokens == 0
    gpu.capturing = True
    seen = projections(layer, x)
    assert theirs_ran == [] and [unit.kernel for unit, _ in gpu.calls][:1] == ["split_k"], "not through the packed plan"
    assert parity(seen["mixed_qkv"], reference_gemm(x, WEIGHTS[GEOMETRY.packed][: 3 * GEOMETRY.f_b])).ok


@pytest.mark.parametrize("m, ours", [(1, True), (7, True), (8, False)])
def test_up_to_our_limit_our_branches_run(gpu, limit, theirs_ran, vllm_tunes, m, ours):
    limit(7)
    layer, x = make_layer(), bf16(m, GEOMETRY.hidden, seed=3)
    assert adapter.install(layer).installed[-1] == "run_kda_projection_overlap"
    assert adapter.report(layer).installed[-1] == "run_kda_projection_overlap"
    compiled = gpu.cache.compiles
    THEIRS.autotune_kda_qkvg(layer)
    assert layer._projection_overlap_max_tokens == 7, "vLLM's autotune raised it to its own"
    gpu.capturing = True
    seen = projections(layer, x)
    assert theirs_ran == [] and gpu.cache.compiles == compiled and gpu.cache.late == 0
    assert len(gpu.calls) == 3 if ours else len(gpu.calls) < 3, gpu.calls
    packed = WEIGHTS[GEOMETRY.packed]
    f_a = reference_gemm(x, packed[GEOMETRY.qkvg : GEOMETRY.qkvg + GEOMETRY.f_a]).value.bfloat16()
    assert parity(seen["mixed_qkv"], reference_gemm(x, packed[: 3 * GEOMETRY.f_b])).ok
    assert parity(seen["g1"].reshape(m, -1), reference_gemm(f_a, WEIGHTS[GEOMETRY.f_b])).ok
    assert seen["beta"].shape == (1, m, GEOMETRY.beta)


@pytest.mark.parametrize("reason", [Reason.TOKENS, Reason.DEVICE_CLASS])
def test_without_a_limit_the_overlap_stays_vllms(gpu, limit, theirs_ran, reason):
    limit(Refusal(reason))
    layer = make_layer()
    assert adapter.install(layer).installed == ("in_proj_qkvgfab", "f_b_proj")
    assert layer._projection_overlap_max_tokens == BEFORE
    gpu.capturing = True
    projections(layer, bf16(2, GEOMETRY.hidden))
    assert theirs_ran == [2] and gpu.calls == []


def test_batch_invariant_there_is_no_overlap(gpu, limit):
    limit(Refusal(Reason.BATCH_INVARIANT))
    layer = make_layer()
    adapter.install(layer)
    assert layer._projection_overlap_max_tokens == 0


# ---- what stays vLLM's


def test_layers_that_are_not_taken(gpu, limit, theirs_ran):
    limit(7)
    no_stream, quantized, plain = make_layer(stream=False), make_layer(), make_layer()
    quantized.f_b_proj.quant_method = type("Fp8", (), {"apply": None})()
    model = nn.ModuleDict({"no_stream": no_stream, "quantized": quantized})
    taken = make_layer()
    adapter.install(taken)
    assert not any("overlap" in name for name in adapter.install(model).installed)
    assert [layer._projection_overlap_max_tokens for layer in (no_stream, quantized, plain)] == [BEFORE] * 3
    gpu.capturing = True
    projections(plain, bf16(2, GEOMETRY.hidden))
    assert theirs_ran == [2], "a layer of another model is vLLM's"


def test_one_model_is_uninstalled_without_the_other(gpu, limit, theirs_ran):
    limit(7)
    first, second = make_layer(), make_layer()
    vllms = THEIRS.run_kda_projection_overlap
    adapter.install(first)
    adapter.install(second)
    adapter.install(second)
    adapter.uninstall(first)
    assert first._projection_overlap_max_tokens == BEFORE and second._projection_overlap_max_tokens == 7
    assert THEIRS.run_kda_projection_overlap is not vllms
    adapter.uninstall(second)
    assert THEIRS.run_kda_projection_overlap is vllms and second._projection_overlap_max_tokens == BEFORE


@pytest.mark.parametrize("name", vllm_kda_overlap.FUNCTIONS)
def test_another_signature_is_left_alone(gpu, limit, monkeypatch, caplog, name):
    limit(7)
    other = {"run_kda_projection_overlap": lambda x, packed: None, "autotune_kda_qkvg": lambda model, tokens: None}
    monkeypatch.setattr(THEIRS, name, other[name])
    layer = make_layer()
    assert adapter.install(layer).installed == ("in_proj_qkvgfab", "f_b_proj")
    assert layer._projection_overlap_max_tokens == BEFORE and name in caplog.text
    assert getattr(THEIRS, name) is other[name]


@pytest.mark.parametrize("error", [CompileError("kda at 3"), ImportError("kda at 3")], ids=lambda e: type(e).__name__)
def test_branches_that_cannot_be_made_are_vllms(gpu, limit, monkeypatch, caplog, error):
    limit(7)

    def fails(model):
        raise error

    monkeypatch.setattr(vllm_kda_overlap, "autotune_kda_qkvg", fails)
    layer = make_layer()
    assert adapter.install(layer).installed == ("in_proj_qkvgfab", "f_b_proj")
    assert layer._projection_overlap_max_tokens == BEFORE and "kda at 3" in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError("foreign stride"), NotCompiledError("late")], ids=lambda error: type(error).__name__
)
def test_a_call_that_ours_refuses_is_vllms_but_strict_mode_says_so(gpu, limit, theirs_ran, monkeypatch, caplog, error):
    limit(7)
    layer, x = make_layer(), bf16(2, GEOMETRY.hidden)
    adapter.install(layer)

    def refuses(*operands):
        raise error

    monkeypatch.setattr(vllm_kda_overlap, "run_kda_projection_overlap", refuses)
    gpu.capturing = True
    projections(layer, x)
    assert theirs_ran == [2] and str(error) in caplog.text
    if isinstance(error, NotCompiledError):
        monkeypatch.setattr(vllm_kda_overlap, "current", lambda: Settings(strict=True))
        with pytest.raises(NotCompiledError):
            layer.forward(x, None)


# ---- weights that move under a captured graph


def test_a_captured_overlap_over_a_moved_weight_is_stale(gpu, limit):
    limit(7)
    layer = make_layer()
    adapter.install(layer)
    gpu.capturing = True
    projections(layer, bf16(2, GEOMETRY.hidden))
    gpu.capturing = False
    assert stale_weights(layer) == ()
    for name in ("in_proj_qkvgfab", "f_b_proj"):
        linear = getattr(layer, name)
        linear.weight = nn.Parameter(linear.weight.data.clone(), requires_grad=False)
    assert stale_weights(layer) == ("in_proj_qkvgfab", "f_b_proj")
