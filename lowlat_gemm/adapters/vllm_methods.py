"""Which layers and methods of vLLM are plain ones. Imports vLLM: only the vLLM adapter imports this file.

A layer's method is replaced after the layer was built: vLLM picks a layer's weight loader in its constructor, by the
method's class name (vllm/model_executor/layers/linear.py, WEIGHT_LOADER_V2_SUPPORTED, 0.33.0).
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from ..operands import Reason, Refusal
from .methods import Framework, original

#: vLLM's own low-latency methods of Kimi-K3, which its model's constructor installs: taken over by name, since
#: importing their module costs every other model's start.
_KIMI_K3 = "vllm.models.kimi_k3.nvidia.low_latency_gemm"
_KIMI_K3_METHODS = ("KimiK3LowLatencyLinearMethod", "KimiK3LowLatencyEmbeddingMethod")


def is_candidate(module: torch.nn.Module) -> bool:
    """Whether the module is a linear or a language-model head of vLLM, whatever its method."""
    return isinstance(module, (LinearBase, ParallelLMHead)) and getattr(module, "quant_method", None) is not None


def method_refusal(module: torch.nn.Module) -> Refusal | None:
    """Why a candidate's method, as vLLM gave it, is left alone: None for exactly the unquantized ones."""
    method = original(module.quant_method)
    kind = type(method)
    of_kimi_k3 = kind.__module__ == _KIMI_K3 and kind.__name__ in _KIMI_K3_METHODS
    if isinstance(module, LinearBase) and (kind is UnquantizedLinearMethod or of_kimi_k3):
        gemm = method._gemm_impl
    elif isinstance(module, ParallelLMHead) and (kind is UnquantizedEmbeddingMethod or of_kimi_k3):
        gemm = dispatch_unquantized_gemm()
    else:
        return Refusal(Reason.LAYER, f"method {kind.__name__}")
    if gemm is not default_unquantized_gemm:
        return Refusal(Reason.LAYER, f"GEMM chosen by the user or the platform: {getattr(gemm, '__name__', gemm)}")
    return None


LAYERS = Framework(is_candidate, method_refusal)
