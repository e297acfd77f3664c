"""vLLM's layer classes with plans in front: what is taken, what it computes, what is left alone, and the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from conformance.fakes import TOY_CONFIG, bf16, fake_table, same_bits, use_table
from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.vllm.conftest import LAYERS, SERVED, made, run
from lowlat_gemm import dispatch, settings
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.adapters.methods import PlannedMethod
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels import registry
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")


@pytest.fixture
def model(gpu):
    return nn.ModuleDict({kind: made(kind, seed) for seed, kind in enumerate(LAYERS)})


# ---- what is taken, and what it computes


def test_all_kinds_of_layers_are_taken(gpu, model):
    report = adapter.install(model)
    assert report.installed == LAYERS and report.skipped == {}
    assert gpu.cache.compiles == len(SERVED) + 1 and gpu.calls == []  # one kernel an M, one with a residual
    assert adapter.report(model) == report


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 64])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_taken_layer_computes_what_it_did(gpu, model, kind, m):
    layer, x = model[kind], bf16(m, K, seed=m)
    before = run(layer, x)
    adapter.install(model)
    y = run(layer, x)
    if m in SERVED:
        assert [rows for _, rows in gpu.calls] == [m] and parity(y, reference_gemm(x, layer.weight.data)).ok
    else:
        assert gpu.calls == [] and same_bits(y, before)


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "capture"])
def test_nothing_compiles_after_the_install(gpu, model, capturing):
    adapter.install(model)
    compiled, gpu.capturing = gpu.cache.compiles, capturing
    for kind in LAYERS:
        for m in range(1, 9):
            run(model[kind], bf16(m, K))
    assert compiled > 0 and len(gpu.calls) == len(LAYERS) * len(SERVED)
    assert (gpu.cache.compiles, gpu.cache.late) == (compiled, 0)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 1, K), (1, 2, 2, K)], ids=str)
def test_leading_dimensions_are_tokens(gpu, model, shape):
    adapter.install(model)
    x = bf16(*shape)
    y = model["replicated"](x)[0]
    assert len(gpu.calls) == 1 and y.shape == (*shape[:-1], N)
    assert parity(y.reshape(-1, N), reference_gemm(x.reshape(-1, K), model["replicated"].weight.data)).ok


@pytest.mark.parametrize("m", [1, 2, 64])
def test_apply_with_residual(gpu, model, m):
    adapter.install(model)
    layer, x, residual = model["replicated"], bf16(m, K), bf16(m, N, seed=3)
    y = layer.quant_method.apply_with_residual(layer, x, residual)
    assert len(gpu.calls) == (m == 1)
    if m == 1:
        assert parity(y, reference_gemm(x, layer.weight.data, residual)).ok
    else:
        assert same_bits(y, torch.addmm(residual, x, layer.weight.data.t()))


def test_a_row_parallel_layer_takes_no_residual(gpu, model):
    adapter.install(model)
    layer = model["row"]
    assert layer.reduce_results and layer.tp_size == 1
    layer.tp_size = 2
    with pytest.raises(ValueError, match="added 2 times"):
        layer.quant_method.apply_with_residual(layer, bf16(1, K), bf16(1, N))


# ---- what is left alone


class ForeignMethod(UnquantizedLinearMethod):
    pass


def with_method():
    layer = made("column")
    layer.quant_method = ForeignMethod()
    return layer


def with_gemm():
    layer = made("column")
    layer.quant_method._gemm_impl = lambda layer, x, weight, bias=None: F.linear(x, weight, bias)
    return layer


def tied():
    model = nn.Module()
    model.embed_tokens = VocabParallelEmbedding(N, K, params_dtype=torch.bfloat16)
    model.lm_head = made("head").tie_weights(model.embed_tokens)
    return model


def without_weight():
    layer = made("row")
    layer._parameters["weight"] = None
    return layer


def wrapped_for_lora():
    from vllm.lora.layers.base import BaseLayerWithLoRA

    wrapper = BaseLayerWithLoRA()
    wrapper.base_layer = made("column")
    return wrapper


LEFT_ALONE = {
    "bias": (Reason.BIAS, "", lambda: made("column", bias=True)),
    "bias added later": (Reason.BIAS, "", lambda: made("row", bias=True, skip_bias_add=True)),
    "another method": (Reason.LAYER, "", with_method),
    "another GEMM": (Reason.LAYER, "", with_gemm),
    "tied head": (Reason.WEIGHT_LAYOUT, "lm_head", tied),
    "LoRA": (Reason.LAYER, "base_layer", wrapped_for_lora),
    "fp16": (Reason.DTYPE, "", lambda: made("merged", dtype=torch.float16)),
    "shape": (Reason.SHAPE, "", lambda: vllm_linear.ReplicatedLinear(K, N + 8, bias=False, params_dtype=torch.bfloat16)),
    "no weight": (Reason.LAYER, "", without_weight),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone_and_why(gpu, name):
    reason, path, make = LEFT_ALONE[name]
    model = make()
    methods = {id(module): module.quant_method for module in model.modules() if hasattr(module, "quant_method")}
    report = adapter.install(model)
    assert report.installed == () and report.skipped[path].reason is reason, str(report)
    assert {id(module): module.quant_method for module in model.modules() if hasattr(module, "quant_method")} == methods
    assert gpu.cache.compiles == 0 and adapter.report(model) == report


def test_an_embedding_is_no_candidate(gpu):
    embedding = VocabParallelEmbedding(N, K, params_dtype=torch.bfloat16)
    report = adapter.install(embedding)
    assert (report.installed, report.skipped) == ((), {}) and type(embedding.quant_method) is UnquantizedEmbeddingMethod


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"disabled": True}, Reason.DISABLED),
        ({"deny": settings.parse_deny("skinny")}, Reason.DISABLED),
        ({"batch_invariant": True}, Reason.BATCH_INVARIANT),
    ],
    ids=["disabled", "denied", "batch-invariant"],
)
def test_settings_that_leave_nothing_to_run(gpu, model, fields, reason):
    settings.change(**fields)
    report = adapter.install(model)
    assert report.installed == () and {refusal.reason for refusal in report.skipped.values()} == {reason}


@pytest.mark.parametrize("breaks", [False, True])
def test_batch_invariant_mode_takes_a_row_whole_or_declines_it_whole(gpu, model, monkeypatch, breaks):
    invariant = replace(registry.backend("skinny", SM90), invariance=lambda config: "one order")
    monkeypatch.setattr(dispatch, "backend", lambda name, arch: invariant)
    use_table(monkeypatch, fake_table({m: ("skinny", TOY_CONFIG) for m in SERVED}, n=N, k=K))
    settings.change(batch_invariant=True)
    gpu.compile_error = RuntimeError("no") if breaks else None
    report = adapter.install(model)
    assert report.installed == (() if breaks else LAYERS)
    assert {refusal.reason for refusal in report.skipped.values()} == ({Reason.BACKEND_UNAVAILABLE} if breaks else set())


def test_only_bf16(gpu, model):
    report = adapter.install(model, torch.float16)
    assert report.installed == () and {refusal.reason for refusal in report.skipped.values()} == {Reason.DTYPE}


def test_families(gpu, model):
    assert adapter.install(model, tables="toy").installed == LAYERS
    assert model["row"].quant_method.lowlat_tables == "toy"
    with pytest.raises(ValueError, match="no tables of family 'kimi_k4': known are toy"):
        adapter.install(model, tables=["kimi_k4"])


def test_without_a_gpu_everything_is_left_alone():
    report = adapter.install(made("column"))
    assert report.skipped[""].reason is Reason.CAPABILITY and "cpu" in str(report)


# ---- the methods


@pytest.mark.parametrize("kind", LAYERS)
def test_a_planned_method_has_the_state_of_vllms_own(gpu, kind):
    layer = made(kind)
    own = layer.quant_method
    own.set_by_somebody_else = "kept"
    adapter.install(layer)
    method, wanted = layer.quant_method, UnquantizedEmbeddingMethod if kind == "head" else UnquantizedLinearMethod
    assert isinstance(method, wanted) and isinstance(method, PlannedMethod) and type(own) is wanted
    state = {name: value for name, value in vars(method).items() if not name.startswith("lowlat_")}
    assert state == vars(own) and ("_gemm_impl" in state) == (kind != "head")
    ours = {"apply_with_residual", "residual_or_refuse", "lowlat_replaced", "lowlat_tables"}
    assert {name for name in dir(method) if not name.startswith("__")} - set(dir(own)) == ours


def test_installing_again_changes_nothing_and_uninstalling_undoes_all(gpu, model):
    own = {kind: model[kind].quant_method for kind in LAYERS}
    first = adapter.install(model)
    assert adapter.install(model) == first
    assert all(model[kind].quant_method.lowlat_replaced is own[kind] for kind in LAYERS)
    assert adapter.uninstall(model) == len(LAYERS) and adapter.uninstall(model) == 0
    assert all(model[kind].quant_method is own[kind] for kind in LAYERS)


def test_a_second_install_that_declines_takes_the_first_one_back(gpu, model):
    adapter.install(model)
    settings.change(disabled=True)
    assert adapter.install(model).installed == () and type(model["row"].quant_method) is UnquantizedLinearMethod


def test_settings_are_followed_after_the_install(gpu, model):
    adapter.install(model)
    settings.change(disabled=True)
    x = bf16(2, K)
    assert same_bits(model["row"](x)[0], F.linear(x, model["row"].weight.data)) and gpu.calls == []


def test_a_bias_given_at_the_call_is_vllms_own_business(gpu, model):
    adapter.install(model)
    layer, x, bias = model["column"], bf16(1, K), bf16(N)
    assert same_bits(layer.quant_method.apply(layer, x, bias), F.linear(x, layer.weight.data, bias)) and gpu.calls == []


# ---- weights: loading and reloading


def test_vllm_picks_the_weight_loader_by_the_methods_class_name():
    """Why the name UnquantizedLinearMethod is never replaced in vLLM, and methods only after construction."""
    layer = made("column")
    assert layer.weight.weight_loader.__name__ == "weight_loader_v2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_linear, "UnquantizedLinearMethod", ForeignMethod)
        assert made("column").weight.weight_loader.__name__ == "weight_loader"


def test_a_taken_layer_keeps_its_weight_loader(gpu):
    layer = made("column")
    adapter.install(layer)
    new = bf16(N, K, seed=9)
    layer.weight.weight_loader(layer.weight, new)
    assert layer.weight.weight_loader.__name__ == "weight_loader_v2" and same_bits(layer.weight.data, new)


def test_a_layerwise_reload_keeps_storage_and_method(gpu):
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    model = nn.ModuleDict({"proj": made("column")})
    record_metadata_for_reloading(model)
    adapter.install(model)
    layer = model["proj"]
    method, pointer, new = layer.quant_method, layer.weight.data_ptr(), bf16(N, K, seed=9)
    seen = []
    type(method).process_weights_after_loading = lambda self, layer: seen.append(layer)
    try:
        initialize_layerwise_reload(model)
        assert layer.weight.is_meta
        layer.weight.weight_loader(layer.weight, new)
        finalize_layerwise_reload(model, ModelConfig.__new__(ModelConfig))
    finally:
        del type(method).process_weights_after_loading
    assert seen == [layer] and layer.quant_method is method
    assert layer.weight.data_ptr() == pointer and same_bits(layer.weight.data, new)
    x = bf16(1, K)
    assert parity(layer(x)[0], reference_gemm(x, new)).ok and len(gpu.calls) == 1
