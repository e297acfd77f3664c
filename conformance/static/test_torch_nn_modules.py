"""A module that the torch.nn adapter took, beside the rest of torch: copies, hooks, autograd, autocast, the compiler."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import TOY_CONFIG, bf16, clean_settings, cuda, device_of, fake_table, same_bits, toy_linear, use_table  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import disable_low_latency_gemm, enable_low_latency_gemm
from lowlat_gemm.arch import SM90
from lowlat_gemm.reference import parity, reference_gemm

pytestmark = pytest.mark.usefixtures("clean_settings")

BF16 = torch.bfloat16


def install(module, dtype=BF16, tables=None):
    return enable_low_latency_gemm(module, dtype, tables)


@pytest.fixture
def module(gpu):
    made = toy_linear()
    assert install(made).installed == ("",)
    return made


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_works_on_its_own_weight(gpu, module, copied):
    model = nn.Sequential(module)
    twin = copied(model)
    with torch.no_grad():
        twin[0].weight.copy_(bf16(N, K, seed=5))
    x = bf16(2, K)
    assert parity(twin(x), reference_gemm(x, bf16(N, K, seed=5))).ok
    assert parity(model(x), reference_gemm(x, bf16(N, K))).ok
    # Taken or not, the copy can be taken again and given back.
    assert install(twin).installed == ("0",)
    assert disable_low_latency_gemm(twin) == 1 and disable_low_latency_gemm(model) == 1
    assert same_bits(twin(x), F.linear(x, twin[0].weight))


def test_a_replica_works_on_its_own_weight(gpu, module):
    """What nn.DataParallel makes of a module: its __dict__, with other weights."""
    replica = module._replicate_for_data_parallel()
    replica.weight, replica._parameters["bias"] = bf16(N, K, seed=5), None
    x = bf16(2, K)
    assert parity(replica(x), reference_gemm(x, bf16(N, K, seed=5))).ok


def test_the_state_dict_round_trips(module):
    fresh = toy_linear(seed=3)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.weight, module.weight)


# ---- the rest of torch


def test_hooks_still_run(gpu, module):
    seen = []
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, y: seen.append(tuple(y.shape)))
    module(bf16(2, K))
    assert seen == ["before", (2, N)] and len(gpu.calls) == 1


def test_training_falls_back_and_has_gradients(gpu, module):
    module.train()
    with torch.enable_grad():
        x = bf16(2, K).requires_grad_()
        module(x).float().sum().backward()
    assert gpu.calls == [] and x.grad is not None and module.weight.grad is not None
    expected = toy_linear()
    with torch.enable_grad():
        expected(bf16(2, K)).float().sum().backward()
    assert torch.equal(module.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_its_own_dtype(gpu, module, dtype):
    x = bf16(2, K)
    with torch.autocast("cpu", dtype=dtype):  # stands for "cuda", as everything here does
        # The pretended GPU is not what is asked; a CUDA build asks for its own device type.
        torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", dtype)
        try:
            assert module(x).dtype == dtype
        finally:
            torch.set_autocast_enabled("cuda", False), torch.set_autocast_dtype("cuda", torch.float16)


def test_torch_compile_of_a_taken_module(monkeypatch):
    use_table(monkeypatch, fake_table({2: ("skinny", TOY_CONFIG)}, n=N, k=K))
    module = nn.Sequential(toy_linear(), nn.ReLU())
    with cuda(device_of(SM90)) as fake:
        assert install(module).installed == ("0",)
    x = bf16(2, K)
    with torch.no_grad():  # outside the pretence: the compiler looks at the real device
        y = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert same_bits(y, torch.relu(F.linear(x, module[0].weight))) and fake.calls == []


def test_fx_traces_a_taken_module_as_a_plain_one(gpu, module):
    traced = torch.fx.symbolic_trace(nn.Sequential(module))
    assert gpu.calls == []
    x = bf16(2, K)
    assert torch.allclose(traced(x).float(), F.linear(x, module.weight).float(), atol=1)


def test_script_works_as_without_us(module):
    x = bf16(2, K)
    assert same_bits(torch.jit.script(nn.Sequential(module))(x), F.linear(x, module.weight))


def test_export_has_the_framework_gemm(monkeypatch):
    use_table(monkeypatch, fake_table({2: ("skinny", TOY_CONFIG)}, n=N, k=K))
    module = nn.Sequential(toy_linear())
    with cuda(device_of(SM90)) as fake:
        assert install(module).installed == ("0",)
    x = bf16(2, K)
    with torch.no_grad():
        exported = torch.export.export(module, (x,)).module()(x)
    assert same_bits(exported, F.linear(x, module[0].weight)) and fake.calls == []


def test_a_copy_takes_no_plan_along(gpu, module):
    """A plan belongs to the GPU of its process: the module holds the families to look in, and nothing else."""
    module(bf16(2, K))
    assert [name for name in copy.deepcopy(module).__dict__ if "lowlat" in name] == ["lowlat_tables"]
    disable_low_latency_gemm(module)
    assert not [name for name in module.__dict__ if "lowlat" in name]
