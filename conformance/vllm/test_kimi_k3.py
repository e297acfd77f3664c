"""Kimi-K3 in vLLM: what the adapter names is there, its installer agrees with vLLM's, vLLM's own methods are taken
over, and the call sites that go past linear methods."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import lowlat_gemm
from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, cuda, device_of, same_bits
from conformance.vllm.conftest import LAYERS, made, run
from lowlat_gemm import dispatch
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.adapters import methods, vllm_kimi_k3, vllm_methods
from lowlat_gemm.adapters.vllm_kimi_k3 import CALL_SITES
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.captures import stale_weights
from lowlat_gemm.kernels import registry
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")

MODULES = ("low_latency_gemm", "kda", "mla", "model", "mtp")
K3 = {name: importlib.import_module(f"vllm.models.kimi_k3.nvidia.{name}") for name in MODULES}


# ---- what the adapter names


@pytest.mark.parametrize("site", CALL_SITES, ids=lambda site: f"{site.owner}.{site.method}")
def test_a_call_site_is_there_as_it_was_when_this_was_written(site):
    assert site.owner_class() is getattr(K3[site.file], site.owner)


@pytest.mark.parametrize("name", vllm_methods._KIMI_K3_METHODS)
def test_vllms_own_methods_are_there_by_the_names_that_are_taken_over(name):
    assert vllm_methods._KIMI_K3 == K3["low_latency_gemm"].__name__ and hasattr(K3["low_latency_gemm"], name)


def test_what_the_call_sites_read_of_their_modules():
    attention = inspect.getsource(K3["mla"].MultiHeadLatentAttention)
    for used in ("_gate_events", "fused_qkv_a_g_proj", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"):
        assert f"self.{used}" in attention
    assert attention.count("self._unquantized_gemm(hidden_states,") == 2
    assert "fused_qkv_a_g_proj.weight[:qkv_a_rows]" in attention and ".weight[qkv_a_rows:]" in attention


@pytest.mark.parametrize("name", ["enable_kimi_k3_low_latency_gemm", "try_low_latency_gemm", "select_kimi_k3_backend"])
def test_ours_takes_what_vllms_function_of_that_name_takes(name):
    theirs = inspect.signature(getattr(K3["low_latency_gemm"], name)).parameters
    ours = inspect.signature(getattr(lowlat_gemm, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(parameter.default is not parameter.empty for parameter in list(ours.values())[len(theirs) :])


def test_another_signature_is_left_alone(gpu, monkeypatch, caplog):
    transform = make_transform()
    monkeypatch.setattr(K3["model"].KimiRoutedOutputTransform, "forward", lambda self, hidden_states, shared: None)
    assert adapter.install(transform).installed == ("up_proj",)
    assert "left alone" in caplog.text and "KimiRoutedOutputTransform.forward" in caplog.text


# ---- installer parity


@pytest.fixture
def all_backends(monkeypatch):
    """Every backend that has code takes part, proven or not: parity is about tables."""
    monkeypatch.setattr(dispatch, "backend", lambda name, arch: registry._BACKENDS.get(name))


def kimi_k3_model(shapes) -> nn.Module:
    model = nn.Module()
    for n, k in sorted(shapes):
        model.add_module(f"{n}x{k}", ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16))
    n, k = 2304, 1536
    model.biased = ReplicatedLinear(k, n, bias=True, params_dtype=torch.bfloat16)
    model.fp16 = ReplicatedLinear(k, n, bias=False, params_dtype=torch.float16)
    model.other_shape = ReplicatedLinear(k, n + 8, bias=False, params_dtype=torch.bfloat16)
    model.other_method = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16)
    model.other_method.quant_method = type("Other", (UnquantizedLinearMethod,), {})()
    model.head = ParallelLMHead(20480, 7168, params_dtype=torch.bfloat16)
    model.embed_tokens = VocabParallelEmbedding(20480, 7168, params_dtype=torch.bfloat16)
    model.tied_head = ParallelLMHead(20480, 7168, params_dtype=torch.bfloat16).tie_weights(model.embed_tokens)
    return model


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_installer_takes_what_vllms_takes(arch, all_backends, monkeypatch):
    theirs = K3["low_latency_gemm"]
    monkeypatch.setattr(theirs.current_platform, "is_device_capability", lambda c: c == arch.capability, raising=False)
    model = kimi_k3_model(theirs._low_latency_table())  # weights are never written, so they take no memory
    with torch.no_grad(), cuda(device_of(arch)) as fake:
        monkeypatch.setattr(methods, "compile_ahead", lambda units: {})
        ours = set(lowlat_gemm.enable_kimi_k3_low_latency_gemm(model, torch.bfloat16).installed)
        assert fake.calls == []
    adapter.uninstall(model)
    theirs.enable_kimi_k3_low_latency_gemm(model, torch.bfloat16)
    taken = {name for name, module in model.named_children() if "KimiK3" in type(module.quant_method).__name__}
    # vLLM decides on bias at the call, and on nothing else of these three.
    assert taken - ours == {"biased", "fp16", "tied_head"} and ours <= taken
    assert len(ours) > len(theirs._low_latency_table())  # and the head


def test_only_for_bf16():
    with cuda(device_of(SM90)):
        layer = ReplicatedLinear(1536, 2304, bias=False, params_dtype=torch.bfloat16)
        report = lowlat_gemm.enable_kimi_k3_low_latency_gemm(layer, torch.float16)
    assert report.skipped[""].reason is Reason.DTYPE and type(layer.quant_method) is UnquantizedLinearMethod


# ---- vLLM's own methods, which its model's constructor installs


@pytest.fixture
def vllms_own(monkeypatch):
    """A model of all kinds of layers with vLLM's own low-latency methods."""
    theirs = K3["low_latency_gemm"]
    spec = theirs.ProjectionSpec(N, K)
    monkeypatch.setattr(theirs, "_low_latency_table", lambda: {(N, K): spec})
    model = nn.ModuleDict({kind: made(kind) for kind in LAYERS})
    theirs.enable_kimi_k3_low_latency_gemm(model, torch.bfloat16)
    return model


