"""A stand-in for the FlashInfer package, with the signatures of the real one, for tests on a CPU.

Signatures and what the calls refuse are those of flashinfer-python 0.7.4: ``inspect.signature`` of ``mm_bf16``,
``gemm.tinygemm_bf16`` and ``autotune``; checks in gemm/gemm_base.py (``_cute_dsl_mm_bf16_requirement`` and its
neighbours), gemm/routergemm.py and gemm/kernels/dense_bf16_gemm_warp_splitk.py. 0.7.0 has the same ones, but no
``batch_invariant`` and no ``tie_tolerance``.
"""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch

from lowlat_gemm.kernels import flashinfer, registry

from conformance.fakes import clear_caches

VERSION = "0.7.4"
_PDL = ("cute-dsl", "tinygemm", "tgv")


@dataclass
class FakeFlashInfer:
    """``calls``: (kernel, M, N, K, tuning buckets or None, while capturing) of every call."""

    fake_cuda: object = None
    error: Exception | None = None
    calls: list[tuple] = field(default_factory=list)
    buckets: tuple[int, ...] | None = None

    def _run(self, kernel: str, x, weight, y) -> None:
        capturing = self.fake_cuda is not None and self.fake_cuda.capturing
        self.calls.append((kernel, *x.shape, weight.shape[0], self.buckets, capturing))
        if self.error is not None:
            raise self.error
        y.copy_(x.double() @ weight.double().T)

    def mm_bf16(
        self, a, b, bias=None, pdl=False, out=None, out_dtype=torch.bfloat16, backend="cudnn", *, batch_invariant=False
    ):
        if backend not in ("cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl", "auto"):
            raise ValueError(f"unknown backend {backend}")
        if pdl and backend not in _PDL:
            raise ValueError(f"The {backend} backend does not support PDL.")
        if not a.is_contiguous() or not b.T.is_contiguous() or not out.is_contiguous():
            raise ValueError("packed operands alone")
        if backend == "cute-dsl":
            if a.shape[0] > 32 or a.shape[1] % 128:
                raise ValueError("The CuTeDSL low-M backend supports M <= 32 and K % 128 == 0")
            if any(tensor.data_ptr() % 32 for tensor in (a, b, out)):
                raise ValueError("a, b, and out must be 32-byte aligned")
        if out.shape != (a.shape[0], b.shape[1]) or out.dtype != out_dtype or a.dtype != torch.bfloat16:
            raise ValueError("Output mismatch")
        self._run(backend, a, b.T, out)
        return out

    def tinygemm_bf16(self, input, weight, out, bias=None, use_pdl=False):
        if not input.is_contiguous() or not weight.is_contiguous() or not out.is_contiguous():
            raise ValueError("input must be contiguous (row-major)")
        if weight.shape[0] % 16:
            raise ValueError(f"output_features ({weight.shape[0]}) must be a multiple of 16 (tile alignment)")
        self._run("tinygemm", input, weight, out)

    @contextlib.contextmanager
    def autotune(
        self, tune_mode=True, cache=None, tuning_buckets=None, round_up=None, skip_ops=None,
        cuda_graph_profile_replays=None, tie_tolerance=None,
    ):  # fmt: skip
        if tuning_buckets is not None and len(tuning_buckets) == 0:
            raise ValueError("tuning_buckets must contain at least one value when provided")
        before, self.buckets = self.buckets, tuple(tuning_buckets) if tune_mode else None
        yield
        self.buckets = before


@pytest.fixture
def with_flashinfer(monkeypatch):
    """FlashInfer is installed, and a recorded run has shown the backend right."""
    fake = FakeFlashInfer()
    package, gemm = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.gemm")
    package.mm_bf16, package.autotune, package.gemm = fake.mm_bf16, fake.autotune, gemm
    package.__version__, gemm.tinygemm_bf16 = VERSION, fake.tinygemm_bf16
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    monkeypatch.setattr(flashinfer, "installed_version", lambda: VERSION)
    prove(monkeypatch)
    # What keeps torch's random state, without a device that has one.
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    return fake


def prove(monkeypatch) -> None:
    """The dispatcher has the backend on every generation, as after recorded runs."""
    made = registry._FOREIGN[flashinfer.NAME]
    proven = frozenset(made.kernel_modules)
    monkeypatch.setitem(registry._FOREIGN, flashinfer.NAME, registry.replace(made, proven=proven))
    clear_caches()
