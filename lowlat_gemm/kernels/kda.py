"""``kda``: dot products for the two narrow projections of Kimi's delta attention, a step of K a warp.

skinny-N (F_A and beta, 144 x 7168) has few rows and a long K; skinny-K (F_B, 1536 x 128) reads rows of x that are slices
of skinny-N's output, 144 elements apart. One kernel for both:

    CTA    row_warps x k_warps warps
    warp   rows_per_warp rows; of K every k_warps-th vector of 32 lanes, the whole slice of weights in registers

All weights of a CTA are requested before the PDL wait. From SM100 on BF16 and FP16 operands go into an FMA with an FP32
sum as they are (PTX ISA, fma.rn.f32.bf16); SM90 has no such instruction and converts first. A product of two such
numbers is exact in FP32, so both give the same bits. Sums are added over the lanes, then over the K warps in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arch import SM90, Arch
from .compile_cache import CompileUnit
from .config import config_from

NAME = "kda"
MAX_TOKENS = 16
#: What ptxas takes besides; conformance/crosscompile holds the configs to it.
REGISTER_MARGIN = 48
_WARP, _REGISTER_LIMIT, _REGISTERS_PER_SM = 32, 255, 65_536


@dataclass(frozen=True)
class KdaConfig:
    rows_per_warp: int
    row_warps: int
    k_warps: int
    vector_width: int

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.rows_per_warp * self.row_warps

    @property
    def threads(self) -> int:
        return _WARP * self.row_warps * self.k_warps

    @property
    def step(self) -> int:
        """Elements of K that the K warps read at a time."""
        return _WARP * self.k_warps * self.vector_width


@dataclass(frozen=True)
class KdaSpec:
    """What the compiled code depends on: ``steps`` is K / ``config.step``; no N, stride or pointer."""

    config: KdaConfig
    tokens: int
    steps: int
    mixed_fma: bool
    input_dtype: str = "bfloat16"
    residual: bool = False


def parse_config(values: Mapping[str, int]) -> KdaConfig:
    """A config from a table's mapping. Raises ValueError naming missing, unknown or non-positive entries."""
    return config_from(KdaConfig, NAME, values, optional={})


def skinny_n_config(outputs: int) -> KdaConfig:
    """For few rows and K a multiple of 3584: a CTA of 14 warps has ``outputs`` rows."""
    return KdaConfig(outputs, 1, 14, 8)


def skinny_k_config(outputs: int) -> KdaConfig:
    """For K = 128: a CTA has ``outputs`` rows, a warp each."""
    return KdaConfig(1, outputs, 1, 4)


def registers(config: KdaConfig, tokens: int, steps: int) -> int:
    """32-bit registers that a thread keeps alive: sums, weights, and the words of a few tokens that are under way."""
    words = steps * config.vector_width // 2
    return tokens * config.rows_per_warp + words * (config.rows_per_warp + 2) + 2 * config.vector_width


def shared_memory_bytes(config: KdaConfig, tokens: int) -> int:
    """Bytes of shared memory of a CTA: one FP32 partial sum a K warp, token and row; none with one K warp."""
    return 0 if config.k_warps == 1 else 4 * config.k_warps * tokens * config.rows


def why_not(arch: Arch, n: int, k: int, m: int, config: KdaConfig, *, residual: bool = False) -> str | None:
    """The one predicate: why this kernel cannot serve (arch, N, K, M, config), or None when it can."""
    if not 1 <= m <= MAX_TOKENS:
        return f"M = {m}: kda serves 1 to {MAX_TOKENS} tokens"
    if residual:
        return "kda adds no residual"
    if config.vector_width not in (2, 4, 8):
        return f"vector_width {config.vector_width}: expected 2, 4 or 8"
    if min(config.rows_per_warp, config.row_warps, config.k_warps) < 1 or config.threads > 1024:
        return f"{config}: expected 1 to 32 warps with rows"
    if n < 1 or k < 1 or k % config.step:
        return f"N = {n}, K = {k}: expected a positive N and K a multiple of {config.step}"
    needed = registers(config, m, k // config.step) + REGISTER_MARGIN
    limit = min(_REGISTER_LIMIT, _REGISTERS_PER_SM // config.threads)
    if needed > limit:
        return f"needs about {needed} registers a thread, {limit} are there"
    shared = shared_memory_bytes(config, m)
    if shared > arch.shared_memory_bytes:
        return f"needs {shared} bytes of shared memory, {arch} has {arch.shared_memory_bytes}"
    return None


def compile_unit(arch: Arch, n: int, k: int, m: int, config: KdaConfig, *, dtype: str = "bfloat16") -> CompileUnit:
    """The unit of compilation that serves this config at ``m`` tokens of ``dtype``. The predicate must have agreed."""
    return CompileUnit(NAME, arch.compile_target, KdaSpec(config, m, k // config.step, arch != SM90, dtype))