def test_vllms_own_methods_are_taken_over_and_given_back(gpu, vllms_own):
    own = {kind: vllms_own[kind].quant_method for kind in LAYERS}
    assert all(type(method).__name__ in vllm_methods._KIMI_K3_METHODS for method in own.values())
    assert adapter.install(vllms_own).installed == LAYERS
    for kind in LAYERS:
        method = vllms_own[kind].quant_method
        assert isinstance(method, type(own[kind])) and method._plan is own[kind]._plan
        x = bf16(1, K)
        assert parity(run(vllms_own[kind], x), reference_gemm(x, vllms_own[kind].weight.data)).ok
    assert len(gpu.calls) == len(LAYERS)
    adapter.uninstall(vllms_own)
    assert all(vllms_own[kind].quant_method is own[kind] for kind in LAYERS)


def test_what_we_do_not_serve_is_theirs_to_run(gpu, vllms_own, monkeypatch):
    adapter.install(vllms_own)
    seen = []

    def run_plan(plan, x, weight):
        seen.append(x.shape[0])
        return F.linear(x, weight)

    monkeypatch.setattr(K3["low_latency_gemm"], "_runtime_ok", lambda x, weight: True)
    monkeypatch.setattr(K3["low_latency_gemm"], "_run_plan", run_plan)
    for m in (1, 3, 16):
        vllms_own["column"](bf16(m, K))
    assert seen == [3, 16] and [rows for _, rows in gpu.calls] == [1]


