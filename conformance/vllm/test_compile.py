"""vLLM compiles most models: the operator survives the trace, one graph serves every M, and the compile key changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.fakes import TOY_K as K
from conformance.fakes import bf16, cuda, device_of, same_bits, toy_table, use_table
from conformance.vllm.conftest import LAYERS, SERVED, made, run
from lowlat_gemm import stale_weights
from lowlat_gemm.adapters import vllm as adapter
from lowlat_gemm.adapters.report import InstallReport
from lowlat_gemm.adapters.methods import PlannedMethod
from lowlat_gemm.arch import SM90
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("vllm_config", "clean_settings")


@pytest.fixture
def installed(monkeypatch):
    """A model with plans, outside of the fake GPU that it was installed under: its patches are not for compilers."""
    use_table(monkeypatch, toy_table())
    model = nn.ModuleDict({kind: made(kind) for kind in LAYERS})
    with cuda(device_of(SM90)):
        assert adapter.install(model).installed == LAYERS
    return model


def traced(layer):
    """``layer`` compiled for any number of tokens, as vLLM does it (one trace, no guards), and its graphs."""
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(layer, x), backend=keep, fullgraph=True)
    x = bf16(2, K)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad():
        compiled(x)
    return compiled, found


@pytest.mark.parametrize("kind", LAYERS)
def test_a_graph_that_the_operator_was_captured_in_is_stale_where_the_weight_moves(installed, kind):
    layer = installed[kind]
    compiled, _ = traced(layer)
    with torch.no_grad(), cuda(device_of(SM90)) as gpu:
        compiled(bf16(2, K))
        assert len(gpu.calls) == 1
        gpu.capturing = True
        compiled(bf16(2, K))
        gpu.capturing = False
        assert stale_weights(installed) == ()
        layer.weight.data = layer.weight.data.clone()
        assert stale_weights(installed) == (kind,)


def targets(graph) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", LAYERS)
def test_the_operator_survives_and_one_graph_serves_every_m(installed, kind):
    layer = installed[kind]
    compiled, found = traced(layer)
    assert targets(found[0]).count("lowlat_gemm.linear.default") == 1, targets(found[0])
    with torch.no_grad(), cuda(device_of(SM90)) as gpu:
        for m in (1, 2, 3, 4, 8, 16):
            gpu.calls.clear()
            x = bf16(m, K, seed=m)
            y = compiled(x)
            assert [rows for _, rows in gpu.calls] == [m] * (m in SERVED), f"M = {m}"
            weight = layer.weight.data
            assert parity(y, reference_gemm(x, weight)).ok if m in SERVED else same_bits(y, F.linear(x, weight)), f"M = {m}"
    assert len(found) == 1


def test_a_method_in_plain_python_does_not_survive(installed):
    """Why the methods call an operator under a compiler."""
    layer = installed["column"]
    plan = {m: F.linear for m in SERVED}

    def apply(self, layer, x, bias=None):
        return plan[x.shape[0]](x, layer.weight)

    layer.quant_method = type("PlainPython", (PlannedMethod,), {"apply": apply})()
    with pytest.raises(Exception, match="(?i)data.dependent|specialize|constant"):
        traced(layer)


def test_an_uninstalled_layer_traces_as_vllms_own(installed):
    adapter.uninstall(installed)
    _, found = traced(installed["row"])
    assert not [target for target in targets(found[0]) if "lowlat" in target]


def test_a_residual_is_torchs_own_under_a_compiler(installed):
    layer = installed["column"]
    torch._dynamo.reset()
    compiled = torch.compile(layer.quant_method.apply_with_residual, backend="eager", fullgraph=True)
    x, residual = bf16(2, K), bf16(2, layer.weight.shape[0], seed=2)
    with torch.no_grad():
        assert same_bits(compiled(layer, x, residual), torch.addmm(residual, x, layer.weight.data.t()))


# ---- the key of the compile cache


@pytest.fixture
def config():
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def key_with(config, *installed: tuple[str, ...]) -> str:
    for names in installed:
        adapter.change_compile_key(config, InstallReport(names))
    return config.compute_hash()


def test_what_is_installed_changes_vllms_compile_key(config):
    keys = [config.compute_hash()]
    keys.append(key_with(config, ("layers.0",)))
    keys.append(key_with(config, ("draft.0",)))  # a draft model of the same config
    assert len(set(keys)) == 3
    assert key_with(config, ("layers.0",), ("draft.0",)) == keys[-1]  # loaded again


def test_the_key_is_the_same_in_every_process(config):
    from vllm.config import DeviceConfig, VllmConfig

    other = VllmConfig(device_config=DeviceConfig(device="cpu"))
    assert key_with(config, ("a",), ("b",)) == key_with(other, ("b",), ("a",))


def test_the_entry_of_the_user_stays(config):
    config.additional_config["of the user"] = 1
    adapter.change_compile_key(config, InstallReport(("a",)))
    assert set(config.additional_config) == {"of the user", "lowlat_gemm"}


def test_after_a_load_that_installed_nothing_the_key_is_vllms_own(config):
    before = config.compute_hash()
    assert adapter.install_after_load(made("column"), config).installed == ()
    assert config.compute_hash() == before and config.additional_config == {}


def test_after_a_load_that_installed_the_key_is_another(config, gpu):
    before = config.compute_hash()
    assert adapter.install_after_load(made("column"), config).installed == ("",)
    assert config.compute_hash() != before
