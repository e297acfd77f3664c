"""The adapter for plain torch.nn.Linear models: what it takes, what it leaves alone, and what a taken module still does."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, device_of, public_world, same_bits, toy_linear  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import disable_low_latency_gemm, enable_low_latency_gemm, settings
from lowlat_gemm.adapters import methods
from lowlat_gemm.adapters.torch_nn import PlannedLinear
from lowlat_gemm.arch import SM100
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = toy_linear(), toy_linear(n=8)
        self.layers = nn.ModuleList([nn.Sequential(toy_linear(seed=1), nn.ReLU()), nn.ModuleDict({"proj": toy_linear(seed=2)})])

    def forward(self, x):
        return self.first(x), self.layers[0](x), self.layers[1]["proj"](x), self.head(x)


class OwnLinear(nn.Linear):
    pass


def install(module, dtype=BF16, tables=None):
    return enable_low_latency_gemm(module, dtype, tables)


def installed(module) -> bool:
    return isinstance(module, PlannedLinear)


# ---- what is taken


def test_all_planned_linears_of_nested_containers_are_taken(gpu):
    model = Block()
    report = install(model)
    assert report.installed == ("first", "layers.0.0", "layers.1.proj")
    assert {name: refusal.reason for name, refusal in report.skipped.items()} == {"head": Reason.SHAPE}
    assert "3 linears installed, 1 left alone" in str(report) and "head: shape not in table" in str(report)
    x = bf16(2, K)
    for y, module in zip(model(x), (model.first, model.layers[0][0], model.layers[1]["proj"])):
        expected = reference_gemm(x, module.weight)
        assert parity(y, expected).ok or module is model.layers[0][0]
    assert len(gpu.calls) == 3


@pytest.mark.parametrize("framework", ["vllm", "sglang", "other"])
def test_layers_of_a_serving_framework_are_listed_with_the_adapter_to_use(gpu, framework):
    """Such a layer is no Linear: without a word an empty report would look like a model without linears."""
    layer = type("ColumnParallelLinear", (nn.Module,), {"__module__": f"{framework}.layers.linear"})()
    layer.weight, layer.quant_method = nn.Parameter(bf16(N, K), requires_grad=False), object()
    norm = nn.LayerNorm(K)
    norm.quant_method = object()  # its weight has one dimension
    report = install(nn.ModuleDict({"proj": layer, "norm": norm}))
    assert report.installed == () and list(report.skipped) == ["proj"]
    refusal = report.skipped["proj"]
    named = {name for name in ("vllm", "sglang") if f"lowlat_gemm.adapters.{name}.install" in refusal.detail}
    assert refusal.reason is Reason.LAYER and named == ({framework} if framework != "other" else {"vllm", "sglang"})
    assert not {"vllm", "sglang"} & sys.modules.keys()


def test_a_layer_that_its_adapter_took_is_not_listed(gpu):
    layer = nn.Module()
    layer.weight, layer.quant_method = nn.Parameter(bf16(N, K), requires_grad=False), methods.planned(nn.Module(), None)
    assert install(layer).skipped == {}


def test_kernels_are_compiled_at_the_install_and_not_later(gpu):
    model = Block()
    install(model)
    assert gpu.cache.compiles == 3 and gpu.calls == []  # one for each M
    gpu.capturing = True
    settings.change(strict=True)
    model.first(bf16(4, K))
    assert gpu.cache.compiles == 3 and len(gpu.calls) == 1


def tied():
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(N, K, dtype=BF16), toy_linear()
    model.head.weight = model.embedding.weight
    return model, "head"


def replaced_forward():
    module = toy_linear()
    module.forward = lambda x: x
    return module, ""


def with_weight(weight):
    module = toy_linear()
    module.weight = weight
    return module, ""


def parametrized():
    return nn.utils.parametrizations.weight_norm(toy_linear()), ""


SKIPPED = {
    "bias": (Reason.BIAS, lambda: (toy_linear(bias=True), "")),
    "subclass": (Reason.TENSOR_TYPE, lambda: (OwnLinear(K, N, bias=False, dtype=BF16), "")),
    "tied": (Reason.WEIGHT_LAYOUT, tied),
    "forward of somebody else": (Reason.TENSOR_TYPE, replaced_forward),
    "fp16": (Reason.DTYPE, lambda: (toy_linear(dtype=torch.float16), "")),
    "fp32": (Reason.DTYPE, lambda: (toy_linear(dtype=torch.float32), "")),
    "shape": (Reason.SHAPE, lambda: (toy_linear(n=N + 8), "")),
    "meta": (Reason.CAPABILITY, lambda: (toy_linear().to("meta"), "")),
    "pitched": (Reason.WEIGHT_LAYOUT, lambda: with_weight(nn.Parameter(bf16(N, K + 8)[:, :K]))),
    "misaligned": (Reason.ALIGNMENT, lambda: with_weight(nn.Parameter(bf16(N * K + 4)[4:].view(N, K)))),
    "weight is None": (Reason.TENSOR_TYPE, lambda: with_weight(None)),
    "lazy": (Reason.TENSOR_TYPE, lambda: (nn.LazyLinear(N, bias=False, dtype=BF16), "")),
    "parametrized": (Reason.TENSOR_TYPE, parametrized),
    "quantizable": (Reason.TENSOR_TYPE, lambda: (nn.modules.linear.NonDynamicallyQuantizableLinear(K, N, bias=False, dtype=BF16), "")),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_left_alone_and_why(gpu, name):
    expected, make = SKIPPED[name]
    module, path = make()
    report = install(module)
    assert report.installed == () and report.skipped[path].reason is expected, str(report)
    assert not any(map(installed, module.modules())) and gpu.cache.compiles == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bf16_has_tables(gpu, dtype):
    report = install(toy_linear(), dtype)
    assert report.installed == () and report.skipped[""].reason is Reason.DTYPE


def test_an_unknown_family_is_an_error(gpu):
    with pytest.raises(ValueError, match="no tables of family 'kimi_k4': known are toy"):
        install(toy_linear(), tables=["kimi_k4"])
    assert install(toy_linear(), tables=["toy"]).installed == ("",)
    assert install(toy_linear(), tables=[]).installed == ()


def test_on_a_machine_without_a_gpu_everything_is_left_alone():
    module = toy_linear(1536, 7168)
    report = install(module)
    assert report.skipped[""].reason is Reason.CAPABILITY and "cpu" in str(report) and not installed(module)


def test_nothing_is_installed_while_disabled(gpu):
    settings.change(disabled=True)
    assert install(toy_linear()).skipped[""].reason is Reason.DISABLED


def test_a_shared_module_is_taken_once(gpu):
    shared = toy_linear()
    model = nn.ModuleList([shared, shared])
    assert install(model).installed == ("0",)  # one owner, two names: it is not tied
    assert disable_low_latency_gemm(model) == 1 and not installed(shared)


def test_idempotent_and_undone(gpu):
    model = Block()
    keys, ids = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    first = install(model)
    assert install(model) == first and gpu.cache.compiles == 3
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == ids
    assert disable_low_latency_gemm(model) == 3 and disable_low_latency_gemm(model) == 0
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    x = bf16(2, K)
    assert same_bits(model.first(x), F.linear(x, model.first.weight)) and gpu.calls == []


def test_a_second_install_that_declines_takes_the_first_one_back(gpu):
    module = toy_linear()
    install(module)
    assert install(module, torch.float16).installed == () and not installed(module)


# ---- what a taken module does


@pytest.fixture
def module(gpu):
    made = toy_linear()
    assert install(made).installed == ("",)
    return made


@pytest.mark.parametrize("shape", [(1, K), (2, K), (4, K), (K,), (2, 2, K), (1, 1, 1, K), (4, 1, K)], ids=str)
def test_leading_dimensions_count_as_tokens(gpu, module, shape):
    x = bf16(*shape)
    y = module(x)
    assert len(gpu.calls) == 1 and y.shape == F.linear(x, module.weight).shape
    assert parity(y.reshape(-1, N), reference_gemm(x.reshape(-1, K), module.weight)).ok


@pytest.mark.parametrize(
    "x",
    [bf16(3, K), bf16(5, K), bf16(64, K), bf16(3, 2, K), bf16(2, K + 1)[:, :K], bf16(K, 2).t(), bf16(1, 2 * K)[:, 1 : K + 1]],
    ids=["M = 3", "M = 5", "M = 64", "3-D, M = 6", "odd pitch", "transposed", "misaligned"],
)
def test_what_has_no_plan_is_the_modules_own_gemm_bit_for_bit(gpu, module, x):
    assert same_bits(module(x), F.linear(x, module.weight)) and gpu.calls == []


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (0, 3, K)], ids=str)
def test_no_token_is_an_empty_result_without_a_launch(gpu, module, shape):
    x = bf16(*shape)
    assert same_bits(module(x), F.linear(x, module.weight)) and gpu.calls == []


def test_no_token_keeps_its_place_in_the_graph_of_autograd(module):
    """A linear that saw no token still has a gradient of zeros; without one, data-parallel training waits for it."""
    with torch.enable_grad():
        x = bf16(0, K)
        assert module(x).requires_grad == F.linear(x, module.weight).requires_grad


@pytest.mark.parametrize("x", [torch.zeros(2, K), bf16(2, K - 8), torch.zeros(0, K), bf16(0, 0)], ids=["fp32", "K", "fp32 empty", "K = 0"])
def test_wrong_input_is_the_same_error_as_without_us(gpu, module, x):
    with pytest.raises(RuntimeError) as ours:
        module(x)
    with pytest.raises(RuntimeError) as theirs:
        F.linear(x, module.weight)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_the_modules_own_business(module):
    x = torch.nested.nested_tensor([bf16(2, K), bf16(3, K)])
    for ours, theirs in zip(module(x).unbind(), F.linear(x, module.weight).unbind()):
        assert same_bits(ours, theirs)


def test_vmap_over_a_taken_module(module):
    x = bf16(3, 2, K)
    assert torch.allclose(torch.vmap(module)(x).float(), F.linear(x, module.weight).float(), atol=1)


@pytest.mark.parametrize(
    "weight",
    [bf16(N, K, seed=7), bf16(N + 8, K), bf16(N, K).half(), bf16(N, K + 8)[:, :K], bf16(K, N).t()],
    ids=["same", "shape", "dtype", "pitch", "transposed"],
)
def test_a_replaced_weight_is_used_as_it_is_or_falls_back(gpu, module, weight):
    module.weight = nn.Parameter(weight)
    x = bf16(2, K).to(weight.dtype)
    y = module(x)
    served = weight.dtype == BF16 and weight.shape == (N, K) and weight.is_contiguous()
    assert len(gpu.calls) == served
    assert parity(y, reference_gemm(x, weight)).ok if served else same_bits(y, F.linear(x, weight))


def test_a_weight_that_is_reloaded_in_place(gpu, module):
    module.load_state_dict({"weight": bf16(N, K, seed=8)})
    x = bf16(1, K)
    assert parity(module(x), reference_gemm(x, bf16(N, K, seed=8))).ok and len(gpu.calls) == 1


def test_a_bias_set_after_the_install(gpu, module):
    module.bias = nn.Parameter(bf16(N))
    x = bf16(2, K)
    assert same_bits(module(x), F.linear(x, module.weight, module.bias)) and gpu.calls == []


def test_a_module_that_moved_to_another_generation(gpu, module):
    gpu.devices.append(device_of(SM100))
    gpu.place(module.weight, "cuda:1")
    y = module(gpu.place(bf16(2, K), "cuda:1"))
    assert [unit.target for unit, _ in gpu.calls] in ([], ["sm_100a"]) and y.shape == (2, N)


@pytest.mark.parametrize("fields", [{"disabled": True}, {"deny": settings.parse_deny("skinny")}, {"batch_invariant": True}], ids=["disabled", "denied", "batch-invariant"])
def test_settings_are_followed_after_the_install(gpu, module, fields):
    x = bf16(2, K)
    before = settings.change(**fields)
    assert same_bits(module(x), F.linear(x, module.weight)) and gpu.calls == []
    settings.restore(before)
    module(x)
    assert len(gpu.calls) == 1


def test_a_fall_back_of_a_taken_module_is_in_the_debug_log(gpu, caplog):
    module = toy_linear()
    install(module)
    with caplog.at_level("DEBUG", "lowlat_gemm"):
        for _ in range(2):
            module(bf16(40, K))
    found = [record.message for record in caplog.records if "falls back" in record.message]
    assert len(found) == 1 and "M = 40" in found[0], found


def test_a_row_of_which_nothing_can_run_is_left_alone(gpu):
    settings.change(deny=settings.parse_deny("skinny"))
    module = toy_linear()
    report = install(module)
    assert report.installed == () and report.skipped[""].reason is Reason.DISABLED and type(module) is nn.Linear
