"""Low-latency decode GEMMs: y[M, N] = x[M, K] @ weight[N, K].T (+ residual[M, N]), BF16, 1 to 64 tokens.

Names are resolved on first use: importing the package imports neither torch nor cutlass.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "Arch": "arch",
    "ARCHES": "arch",
    "parse_arch": "arch",
    "Decision": "dispatch",
    "explain": "dispatch",
    "plan_for": "dispatch",
    "select_kimi_k3_backend": "dispatch",
    "try_low_latency_gemm": "execute",
    "Projection": "projection",
    "PreparedProjection": "prepared_projection",
    "compile_projection": "prepared_projection",
    "matrix_view": "tensor_map",
    "weight_map": "tensor_map",
    "request_low_latency_warmup": "warmup",
    "stale_weights": "captures",
    "forget_captures": "captures",
    "run_kda_projection_overlap": "kda_overlap",
    "autotune_kda_qkvg": "kda_overlap",
    "kda_overlap_limit": "kda_overlap",
    "enable_kimi_k3_low_latency_gemm": "adapters.vllm_kimi_k3",
    "enable_low_latency_gemm": "adapters.torch_nn",
    "disable_low_latency_gemm": "adapters.torch_nn",
    "Reason": "operands",
    "Refusal": "operands",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str):
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
