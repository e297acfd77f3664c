"""Compiling ahead what a weight may launch, for weights that no linear module owns (slices of a packed one, say)."""

from __future__ import annotations

import logging

from .dispatch import missing_packages_refusal
from .execute import compile_ahead, device_plan
from .operands import Refusal

_LOG = logging.getLogger("lowlat_gemm")


def request_low_latency_warmup(weight) -> int:
    """Compiles or loads, now, every kernel that ``try_low_latency_gemm`` may launch for ``weight``, with and without
    residual, so that nothing compiles while a CUDA graph is captured; returns how many of them are ready.

    weight: [N, K]; its shape and CUDA device count, its values do not. 0 where the shape has no plan there. Never
    raises for a weight that cannot be served.
    """
    if weight.device.type != "cuda" or weight.dim() != 2 or missing_packages_refusal() is not None:
        return 0
    plan = device_plan(weight.device.index, *weight.shape)
    if isinstance(plan, Refusal):
        _LOG.debug("nothing to warm up for weight %s: %s", tuple(weight.shape), plan)
        return 0
    units = plan.units()
    return len(units) - len(compile_ahead(units))