# ---- call sites that go past linear methods


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def make_transform(norm=None) -> nn.Module:
    return K3["model"].KimiRoutedOutputTransform(norm, made("replicated"))


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("norm", [None, Doubled()], ids=["plain", "norm"])
def test_the_up_projection_adds_its_residual_in_the_kernel(gpu, m, norm):
    transform, x, residual = make_transform(norm), bf16(m, K), bf16(m, N, seed=5)
    before, before_without = transform(x, residual.clone()), transform(x)
    assert adapter.install(transform).installed == ("up_proj", "forward")
    assert adapter.report(transform).installed == ("up_proj", "forward")
    y = transform(x, residual.clone())
    assert len(gpu.calls) == (m == 1)
    normed = x if norm is None else 2 * x
    assert parity(y, reference_gemm(normed, transform.up_proj.weight.data, residual)).ok if m == 1 else same_bits(y, before)
    without = transform(x)
    assert without.shape == before_without.shape and len(gpu.calls) == (m == 1) + (m in (1, 2))
    assert adapter.uninstall(transform) == 1 and "forward" not in transform.__dict__
    assert same_bits(transform(x, residual.clone()), before)


def test_without_a_residual_config_the_call_site_stays_vllms(monkeypatch, gpu):
    plan = replace(dispatch.plan_for(SM90, N, K), residual_entries={})
    monkeypatch.setattr(vllm_kimi_k3, "device_plan", lambda *args: plan)
    assert adapter.install(make_transform()).installed == ("up_proj",)


def make_attention(events=("start", "end")) -> nn.Module:
    """The attention with what its input projection needs, and nothing else: 64 latent rows, then 64 of the gate."""
    attention = nn.Module.__new__(K3["mla"].MultiHeadLatentAttention)
    nn.Module.__init__(attention)
    attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim = 32, 24, 8
    attention.fused_qkv_a_g_proj = ReplicatedLinear(K, 2 * N, bias=False, params_dtype=torch.bfloat16)
    attention.fused_qkv_a_g_proj.weight.data.copy_(bf16(2 * N, K))
    attention._gate_events = events
    return attention


@pytest.mark.parametrize("m", [1, 2, 3, 16])
def test_the_attentions_sliced_projection(gpu, m):
    model = nn.ModuleDict({"self_attn": make_attention()})
    attention, x = model["self_attn"], bf16(m, K)
    weights = attention.fused_qkv_a_g_proj.weight[:N], attention.fused_qkv_a_g_proj.weight[N:]
    assert adapter.install(model).installed == ("self_attn._unquantized_gemm",)
    assert gpu.cache.compiles == 4  # warmed up, though no linear method owns the shape
    for weight in weights:
        gpu.calls.clear()
        y = attention._unquantized_gemm(x, weight)
        assert len(gpu.calls) == (m in (1, 2))
        assert parity(y, reference_gemm(x, weight)).ok if m in (1, 2) else same_bits(y, F.linear(x, weight))
    adapter.uninstall(model)
    assert attention._unquantized_gemm.__func__ is K3["mla"].MultiHeadLatentAttention._unquantized_gemm


def test_a_captured_slice_of_a_moved_weight_is_stale(gpu):
    attention = make_attention()
    adapter.install(attention)
    gpu.capturing = True
    attention._unquantized_gemm(bf16(1, K), attention.fused_qkv_a_g_proj.weight[:N])
    gpu.capturing = False
    assert len(gpu.calls) == 1 and stale_weights(attention) == ()
    projection = attention.fused_qkv_a_g_proj
    projection.weight = nn.Parameter(projection.weight.data.clone(), requires_grad=False)
    assert stale_weights(attention) == ("fused_qkv_a_g_proj",)


def test_an_attention_that_never_slices_is_left_alone(gpu):
    assert adapter.install(make_attention(events=None)).installed == ()


def test_a_quantized_projection_is_left_alone(gpu):
    attention = make_attention()
    attention.fused_qkv_a_g_proj.quant_method = type("Fp8", (UnquantizedLinearMethod,), {})()
    assert adapter.install(attention).installed == ()


def test_one_model_is_uninstalled_without_the_other(gpu):
    first, second = make_transform(), make_transform()
    adapter.install(first)
    adapter.install(second)
    adapter.uninstall(first)
    assert adapter.report(first).installed == () and adapter.report(second).installed == ("up_proj", "forward")
