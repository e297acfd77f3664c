"""Kimi-K3 in vLLM: what the adapter names is there, its installer agrees with vLLM's, vLLM's own methods are taken
over, and the call sites that go past linear methods."""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import lowlat_gemm
from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import TOY_CONFIG, bf16, cuda, device_of, fake_table, same_bits, use_table
from conformance.vllm.conftest import LAYERS, SERVED, made, run
from lowlat_gemm import dispatch, settings
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.adapters import methods, vllm_kimi_k3, vllm_methods
from lowlat_gemm.adapters.vllm_kimi_k3 import CALL_SITES
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.captures import stale_weights
from lowlat_gemm.kernels import registry
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")

MODULES = ("low_latency_gemm", "kda", "latent_moe_runner", "mla", "model", "mtp")
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


#: What multiplies a matrix, as torch spells it.
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "einsum", "linear", "matmul", "mv", "t"}
#: Products in vLLM's own code for Kimi-K3 that are no call sites of ours, by (file, function), and why.
NO_CALL_SITES = {
    ("latent_moe_runner", "LatentMoERunner._shard_up_proj_tail"): "for more tokens than tables have, no row for its slices",
    ("low_latency_gemm", "_run_plan"): "vLLM's kernel for what our plan does not serve",
    ("low_latency_gemm", "run_kda_projection_overlap.run_qkvg"): "vllm_kda_overlap replaces the whole function",
    ("low_latency_gemm", "run_kda_projection_overlap.run_fab_fb"): "vllm_kda_overlap replaces the whole function",
    ("low_latency_gemm", "autotune_kda_qkvg"): "tunes vLLM's overlap before anything is served",
    ("low_latency_gemm", "KimiK3LowLatencyLinearMethod.apply_with_residual"): "PlannedMethod has its own, which goes first",
    ("mla", "MultiHeadLatentAttention._v_up_proj"): "a product for each head, no [N, K] weight",
    ("mla", "MultiHeadLatentAttention._attention"): "a product for each head, no [N, K] weight",
}


def products(node: ast.AST, inside: tuple[str, ...] = ()) -> set[str]:
    """Names of the functions below ``node`` that multiply a matrix or take a transposed one."""
    found = set()
    for child in ast.iter_child_nodes(node):
        within = (*inside, child.name) if isinstance(child, (ast.ClassDef, ast.FunctionDef)) else inside
        called = child.func if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) else None
        if (called is not None and called.attr in PRODUCTS) or getattr(child, "op", None).__class__ is ast.MatMult:
            found.add(".".join(within))
        found |= products(child, within)
    return found


def test_every_product_with_a_raw_weight_is_a_call_site_or_excluded_for_a_reason():
    root = Path(K3["model"].__file__).parent
    found = {
        (path.relative_to(root).with_suffix("").as_posix(), name)
        for path in root.rglob("*.py")
        for name in products(ast.parse(path.read_text()))
    }
    assert found == {(site.file, f"{site.owner}.{site.method}") for site in CALL_SITES} | NO_CALL_SITES.keys()


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


def make_runner(norm=None, tp_size=2) -> nn.Module:
    """The runner of the routed experts with what its tails need, and nothing else."""
    runner = nn.Module.__new__(K3["latent_moe_runner"].LatentMoERunner)
    nn.Module.__init__(runner)
    runner.routed_output_transform = make_transform(norm)
    runner.moe_config = SimpleNamespace(tp_size=tp_size, ep_size=1, is_sequence_parallel=False, skip_final_all_reduce=False)
    runner.routed_experts, runner._shared_experts = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=None)), object()
    runner.enable_k3_latent_moe_tail_fusion = False
    runner._shared_ar_events = ("start", "end")
    return runner


@pytest.fixture
def steps(monkeypatch):
    """What a tail does beside its product, in order; a reduction over ranks doubles."""
    module, found = K3["latent_moe_runner"], []

    def reduce(x):
        found.append("reduce")
        return 2 * x

    def in_parallel(*arguments):
        first, second, *rest = arguments
        found.append(tuple(rest))
        y = first()
        found.append("product")
        return y, second()

    monkeypatch.setattr(module, "tensor_model_parallel_all_reduce", reduce)
    monkeypatch.setattr(module, "maybe_execute_in_parallel", in_parallel)
    monkeypatch.setattr(module, "aux_stream", lambda: "aux")
    return found


TAIL = ("routed_output_transform.up_proj", "routed_output_transform.forward", "_overlap_allreduce_tail")


