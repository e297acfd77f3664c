"""``skinny``: a dot-product GEMM on CUDA cores for a few tokens, each weight read once for all of them.

A CTA owns ``outputs_per_block`` rows of the weight and streams them past all M tokens:

    K = |-- step --|-- step --| ...        one step  = block_size threads x vector_width elements
        |-- k_unroll steps --|             one chunk = the loads that a thread has in flight

Products and sums are FP32; partial sums are added over the warp, then over the warps in order, so the same config
gives the same bits on every run. A plan with several configs over M is not batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..arch import SM103, SM107, Arch
from .compile_cache import CompileUnit
from .config import config_from

NAME = "skinny"
MAX_TOKENS = 16
#: What a thread may hold without spilling, of 255: the rest is for addresses and temporaries. Checked against the
#: spills of every config x generation by conformance/crosscompile.
REGISTER_BUDGET = 208
#: What ptxas takes besides (addresses, temporaries); conformance/crosscompile holds every config to it.
REGISTER_MARGIN = 32
_REGISTERS_PER_SM = 65_536
_WARP = 32


@dataclass(frozen=True)
class SkinnyConfig:
    """Static parameters. ``static_k``: compile for this K alone (its loops are unrolled); None: for any K."""

    block_size: int
    outputs_per_block: int
    k_unroll: int
    vector_width: int
    static_k: int | None = None

    @property
    def step(self) -> int:
        """Elements of K that a CTA reads at a time."""
        return self.block_size * self.vector_width

    @property
    def chunk(self) -> int:
        """Elements of K whose weights a CTA has in flight at a time."""
        return self.step * self.k_unroll


@dataclass(frozen=True)
class SkinnySpec:
    """What the compiled code depends on, and nothing else: no N, no K but a static one, no stride, no pointer."""

    config: SkinnyConfig
    tokens: int
    input_dtype: str = "bfloat16"
    residual: bool = False


def parse_config(values: Mapping[str, int]) -> SkinnyConfig:
    """A config from a table's mapping. Raises ValueError naming missing, unknown or non-positive entries."""
    return config_from(SkinnyConfig, NAME, values, optional={"static_k": 1})


def registers(config: SkinnyConfig, tokens: int) -> int:
    """32-bit registers that a thread keeps alive in the main loop, from the shape of the loop alone."""
    words = config.vector_width // 2
    accumulators = tokens * config.outputs_per_block
    weights = config.k_unroll * config.outputs_per_block * words
    activations = config.k_unroll * tokens * words  # a chunk's x, packed: ptxas hoists its loads
    unpacked = (config.outputs_per_block + 1) * config.vector_width  # its weights, and one token
    return accumulators + weights + activations + unpacked


def shared_memory_bytes(config: SkinnyConfig, tokens: int) -> int:
    """Bytes of shared memory of a CTA: one FP32 partial sum per warp, token and output."""
    return config.block_size // _WARP * tokens * config.outputs_per_block * 4


def why_not(arch: Arch, n: int, k: int, m: int, config: SkinnyConfig, *, residual: bool = False) -> str | None:
    """The one predicate: why this backend cannot serve (arch, N, K, M, config), or None when it can."""
    if not 1 <= m <= MAX_TOKENS:
        return f"M = {m}: skinny serves 1 to {MAX_TOKENS} tokens"
    if n < 1 or k < 1:
        return f"N = {n}, K = {k}: expected positive extents"
    if config.vector_width not in (2, 4, 8):
        return f"vector_width {config.vector_width}: expected 2, 4 or 8"
    if k % 8:
        return f"K = {k}: expected a multiple of 8, so that every row starts on 16 bytes"
    if config.static_k is not None and config.static_k != k:
        return f"config is for K = {config.static_k}, not {k}"
    if k < config.step:
        return f"K = {k} is shorter than one step of {config.step} (block_size x vector_width)"
    if config.block_size % _WARP or not _WARP <= config.block_size <= 1024:
        return f"block_size {config.block_size}: expected whole warps, 32 to 1024 threads"
    if config.outputs_per_block > 64:
        return f"outputs_per_block {config.outputs_per_block}: expected at most 64"
    needed = registers(clamped(config, k), m)
    limit = min(REGISTER_BUDGET, _REGISTERS_PER_SM // config.block_size - REGISTER_MARGIN)
    if needed > limit:
        return f"needs about {needed} registers a thread at M = {m}, {limit} are there"
    shared = shared_memory_bytes(config, m)
    if shared > arch.shared_memory_bytes:
        return f"needs {shared} bytes of shared memory, {arch} has {arch.shared_memory_bytes}"
    return None


def clamped(config: SkinnyConfig, k: int) -> SkinnyConfig:
    """The config with no more unrolling than ``k`` has whole steps: what is beyond would load nothing."""
    return replace(config, k_unroll=min(config.k_unroll, k // config.step))


def with_static_k(arch: Arch, config: SkinnyConfig, k: int) -> SkinnyConfig:
    """The config compiled for K = ``k`` alone; as it is where that would spill."""
    if arch == SM103 and (config.block_size, config.k_unroll) == (64, 2):
        return config  # ptxas for SM103 spills 8 bytes of it at K = 7168 and M = 4
    steps = k // config.step
    # One chunk that is all of K is straight-line code, of which ptxas for SM107 spills 8 bytes at M = 4.
    most = max(1, steps // 2) if arch == SM107 else steps
    return replace(config, k_unroll=min(config.k_unroll, most), static_k=k)


def compile_unit(
    arch: Arch, n: int, k: int, m: int, config: SkinnyConfig, *, residual: bool = False, dtype: str = "bfloat16"
) -> CompileUnit:
    """The unit of compilation that serves this config at M tokens of ``dtype`` ("bfloat16" or "float16").

    It is the same for every N, and for every K that is static or has a whole chunk. The predicate must have agreed.
    """
    return CompileUnit(NAME, arch.compile_target, SkinnySpec(clamped(config, k), m, dtype, residual))


def default_config(arch: Arch, n: int, k: int, m: int, *, residual: bool = False) -> SkinnyConfig | None:
    """A sound config for a shape that no table has; None where the kernel cannot serve it.

    Not measured: steps that divide K where there are such, fewer outputs a block and a shorter unroll as tokens grow.
    For callers that compile a shape of their own; dispatch runs what a table names and nothing else.
    """
    outputs = min(n, 4 if m <= 4 else 3 if m <= 8 else 2)
    unroll = 4 if m == 1 else 2 if m <= 4 else 1
    widths = [width for width in (8, 4, 2) if k >= _WARP * width]
    for divides in (True, False):
        for width in widths:
            for block in (224, 128, 96, 64, 32):
                config = SkinnyConfig(block, outputs, unroll, width)
                fits = k % config.step == 0 if divides else k >= config.step
                if fits and why_not(arch, n, k, m, clamped(config, k), residual=residual) is None:
                    return clamped(config, k)
    return None
