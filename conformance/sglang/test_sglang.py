"""The SGLang adapter in the real SGLang on CPU: its linears, its plugin hook, and errors that stay inside.

What its wheel does not allow here, for want of its compiled kernels: a worker with a model of its own.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt import runtime_context
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.unquant import Bf16GemmBackend, UnquantizedLinearMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from torch import nn

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, cuda, device_of, same_bits, toy_table, use_table
from conformance.sglang.conftest import LAYERS, made
from lowlat_gemm import settings
from lowlat_gemm.adapters import methods
from lowlat_gemm.adapters import sglang as adapter
from lowlat_gemm.arch import SM90
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("sglang_config", "clean_settings")

SERVED = (1, 2, 4)


@pytest.fixture
def model(gpu):
    return nn.ModuleDict({kind: made(kind, seed) for seed, kind in enumerate(LAYERS)})


def apply(layer, x):
    return layer.quant_method.apply(layer, x)


# ---- linears


@pytest.mark.parametrize("m", [1, 2, 3, 4, 64])
def test_all_kinds_of_linears_compute_what_they_did(gpu, model, m):
    x = bf16(m, K, seed=m)
    before = {kind: apply(model[kind], x) for kind in LAYERS}
    report = adapter.install(model)
    assert report.installed == LAYERS and report.skipped == {} and adapter.report(model) == report
    for kind in LAYERS:
        y, weight = apply(model[kind], x), model[kind].weight
        assert parity(y, reference_gemm(x, weight)).ok if m in SERVED else same_bits(y, before[kind]), kind
    assert [rows for _, rows in gpu.calls] == [m] * (len(LAYERS) * (m in SERVED))
    assert adapter.uninstall(model) == len(LAYERS)
    assert {type(model[kind].quant_method) for kind in LAYERS} == {UnquantizedLinearMethod}


@pytest.mark.parametrize("kind", ["replicated", "column"])
def test_through_the_layers_own_forward(gpu, model, kind):
    adapter.install(model)
    x = bf16(2, K)
    assert parity(model[kind](x)[0], reference_gemm(x, model[kind].weight)).ok and len(gpu.calls) == 1


@pytest.mark.parametrize("m", [1, 2])
def test_an_addend_is_added_in_the_kernel(gpu, model, m):
    layer, x, addend = model["column"], bf16(m, K), bf16(m, N, seed=3)
    before = layer.quant_method.apply_with_addend(layer, x, addend.clone())
    adapter.install(model)
    y = layer.quant_method.apply_with_addend(layer, x, addend.clone())
    assert len(gpu.calls) == 1  # at M = 2 without a residual config: the plain kernel, then SGLang's own addition
    assert parity(y, reference_gemm(x, layer.weight, addend)).ok if m == 1 else torch.allclose(y.float(), before.float(), atol=1)


class ForeignMethod(UnquantizedLinearMethod):
    pass


def with_method():
    layer = made("column")
    layer.quant_method = ForeignMethod()
    return layer


LEFT_ALONE = {
    "bias": (Reason.BIAS, lambda: made("column", bias=True)),
    "another method": (Reason.LAYER, with_method),
    "fp16": (Reason.DTYPE, lambda: made("row", dtype=torch.float16)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone_and_why(gpu, name):
    reason, make = LEFT_ALONE[name]
    layer = make()
    method = layer.quant_method
    report = adapter.install(layer)
    assert report.installed == () and report.skipped[""].reason is reason and layer.quant_method is method


# ---- under a compiler


@pytest.mark.parametrize(("backend", "ours"), [("AUTO", True), ("TORCH", True), ("CUTEDSL", False), ("GEMV", False)])
def test_under_a_compiler_sglangs_choice_of_gemm_stays_its_own(monkeypatch, backend, ours):
    monkeypatch.setattr(unquant, "_BF16_GEMM_BACKEND", Bf16GemmBackend[backend])
    use_table(monkeypatch, toy_table())
    layer, found = made("column"), []
    with cuda(device_of(SM90)):
        assert adapter.install(layer).installed == ("",)

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x = bf16(2, K)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad():
        y = torch.compile(lambda x: apply(layer, x), backend=keep, fullgraph=True)(x)
    assert same_bits(y, F.linear(x, layer.weight))
    assert ("lowlat_gemm.linear.default" in [str(node.target) for node in found[0].graph.nodes]) == ours


# ---- the hook


@pytest.fixture
def hooked(monkeypatch):
    """ModelRunner.load_model as SGLang has it after its plugins were loaded, around a load that brings ``model``."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(ModelRunner, "load_model", lambda self: setattr(self, "model", self.to_load))
    monkeypatch.setitem(sys.modules, adapter._SCHEDULER, types.ModuleType(adapter._SCHEDULER))

    def load(model):
        adapter.register()
        adapter.register()
        HookRegistry.apply_hooks()
        runner = SimpleNamespace(to_load=model)
        assert ModelRunner.load_model(runner) is None
        return runner.model

    return load


