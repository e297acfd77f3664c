"""vLLM's linear and head methods with a plan in front. Imports vLLM: only the vLLM adapter imports this file.

A layer's method is replaced after the layer was built: vLLM picks a layer's weight loader in its constructor, by the
method's class name (vllm/model_executor/layers/linear.py, WEIGHT_LOADER_V2_SUPPORTED, 0.33.0).
"""

from __future__ import annotations

import functools

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from ..execute import log_refusal, run_or_refuse
from ..operands import Reason, Refusal
from ..torch_op import linear, linear_or_refuse, names_of, storage_of, tables_argument

#: vLLM's own low-latency methods of Kimi-K3, which its model's constructor installs: taken over by name, since
#: importing their module costs every other model's start.
_KIMI_K3 = "vllm.models.kimi_k3.nvidia.low_latency_gemm"
_KIMI_K3_METHODS = ("KimiK3LowLatencyLinearMethod", "KimiK3LowLatencyEmbeddingMethod")


class PlannedMethod:
    """Mixin in front of a vLLM method: the plan where it serves, that method's own GEMM otherwise.

    It holds no plan and no pointer: those are looked up by the weight as it is at the call.
    """

    #: The method that the layer had before; ``uninstall`` puts it back.
    lowlat_replaced = None
    #: Families to look in, as the operator takes them.
    lowlat_tables = ""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            return super().apply(layer, x, bias)
        if torch.compiler.is_compiling():
            return linear(x, layer.weight, self.lowlat_tables)
        weight = storage_of(layer.weight)
        y = linear_or_refuse(x, weight, names_of(self.lowlat_tables))
        if type(y) is not Refusal:
            return y
        log_refusal(x, weight, y)
        return super().apply(layer, x, bias)

    def apply_with_residual(self, layer: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + residual, the sum in FP32 before the one rounding. x: [M, K], residual: [M, N]; y: [M, N]."""
        if torch.compiler.is_compiling():  # nothing that vLLM compiles has such a call site
            return torch.addmm(residual, x, layer.weight.t())
        weight = storage_of(layer.weight)
        y = run_or_refuse(x, weight, residual, names_of(self.lowlat_tables))
        if type(y) is not Refusal:
            return y
        log_refusal(x, weight, y)
        return torch.addmm(residual, x, weight.t())


@functools.cache
def _planned(kind: type) -> type:
    """A vLLM method class with a plan in front; it is a subclass, for vLLM asks by isinstance."""
    return type(f"Planned{kind.__name__}", (PlannedMethod, kind), {"__module__": __name__})


def planned(method, names: tuple[str, ...] | None) -> PlannedMethod:
    """``method`` with a plan in front. Its state is taken over; its constructor, which needs vLLM's config, is not run."""
    made = object.__new__(_planned(type(method)))
    made.__dict__.update(method.__dict__)
    made.lowlat_replaced, made.lowlat_tables = method, tables_argument(names)
    return made


def original(method):
    """The method that vLLM gave the layer."""
    return method.lowlat_replaced if isinstance(method, PlannedMethod) else method


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