@pytest.mark.parametrize("norm", [None, Doubled()], ids=["plain", "norm"])
@pytest.mark.parametrize("m", [1, 2, 3, 16])
def test_the_up_projection_that_hides_an_all_reduce(gpu, steps, m, norm):
    runner, x, shared = make_runner(norm), bf16(m, K), bf16(m, N, seed=5)
    before = runner._overlap_allreduce_tail(x, shared, None)
    vllms_steps = steps[:]
    steps.clear()
    set_up = dict(vars(runner))
    assert adapter.install(runner).installed == TAIL == adapter.report(runner).installed
    assert runner._select_tail_tier(x, shared) is K3["latent_moe_runner"].LatentTailTier.ALLREDUCE_OVERLAP
    y = runner._overlap_allreduce_tail(x, shared, None)
    assert len(gpu.calls) == (m in (1, 2))
    assert steps == vllms_steps == ["reduce", ("start", "end", "aux"), "product", "reduce"]
    product = runner._overlap_allreduce_tail(x, torch.zeros_like(shared), None)
    normed = 2 * x if norm is None else 4 * x
    assert parity(product, reference_gemm(normed, runner.routed_output_transform.up_proj.weight.data)).ok
    assert same_bits(y, product + 2 * shared) and (m in (1, 2) or same_bits(y, before))
    assert same_bits(runner._overlap_allreduce_tail(x, shared, N - 8), y[:, : N - 8])
    adapter.uninstall(runner)
    assert same_bits(runner._overlap_allreduce_tail(x, shared, None), before) and vars(runner) == set_up


def test_the_tails_launch_compiles_nothing_and_is_known_to_a_capture(gpu, steps):
    runner = make_runner()
    adapter.install(runner)
    settings.change(strict=True)
    compiles, gpu.capturing = gpu.cache.compiles, True
    runner._overlap_allreduce_tail(bf16(2, K), bf16(2, N), None)
    gpu.capturing = False
    assert len(gpu.calls) == 1 and gpu.cache.compiles == compiles and gpu.cache.late == 0
    up_proj = runner.routed_output_transform.up_proj
    up_proj.weight = nn.Parameter(up_proj.weight.data.clone(), requires_grad=False)
    assert stale_weights(runner) == ("routed_output_transform.up_proj",)


def test_a_compiler_sees_vllms_own_tail(gpu, steps, monkeypatch):
    runner = make_runner()
    adapter.install(runner)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(vllm_kimi_k3, "Seen", lambda *args, **replaced: pytest.fail("another runner"))
    runner._overlap_allreduce_tail(bf16(2, K), bf16(2, N), None)
    assert gpu.calls == []


def test_a_tail_that_vllm_never_takes_is_left_alone(gpu, monkeypatch):
    assert adapter.install(make_runner(tp_size=1)).installed == TAIL[:2]
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    assert adapter.install(make_runner()).installed == TAIL[:2]


def test_a_quantized_up_projection_is_left_alone(gpu):
    runner = make_runner()
    runner.routed_output_transform.up_proj.quant_method = type("Fp8", (UnquantizedLinearMethod,), {})()
    assert adapter.install(runner).installed == ()


@pytest.fixture
def batch_invariant(gpu, monkeypatch):
    """A row, with residuals, whose kernels are the same for every M, in batch-invariant mode."""
    same = replace(registry.backend("skinny", SM90), invariance=lambda config: "one order")
    monkeypatch.setattr(dispatch, "backend", lambda name, arch: same)
    cells = {m: ("skinny", TOY_CONFIG) for m in SERVED}
    use_table(monkeypatch, fake_table(cells, residual_cells=cells, n=N, k=K))
    settings.change(batch_invariant=True)


@pytest.mark.parametrize("breaks", [False, True])
def test_batch_invariant_mode_takes_a_call_site_whole_or_not_at_all(gpu, batch_invariant, breaks):
    gpu.compile_error = RuntimeError("no") if breaks else None
    transform = make_transform()
    for _ in range(2):  # what failed at the first install is known at the second
        report = adapter.install(transform)
        assert report.installed == (() if breaks else ("up_proj", "forward"))
        reasons = {name: refusal.reason for name, refusal in report.skipped.items()}
        assert reasons == (dict.fromkeys(("up_proj", "forward"), Reason.BACKEND_UNAVAILABLE) if breaks else {})
    assert breaks == ("forward" not in transform.__dict__)


def test_batch_invariant_mode_leaves_sites_alone_that_see_some_m_only(gpu, batch_invariant):
    """At the other M vLLM multiplies by the same weight elsewhere: a token's bits would depend on M."""
    model = nn.ModuleDict({"attention": make_attention(), "experts": make_runner()})
    report = adapter.install(model)
    assert report.installed == tuple(f"experts.{name}" for name in TAIL[:2])
    for name in ("attention._unquantized_gemm", "experts._overlap_allreduce_tail"):
        assert report.skipped[name].reason is Reason.BATCH_INVARIANT


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