def test_the_entry_point_is_this_function():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"lowlat_gemm": "lowlat_gemm.adapters.sglang:register"}


def test_a_loaded_model_has_plans_and_one_line_says_so(gpu, model, hooked, caplog):
    caplog.set_level("INFO", "sglang")
    assert hooked(model) is model and adapter.report(model).installed == LAYERS and gpu.cache.compiles == 4
    lines = [record.getMessage() for record in caplog.records if "lowlat_gemm" in record.name]
    assert len(lines) == 1 and "4 calls of ModuleDict go through plans, 0 left alone" in lines[0]


def test_the_hook_is_there_once(hooked, model):
    hooked(model)
    assert [hook for _, hook, _ in HookRegistry._hooks[adapter.LOADS_A_MODEL]] == [adapter._after_load]


def test_a_process_without_a_scheduler_is_left_alone(hooked, monkeypatch):
    monkeypatch.delitem(sys.modules, adapter._SCHEDULER)
    adapter.register()
    assert not HookRegistry._hooks


def test_switched_off_by_the_environment(hooked, model):
    settings.change(no_plugin=True)
    assert adapter.report(hooked(model)).installed == () and not HookRegistry._hooks


def broken(*args, **kwargs):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(("module", "name"), [(methods, "device_plan"), (methods, "planned"), (adapter, "summary")])
def test_an_error_while_installing(gpu, model, hooked, monkeypatch, caplog, module, name):
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        hooked(model)
    assert adapter.report(model).installed == () and "broken on purpose" in caplog.text
    assert {type(model[kind].quant_method) for kind in LAYERS} == {UnquantizedLinearMethod}


@pytest.mark.parametrize(
    ("getter", "value", "reason"),
    [
        ("get_lora", SimpleNamespace(enable_lora=True), Reason.LAYER),
        ("get_exec", SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True)), Reason.BATCH_INVARIANT),
    ],
)
def test_models_that_are_left_alone_whole(gpu, model, hooked, monkeypatch, getter, value, reason):
    getattr(runtime_context, getter)()  # what stands in for it is asked of a real config too
    monkeypatch.setattr(runtime_context, getter, lambda: value)
    hooked(model)
    assert adapter.report(model).installed == ()
    assert {refusal.reason for refusal in adapter.install_after_load(model).skipped.values()} == {reason}


def test_what_the_adapter_reads_of_sglangs_config_is_there():
    assert not runtime_context.get_lora().enable_lora
    assert runtime_context.get_exec().deterministic.enable_deterministic_inference is False


def test_the_hooked_method_is_called_before_graphs_are_captured():
    """A worker loads in its constructor, and captures when the scheduler tells it to."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    assert "self.initialize()" in inspect.getsource(ModelRunner.__init__)
    assert "self.load_model()" in inspect.getsource(ModelRunner.initialize)
    captures = "capture_cuda_graphs("
    assert captures in inspect.getsource(ModelRunner.init_cuda_graphs)
    assert captures not in inspect.getsource(ModelRunner.__init__) + inspect.getsource(ModelRunner.initialize)
    assert "self.model = loaded.model" in inspect.getsource(sys.modules[ModelRunner.__module__])
