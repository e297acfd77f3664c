"""What tests against the real SGLang share. It is in the environment of //conformance:sglang; elsewhere this folder has
nothing to collect."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types

import pytest
import torch

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def stand_in_for_torchvision() -> None:
    """SGLang's image code imports it; its wheel needs CUDA's libraries. Nothing here uses it."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # asked and kept while the answer is still no
    import_utils.is_torchvision_v2_available()
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        module.__getattr__ = _placeholder
        sys.modules[name] = module


def _placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


if HAS_SGLANG and "torchvision" not in sys.modules:
    stand_in_for_torchvision()


@pytest.fixture(scope="session")
def sglang_config(tmp_path_factory):
    """SGLang's process-wide config, as its launcher publishes it, for a small model on CPU."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    runtime_context.publish(ServerArgs(model_path=str(folder), device="cpu"), role="scheduler")


LAYERS = ("replicated", "column", "merged", "row")


def made(kind: str, seed: int = 0, bias: bool = False, dtype=torch.bfloat16):
    """A linear of SGLang [N, K] with random weights."""
    from sglang.srt.layers import linear

    classes = {
        "replicated": lambda **kw: linear.ReplicatedLinear(K, N, **kw),
        "column": lambda **kw: linear.ColumnParallelLinear(K, N, **kw),
        "merged": lambda **kw: linear.MergedColumnParallelLinear(K, [N // 4, 3 * N // 4], **kw),
        "row": lambda **kw: linear.RowParallelLinear(K, N, **kw),
    }
    layer = classes[kind](bias=bias, params_dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(bf16(*layer.weight.shape, seed=seed))
    return layer
