"""``flashinfer``: BF16 GEMMs of the FlashInfer package, an optional dependency (flashinfer-python, Apache-2.0).

What it serves, and from which version on, read from the sources of its 0.7.0 and 0.7.4 (``mm_bf16`` in
flashinfer/gemm/gemm_base.py, ``tinygemm_bf16`` in gemm/routergemm.py, the low-M kernels in gemm/kernels/):

    kernel     generations      what it asks for
    cute-dsl   SM100/103/107    M <= 32, K % 128 == 0, operands 32-byte aligned; of its three kernels warp split-K runs
                                where N % 16 == 0 and K has at most 64 tiles of 128, or of 256 where they divide it
    tinygemm   all              N % 16 == 0, K % 64 == 0
    cutile     all              nothing
    cutlass    SM100/103/107    N % 8 == 0, K % 8 == 0
    cublaslt, cudnn  all        nothing

All of them take packed rows alone. SM107 is in none of 0.7.0's lists but those of tinygemm and cutlass, and in all of
0.7.4's. FlashInfer builds a kernel, and tunes it, at a call: ``flashinfer_kernel.py`` makes those calls beforehand.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..arch import SM90, SM100, SM103, SM107, Arch
from ..backends import CONFIG_KEYS
from ..operands import Reason, Refusal
from .compile_cache import CompileUnit

NAME = "flashinfer"
_DISTRIBUTION = "flashinfer-python"
_WORDS = CONFIG_KEYS[NAME].words

#: The least version whose kernels are those of the table above, by generation.
MINIMUM_VERSIONS: Mapping[Arch, tuple[int, int, int]] = {
    SM90: (0, 7, 0),
    SM100: (0, 7, 0),
    SM103: (0, 7, 0),
    SM107: (0, 7, 4),
}
#: Its lists of compute capabilities; what is not here serves every generation.
_BLACKWELL_ALONE = ("cute-dsl", "cutlass")
#: Kernels whose tactic FlashInfer's autotuner chooses; cutile searches by itself at the first call of a shape.
_AUTOTUNED = ("cute-dsl", "cutlass", "cublaslt", "cudnn")
#: Kernels that start before the one in front of them has ended.
PDL_KERNELS = ("cute-dsl", "tinygemm")
#: What N and K are multiples of.
_MULTIPLES = {"cute-dsl": (1, 128), "tinygemm": (16, 64), "cutlass": (8, 8)}
#: The most tokens that its low-M kernels serve.
CUTE_DSL_MAX_TOKENS = 32
_ALIGNMENT_BYTES = {"cute-dsl": 32}
_WARP_SPLIT_K_TILES, _WARP_SPLIT_K_MAX_TILES = (128, 256), 64


@dataclass(frozen=True)
class FlashInferConfig:
    """``kernel``: what FlashInfer calls its backend. ``tactic``: its rule's choice ("default") or its autotuner's."""

    kernel: str
    tactic: str = "default"


@dataclass(frozen=True)
class FlashInferSpec:
    """What is prepared: FlashInfer's kernels depend on N and K, its tactics on M, and both on the device.

    ``ordinal``: the CUDA device; None for the current one at the time of preparation.
    """

    config: FlashInferConfig
    n: int
    k: int
    tokens: int
    ordinal: int | None = None


def parse_config(values: Mapping[str, str]) -> FlashInferConfig:
    """A config from a table's mapping. Raises ValueError naming what is wrong."""
    if set(values) != set(_WORDS):
        raise ValueError(f"flashinfer config {dict(values)}: expected {', '.join(_WORDS)}")
    for key, known in _WORDS.items():
        if values[key] not in known:
            raise ValueError(f"flashinfer config {dict(values)}: expected {key} in {', '.join(known)}")
    return FlashInferConfig(**values)


@functools.lru_cache(maxsize=None)
def installed_version() -> str | None:
    """The package's version, "unknown" where it has no metadata, None where it is not installed. Imports nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def unavailable(arch: Arch) -> str | None:
    """Why the package here cannot serve ``arch`` at all: it is missing, or too old; None when it can."""
    found, needed = installed_version(), MINIMUM_VERSIONS[arch]
    wanted = f"{_DISTRIBUTION} >= {'.'.join(map(str, needed))}"
    if found is None:
        return f"flashinfer is not installed: {arch} needs {wanted}"
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    if match is None or tuple(int(part or 0) for part in match.groups()) < needed:
        return f"flashinfer {found} is too old: {arch} needs {wanted}"
    return None


def kernels_on(arch: Arch) -> tuple[str, ...]:
    """Names of FlashInfer's kernels that serve a generation."""
    return tuple(kernel for kernel in _WORDS["kernel"] if arch != SM90 or kernel not in _BLACKWELL_ALONE)


def warp_split_k_serves(n: int, k: int) -> bool:
    """Whether FlashInfer's warp split-K, one of the kernels behind ``cute-dsl``, is among those that serve (N, K)."""
    return n % 16 == 0 and any(k % tile == 0 and k // tile <= _WARP_SPLIT_K_MAX_TILES for tile in _WARP_SPLIT_K_TILES)


def why_not(arch: Arch, n: int, k: int, m: int, config: FlashInferConfig, *, residual: bool = False) -> str | None:
    """The one predicate: why FlashInfer cannot serve (arch, N, K, M, config) in BF16, or None when it can.

    Whether it is installed is ``unavailable``'s question, which rows it takes ``layout_refusal``'s.
    """
    kernel = config.kernel
    if kernel not in kernels_on(arch):
        return f"flashinfer's {kernel} does not serve {arch}; {', '.join(kernels_on(arch))} do"
    if config.tactic == "autotuned" and kernel not in _AUTOTUNED:
        return f"flashinfer's {kernel} has no tactics to tune; {', '.join(_AUTOTUNED)} have"
    if residual:
        return "flashinfer adds no residual"
    if m < 1 or (kernel == "cute-dsl" and m > CUTE_DSL_MAX_TOKENS):
        most = CUTE_DSL_MAX_TOKENS if kernel == "cute-dsl" else "any number of"
        return f"M = {m}: flashinfer's {kernel} serves 1 to {most} tokens"
    n_multiple, k_multiple = _MULTIPLES.get(kernel, (1, 1))
    if n < 1 or k < 1 or n % n_multiple or k % k_multiple:
        needed = f"N in multiples of {n_multiple}, K in multiples of {k_multiple}"
        return f"N = {n}, K = {k}: flashinfer's {kernel} needs {needed}"
    return None


def layout_refusal(config: FlashInferConfig, x, weight) -> Refusal | None:
    """Why FlashInfer does not take these operands, which have passed ``check_operands``, or None."""
    if x.shape[0] > 1 and x.stride(0) != x.shape[1]:
        return Refusal(Reason.ROW_STRIDE, f"flashinfer takes packed rows alone; x has row stride {x.stride(0)}")
    alignment = _ALIGNMENT_BYTES.get(config.kernel, 1)
    for name, operand in (("x", x), ("weight", weight)):
        if past := operand.data_ptr() % alignment:
            found = f"{name} starts {past} bytes past a boundary of {alignment}"
            return Refusal(Reason.ALIGNMENT, f"{found}, which flashinfer's {config.kernel} needs")
    return None


def compile_unit(
    arch: Arch, n: int, k: int, m: int, config: FlashInferConfig, *, residual: bool = False, ordinal: int | None = None
) -> CompileUnit:
    """What must be prepared for this cell on CUDA device ``ordinal``. The predicate must have agreed."""
    return CompileUnit(NAME, arch.compile_target, FlashInferSpec(config, n, k, m, ordinal))
