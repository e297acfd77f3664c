"""``fused_a``: a tensor-core GEMM that streams the weight from global memory into registers, for few tokens or a short K.

mma.sync m16n8k16. K is permuted alike for both operands, so that a lane's 16 bytes of a row are its operand words of two
products: nothing is staged in shared memory on the way in. Rows are permuted so that a lane ends with neighbouring outputs
of two tokens: 2 * row_tiles of each at up to 8 tokens, twice as many at more, where the product is taken the other way
round, 16 tokens by 8 rows.

    CTA    row_warps x k_warps warps, 8 or 16 tokens
    warp   16 * row_tiles rows; of K every k_warps-th block of 32; ``unroll`` blocks of weights in flight
    last   one K warp stores its sums itself; those of several are added in their order through shared memory

The first blocks of weights are requested before the PDL wait. Bits depend on ``k_warps`` alone: a warp adds its blocks in
their order however many are in flight, a token is a column of its own, and padding columns repeat the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arch import Arch
from .compile_cache import CompileUnit
from .config import config_from

NAME = "fused_a"
#: Groups of 8 tokens that one CTA multiplies at most; more tokens are more CTAs.
MAX_TOKEN_GROUPS = 2
#: K of a block: two products of 16, from 16 bytes a lane.
K_BLOCK = 32
ROW_TILE = 16
TOKEN_GROUP = 8
#: FP32 words between the partial sums of two tokens beyond their rows, for other banks of shared memory.
PARTIAL_PAD = 4
#: When the next kernel's CTAs may become resident: at once, when this one's first weights are requested, or when the
#: previous kernel has finished. The earlier, the more launches overlap; the later, the fewer CTAs wait beside those that
#: work. On the H200 each of them wins somewhere at K = 128.
AT_ONCE, WEIGHTS_REQUESTED, PREVIOUS_FINISHED = TRIGGERS = (0, 1, 2)
_WARP = 32
_REGISTER_LIMIT = 255
#: What ptxas takes besides before it spills; conformance/crosscompile shows that what the predicate takes does not.
REGISTER_MARGIN = 48


@dataclass(frozen=True)
class FusedAConfig:
    """All zero: chosen by the shape (the public tables name the backend and no config). ``trigger``: one of TRIGGERS."""

    row_warps: int = 0
    k_warps: int = 0
    row_tiles: int = 0
    unroll: int = 0
    trigger: int = AT_ONCE

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.row_warps * self.row_tiles * ROW_TILE

    @property
    def threads(self) -> int:
        return self.row_warps * self.k_warps * _WARP


@dataclass(frozen=True)
class FusedASpec:
    """What the compiled code depends on: no M but its groups of 8 tokens, no N, stride or pointer.

    ``whole_k``: every warp has ``unroll`` blocks and no more. Such code has no loop, and serves one K.
    """

    config: FusedAConfig
    token_groups: int
    whole_k: bool = False
    input_dtype: str = "bfloat16"
    residual: bool = False


def parse_config(values: Mapping[str, int]) -> FusedAConfig:
    """A config from a table's mapping: empty, or all entries but ``trigger``, which may be missing. Raises ValueError
    naming what is wrong."""
    return config_from(FusedAConfig, NAME, values, optional={"trigger": AT_ONCE}) if values else FusedAConfig()


def resolved(config: FusedAConfig, k: int) -> FusedAConfig:
    """The config itself, or the one for ``k`` when it is left to the shape: a warp has four blocks at least."""
    if config.row_warps:
        return config
    blocks = k // K_BLOCK
    k_warps = next((warps for warps in (8, 4, 2) if blocks >= 4 * warps), 1)
    return FusedAConfig(row_warps=max(1, 4 // k_warps), k_warps=k_warps, row_tiles=1, unroll=min(4, max(1, blocks // k_warps)))


def token_groups(m: int) -> int:
    """Groups of 8 tokens of a CTA in the code for ``m`` tokens."""
    return min(-(-m // TOKEN_GROUP), MAX_TOKEN_GROUPS)


def registers(config: FusedAConfig, token_groups: int) -> int:
    """32-bit registers that a thread keeps alive in the main loop, from the shape of the loop alone."""
    accumulators = config.row_tiles * token_groups * 4
    weights = config.unroll * config.row_tiles * 2 * 4
    activations = config.unroll * token_groups * 4
    addresses = 2 * (2 * config.row_tiles + token_groups)
    return accumulators + weights + activations + addresses


def register_limit(config: FusedAConfig) -> int:
    """Registers that a thread of a CTA can have: the instruction set's limit, or the register file's."""
    return min(_REGISTER_LIMIT, 65_536 // config.threads)


def shared_memory_bytes(config: FusedAConfig, token_groups: int) -> int:
    """Bytes of shared memory of a CTA: the FP32 partial sums of every K warp, where there are several."""
    return config.k_warps * (config.rows + PARTIAL_PAD) * token_groups * TOKEN_GROUP * 4 if config.k_warps > 1 else 0


def why_not(arch: Arch, n: int, k: int, m: int, config: FusedAConfig, *, residual: bool = False) -> str | None:
    """The one predicate: why this backend cannot serve (arch, N, K, M, config), or None when it can."""
    if m < 1:
        return f"M = {m}: expected at least one token"
    if n < 1 or k < K_BLOCK or k % K_BLOCK:
        return f"N = {n}, K = {k}: expected a positive N and K a multiple of {K_BLOCK}"
    config = resolved(config, k)
    if config.k_warps * config.unroll > k // K_BLOCK:
        return f"k_warps {config.k_warps} x unroll {config.unroll}: K = {k} has {k // K_BLOCK} blocks of {K_BLOCK}"
    if config.trigger not in TRIGGERS:
        return f"trigger {config.trigger}: expected one of {TRIGGERS}"
    if config.threads > 1024:
        return f"row_warps {config.row_warps} x k_warps {config.k_warps}: more than 1024 threads"
    groups = token_groups(m)
    needed, limit = registers(config, groups) + REGISTER_MARGIN, register_limit(config)
    if needed > limit:
        return f"needs about {needed} registers a thread, {limit} are there"
    shared = shared_memory_bytes(config, groups)
    if shared > arch.shared_memory_bytes:
        return f"needs {shared} bytes of shared memory, {arch} has {arch.shared_memory_bytes}"
    return None


def compile_unit(
    arch: Arch, n: int, k: int, m: int, config: FusedAConfig, *, residual: bool = False, dtype: str = "bfloat16"
) -> CompileUnit:
    """The unit of compilation that serves this config at up to 8 tokens, or at more. The predicate must have agreed."""
    config = resolved(config, k)
    spec = FusedASpec(config, token_groups(m), config.k_warps * config.unroll * K_BLOCK == k, dtype, residual)
    return CompileUnit(NAME, arch.compile_target, spec)
