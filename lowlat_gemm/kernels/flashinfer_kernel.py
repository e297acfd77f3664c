"""Calling FlashInfer's GEMMs, and getting them ready before anything is captured. Needs torch and flashinfer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from .compile_cache import CompileUnit
from .flashinfer import PDL_KERNELS, FlashInferConfig


def call_of(config: FlashInferConfig) -> Callable:
    """``call(x, weight, y)``: y[M, N] = x[M, K] @ weight[N, K].T on torch's current stream, all packed BF16."""
    if config.kernel == "tinygemm":
        # mm_bf16's backend of this name is the reference kernel alone; this one has faster ones for some shapes.
        from flashinfer.gemm import tinygemm_bf16

        return lambda x, weight, y: tinygemm_bf16(x, weight, y, use_pdl=True)
    from flashinfer import mm_bf16

    options = {"pdl": config.kernel in PDL_KERNELS, "backend": config.kernel}
    return lambda x, weight, y: mm_bf16(x, weight.T, out=y, **options)


def prepare(unit: CompileUnit) -> Callable:
    """Builds, and tunes where its config asks for it, what FlashInfer launches for ``unit``; returns it as a kernel.

    That takes a weight's size of device memory and no capture; torch's random state is as before. Raises what
    FlashInfer raises, RuntimeError in a capture. The kernel is called as any other: (x, weight, residual, y, stream),
    with no residual, on torch's current stream.
    """
    spec = unit.spec
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("FlashInfer cannot build and tune a kernel while a CUDA graph is captured")
    ordinal = torch.cuda.current_device() if spec.ordinal is None else spec.ordinal
    call = call_of(spec.config)
    # FlashInfer tunes at powers of two, and looks a token count up at the next one.
    rows = 1 << (spec.tokens - 1).bit_length() if spec.config.tactic == "autotuned" else spec.tokens
    with torch.cuda.device(ordinal), torch.random.fork_rng(devices=[ordinal]), torch.inference_mode():
        x, weight, y = (
            torch.empty(shape, dtype=torch.bfloat16, device=f"cuda:{ordinal}").uniform_(-1, 1)
            for shape in ((rows, spec.k), (spec.n, spec.k), (rows, spec.n))
        )
        with _tuning(spec.config, rows):
            call(x, weight, y)
        call(x[: spec.tokens], weight, y[: spec.tokens])  # what this very M launches, from what was chosen
        torch.cuda.synchronize(ordinal)

    def kernel(x, weight, residual, y, stream) -> None:
        call(x, weight, y)

    return kernel


def _tuning(config: FlashInferConfig, rows: int) -> contextlib.AbstractContextManager:
    if config.tactic != "autotuned":
        return contextlib.nullcontext()
    from flashinfer import autotune

    # Its own choice would be all powers of two up to this one: 173 s for six of them at 4608 x 8192 on a B200
    # (github.com/flashinfer-ai/flashinfer/pull/5231).
    return autotune(True, tuning_buckets=(rows,))
