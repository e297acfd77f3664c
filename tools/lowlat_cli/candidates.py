"""What ``lowlat bench`` times beside the floor: our kernels and what else could compute the same GEMM.

One interface: a name, ``why_not`` (a package that is not there, a shape that is not served: one line), and ``make``,
which gives the ``Run`` to judge and to time. FlashInfer is called as the library's own backend calls it; the calls into
vLLM are those of its public interface (0.33, ``vllm/models/kimi_k3/nvidia/low_latency_gemm.py``).
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F

from lowlat_gemm.arch import Arch, arch_of_capability, device_properties
from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import COMPILE_CACHE, device_plan, launch
from lowlat_gemm.kernels import flashinfer

from .measure import Run

FLOOR, CUBLAS, OURS, LINK = "floor", "cublas", "ours", "norm alone"


class Candidate:
    """One way to compute y[M, N] = x[M, K] @ weight[N, K].T on a GPU of ``arch``, BF16."""

    name: str
    #: A wrong result of ours ends the run; a wrong one of another is listed and not timed, except where this says so.
    timed_though_wrong = False
    #: Takes long to get ready at every (N, K, M): timed only when it is named.
    slow = False

    def why_not(self, arch: Arch, n: int, k: int, m: int) -> str | None:
        """Why it cannot be asked here, or None."""
        return None

    def make(self, n: int, k: int, m: int, ordinal: int) -> Run:
        """What runs it at one (N, K, M) on CUDA device ``ordinal``, compiled or ready to compile at its first call."""
        raise NotImplementedError


class Ours(Candidate):
    """The kernel that the dispatcher's plan names."""

    name = OURS

    def why_not(self, arch, n, k, m):
        decision = explain(m, n, k)
        return None if decision.runs else str(decision.refusal)

    def make(self, n, k, m, ordinal):
        compiled = COMPILE_CACHE.get(device_plan(ordinal, n, k).entry(m, False).unit)
        return lambda x, w, y: launch(compiled, x, w, None, y)


class Cublas(Candidate):
    """torch.mm: what F.linear runs without us. It may add split sums in BF16, and is timed all the same."""

    name = CUBLAS
    timed_though_wrong = True

    def make(self, n, k, m, ordinal):
        return lambda x, w, y: torch.mm(x, w.T, out=y)


class Compiled(Candidate):
    """F.linear by torch.compile with max-autotune: the fastest of Triton's and the library's kernels by its measure.

    Without CUDA graphs of its own, which cannot be part of another one; ours hold the launches instead.
    """

    name = "torch.compile"
    slow = True

    def why_not(self, arch, n, k, m):
        return _not_installed("triton")

    def make(self, n, k, m, ordinal):
        torch.compiler.reset()  # a function has few compiled versions; beyond them it silently runs eager

        def linear(x, w):
            return F.linear(x, w)

        compiled = torch.compile(linear, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return lambda x, w, y: compiled(x, w)


class FlashInfer(Candidate):
    """One of FlashInfer's kernels, prepared and tuned as for a table cell that names it."""

    def __init__(self, kernel: str, tactic: str):
        self.name = f"flashinfer-{kernel}"
        self.config = flashinfer.FlashInferConfig(kernel, tactic)

    def why_not(self, arch, n, k, m):
        return flashinfer.unavailable(arch) or flashinfer.why_not(arch, n, k, m, self.config)

    def make(self, n, k, m, ordinal):
        arch = arch_of_capability(device_properties(ordinal).capability)
        kernel = COMPILE_CACHE.get(flashinfer.compile_unit(arch, n, k, m, self.config, ordinal=ordinal))
        return lambda x, w, y: launch(kernel, x, w, None, y)


class Vllm(Candidate):
    """What vLLM's own Kimi-K3 table names for the cell."""

    name = "vllm"

    def why_not(self, arch, n, k, m):
        return _not_installed("vllm")

    def make(self, n, k, m, ordinal):
        from vllm.models.kimi_k3.nvidia import low_latency_gemm

        if low_latency_gemm.select_kimi_k3_backend(m, n, k) is None:
            raise ValueError("not in vLLM's table")
        return lambda x, w, y: low_latency_gemm.try_low_latency_gemm(x, w)


class VllmSkinny(Candidate):
    """vLLM's CuTe DSL skinny kernel with the config of its own rule."""

    name = "vllm-skinny"

    def why_not(self, arch, n, k, m):
        return _not_installed("vllm") or (None if m <= 16 else "up to 16 tokens only")

    def make(self, n, k, m, ordinal):
        from vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm import shape_dynamic_skinny_gemm

        return lambda x, w, y: shape_dynamic_skinny_gemm(x, w)


class VllmFusedA(Candidate):
    """vLLM's ``dsv3_fused_a_gemm``; it raises for an (N, K) that is not in its list."""

    name = "vllm-fused-a"

    def why_not(self, arch, n, k, m):
        return _not_installed("vllm") or (None if m <= 16 else "up to 16 tokens only")

    def make(self, n, k, m, ordinal):
        from vllm import _custom_ops

        def run(x, w, y):
            _custom_ops.dsv3_fused_a_gemm(y, x, w.T, enable_pdl=True)
            return y

        return run


@functools.lru_cache(maxsize=None)
def _not_installed(module: str) -> str | None:
    return None if importlib.util.find_spec(module) is not None else f"{module} is not installed"


_ALL = (
    Ours(),
    Cublas(),
    Compiled(),
    FlashInfer("tinygemm", "default"),
    FlashInfer("cutile", "default"),
    FlashInfer("cute-dsl", "autotuned"),
    FlashInfer("cutlass", "autotuned"),
    FlashInfer("cublaslt", "autotuned"),
    FlashInfer("cudnn", "autotuned"),
    Vllm(),
    VllmSkinny(),
    VllmFusedA(),
)
CANDIDATES = {candidate.name: candidate for candidate in _ALL}
#: Names in the record that are no GEMM to win against: bounds and parts.
BOUNDS = (FLOOR, LINK)


def chosen(names: list[str]) -> list[Candidate]:
    """Ours, cuBLAS and ``names``, in the order above. ValueError for an unknown name.

    An empty list means all that are ready at once, "all" every one.
    """
    for name in names:
        if name not in CANDIDATES and name != "all":
            raise ValueError(f"unknown candidate {name!r}: known are all, {', '.join(CANDIDATES)}")
    if not names:
        return [one for one in _ALL if not one.slow]
    return [one for one in _ALL if "all" in names or one.name in (OURS, CUBLAS, *names)]
