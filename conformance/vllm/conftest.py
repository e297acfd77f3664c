"""What tests against the real vLLM share: its config and process groups on CPU, layers of every kind, a fake GPU.

vLLM is in an environment of its own (//conformance:vllm); elsewhere this folder has nothing to collect.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

#: The M that the toy table serves.
SERVED = (1, 2, 4)


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory):
    """A current vLLM config on CPU with process groups of one."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        rendezvous = tmp_path_factory.mktemp("groups") / "file"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1)
        yield config


def layer_classes():
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return {
        "replicated": lambda **kw: linear.ReplicatedLinear(K, N, **kw),
        "column": lambda **kw: linear.ColumnParallelLinear(K, N, **kw),
        "merged": lambda **kw: linear.MergedColumnParallelLinear(K, [N // 4, 3 * N // 4], **kw),
        "qkv": lambda **kw: linear.QKVParallelLinear(K, N // 4, 2, 1, **kw),
        "row": lambda **kw: linear.RowParallelLinear(K, N, **kw),
        "head": lambda **kw: ParallelLMHead(N, K, **kw),
    }


LAYERS = ("replicated", "column", "merged", "qkv", "row", "head")


def made(kind: str, seed: int = 0, dtype=torch.bfloat16, **options):
    """A vLLM layer [N, K] with random weights."""
    layer = layer_classes()[kind](bias=options.pop("bias", False), params_dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(bf16(*layer.weight.shape, seed=seed))
    return layer


def run(layer, x):
    """What vLLM's models get from the layer."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(layer, ParallelLMHead):  # as LogitsProcessor does
        return layer.quant_method.apply(layer, x)
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y
