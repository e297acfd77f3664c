"""``split_k``: a tensor-core GEMM that streams the weight through TMA, with K split over a thread-block cluster.

A cluster of ``split`` CTAs owns a tile of weight rows and token columns; each rank multiplies one slice of K:

    weight tile  [rows, K slice]     producer warp, TMA, evict-first, started before the PDL wait
    token tile   [token_columns, K slice]  second producer warp, after the PDL wait
    products     wgmma, one warpgroup for 64 rows, FP32

Then each rank sends its partial sums to the rank that owns the token columns (st.async into its shared memory), which
adds them in rank order, adds the residual, rounds once and stores. K slices are cut in units of 128, the tail included,
by the split alone. So a token's bits depend on the split and on nothing else: not on M, its position, or the tile.

``prefetch`` and ``trigger`` bound how far the weight loads of two neighbouring kernels compete; a CTA that takes less
than half an SM's shared memory leaves room for one of the next kernel; ``token_stages`` makes the ring of wide token
tiles shorter, so that they do not shorten the weight's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..arch import SM90, Arch
from .compile_cache import CompileUnit
from .config import config_from

NAME = "split_k"
#: K slices are cut in this unit, whatever the stage: it decides the order of additions, so it is fixed.
K_UNIT = 128
#: K of one block of a stage: the 128-byte swizzle of 16-bit elements.
K_BLOCK = 64
#: Rows that one warpgroup multiplies.
WARPGROUP_ROWS = 64
#: Tokens of a tile. wgmma takes any multiple of 8, and a tile much wider than M is slow, for the tensor map fills its rest
#: with zeros: at M = 33 a tile of 64 took up to 1.9 times as long as at M = 64 (hw_matrix/records/sm90/h200-tune-k3-tp8.json).
_WGMMA_TOKEN_COLUMNS = tuple(range(8, 65, 8))
#: Tensor memory is allocated by powers of two.
_TENSOR_MEMORY_TOKEN_COLUMNS = (8, 16, 32, 64)
MAX_SPLIT = 8


@dataclass(frozen=True)
class SplitKConfig:
    """The public tactic (rows, token_columns, split, stages), and what Hopper adds to it.

    ``rows``: weight rows of a tile, a multiple of 8. ``token_columns``: tokens of a tile. ``split``: ranks over K.
    ``stages``: depth of the weight ring. ``k_blocks``: blocks of 64 K in a stage. ``prefetch``: weight stages requested
    before the previous kernel has finished; 0 stands for about two thirds of the ring. ``trigger``: weight loads that
    are still to be requested when the next kernel is let go. ``token_stages``: depth of the token ring; 0: as deep as the
    weight's.
    """

    rows: int
    token_columns: int
    split: int
    stages: int
    k_blocks: int = 1
    prefetch: int = 0
    trigger: int = 6
    token_stages: int = 0

    @property
    def warpgroups(self) -> int:
        return -(-self.rows // WARPGROUP_ROWS)

    @property
    def stage_k(self) -> int:
        """Elements of K in a stage."""
        return K_BLOCK * self.k_blocks

    @property
    def token_ring(self) -> int:
        """Stages of the token tiles."""
        return self.token_stages or self.stages

    @property
    def barrier_ring(self) -> int:
        """Stages that have barriers of their own: those of the longer ring."""
        return max(self.stages, self.token_ring)

    @property
    def early_stages(self) -> int:
        """Weight stages that are requested before the PDL wait is over."""
        return self.prefetch or -(-2 * self.stages // 3)

    @property
    def groups_per_rank(self) -> int:
        """Groups of 8 tokens that one rank owns, at most."""
        return -(-self.token_columns // 8 // self.split)


@dataclass(frozen=True)
class SplitKSpec:
    """What the compiled code depends on: no M, N, K, stride or pointer."""

    config: SplitKConfig
    input_dtype: str = "bfloat16"
    output_dtype: str = "bfloat16"
    residual: bool = False
    #: (point of ``HOLD_POINTS``, rank) where tests hold the warps of one rank back; None in what is served.
    hold: tuple[str, int] | None = None


#: Where one rank may be held back, in the order of the code: what goes wrong without a wait goes wrong there.
HOLD_POINTS = ("before_barriers", "weights", "tokens", "multiply", "send", "add", "store", "exit")
HOLD_NS = 3_000

#: 64-bit words behind the barriers that tensor memory takes: three barriers and its address (SM90 leaves them idle).
TENSOR_MEMORY_WORDS = 4

#: Columns of tensor memory of an SM that CTAs share: PTX ISA, tcgen05 (SM107 has 64 more for one that takes all).
TENSOR_COLUMNS_PER_SM = 512
#: Shared memory that the system takes for each CTA: CUDA C++ Programming Guide, table of compute capabilities.
CTA_RESERVED_BYTES = 1024

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def token_columns(arch: Arch) -> tuple[int, ...]:
    """The widths of a token tile on ``arch``, in tokens."""
    return _WGMMA_TOKEN_COLUMNS if arch == SM90 else _TENSOR_MEMORY_TOKEN_COLUMNS


def parse_config(values: Mapping[str, int]) -> SplitKConfig:
    """A config from a table's mapping. Raises ValueError naming missing, unknown or wrong entries."""
    optional = {"k_blocks": 1, "prefetch": 0, "trigger": 0, "token_stages": 0}  # least values
    return config_from(SplitKConfig, NAME, values, optional)


def landing_words(config: SplitKConfig) -> int:
    """32-bit words where the other ranks' partial sums land; at least what a 64-row view of the last stage overhangs."""
    landing = (config.split - 1) * config.groups_per_rank * config.warpgroups * 512
    overhang = (config.warpgroups * WARPGROUP_ROWS - config.rows) * 32
    return max(landing, overhang, 4)


def staging_pitch(config: SplitKConfig, element_bytes: int) -> int:
    """Elements between token rows of the staged output: an odd number of 16-byte words, so that banks do not clash."""
    vector = 16 // element_bytes
    return (-(-min(config.rows, WARPGROUP_ROWS) // vector) | 1) * vector


def shared_memory_bytes(config: SplitKConfig, output_dtype: str = "bfloat16", *, residual: bool = False) -> int:
    """Bytes of shared memory of a CTA: both rings, landing zone, staged output, barriers, alignment."""
    weights = config.stages * config.rows * config.stage_k * 2
    tokens = config.token_ring * config.token_columns * config.stage_k * 2
    staged_bytes = 4 if residual else _BYTES[output_dtype]
    staged = config.warpgroups * config.groups_per_rank * 8 * staging_pitch(config, staged_bytes) * staged_bytes
    # The rings begin on the 1024 bytes that the swizzle repeats in.
    return (
        _round_up(8 * (barriers(config) + TENSOR_MEMORY_WORDS))
        + _round_up(weights)
        + tokens
        + 4 * landing_words(config)
        + staged
    )


def barriers(config: SplitKConfig) -> int:
    """mbarriers of a CTA: two a stage of the longer ring, one for partial sums, one for the previous kernel."""
    return 2 * config.barrier_ring + 2


def tensor_columns(config: SplitKConfig) -> int:
    """Columns of tensor memory of a CTA: one a token and row warpgroup; allocations are powers of two from 32 on."""
    return max(32, config.warpgroups * config.token_columns)


def _round_up(size: int, unit: int = 1024) -> int:
    return -(-size // unit) * unit


def why_not(arch: Arch, n: int, k: int, m: int, config: SplitKConfig, *, residual: bool = False) -> str | None:
    """The one predicate: why this backend cannot serve (arch, N, K, M, config), or None when it can."""
    if m < 1 or n < 1 or k < 1:
        return f"M = {m}, N = {n}, K = {k}: expected positive extents"
    if k % 8:
        return f"K = {k}: expected a multiple of 8, the 16-byte pitch of a tensor map"
    problem = config_problem(arch, config, residual=residual)
    if problem is None and config.split > -(-k // K_UNIT):
        return f"split {config.split}: K = {k} has only {-(-k // K_UNIT)} units of {K_UNIT}"
    return problem


def config_problem(arch: Arch, config: SplitKConfig, *, residual: bool = False) -> str | None:
    """The part of ``why_not`` that no shape plays a role in: why the config cannot run on ``arch`` at all, or None."""
    if config.rows % 8 or not 8 <= config.rows <= 2 * WARPGROUP_ROWS:
        return f"rows {config.rows}: expected a multiple of 8, at most {2 * WARPGROUP_ROWS}"
    if config.token_columns not in token_columns(arch):
        return f"token_columns {config.token_columns}: expected one of {token_columns(arch)}"
    if not 1 <= config.split <= MAX_SPLIT:
        return f"split {config.split}: expected 1 to {MAX_SPLIT}, the ranks of a portable cluster"
    if config.k_blocks not in (1, 2):
        return f"k_blocks {config.k_blocks}: expected 1 or 2, so that slices end on stages"
    if not 2 <= config.stages <= 32 or config.token_stages not in (0, *range(2, 33)):
        return f"stages {config.stages}, token_stages {config.token_stages}: expected 2 to 32 (0: as deep as stages)"
    least, most = sorted(shared_memory_bytes(config, dtype, residual=residual) for dtype in ("bfloat16", "float32"))
    if most > arch.shared_memory_bytes:
        return f"needs {most} bytes of shared memory, {arch} has {arch.shared_memory_bytes}"
    if arch != SM90:
        return _tensor_memory_problem(arch, tensor_columns(config), least)
    return None


def _tensor_memory_problem(arch: Arch, columns: int, shared: int) -> str | None:
    """Why CTAs of ``columns`` columns and ``shared`` bytes might wait for each other's tensor memory, or None.

    A CTA whose allocation blocks while peers of its cluster wait for its sums is a deadlock. No mix of CTAs that shared
    memory admits to an SM runs out of columns when each takes no larger a share of the columns than of the memory.
    """
    per_sm = arch.shared_memory_bytes + CTA_RESERVED_BYTES
    needed = -(-columns * per_sm // TENSOR_COLUMNS_PER_SM) - CTA_RESERVED_BYTES
    if shared < needed:
        return (
            f"{shared} bytes of shared memory, at least {needed} with {columns} columns of tensor memory: more stages"
        )
    return None


def compile_unit(
    arch: Arch,
    n: int,
    k: int,
    m: int,
    config: SplitKConfig,
    *,
    residual: bool = False,
    dtype: str = "bfloat16",
    output_dtype: str | None = None,
    hold: tuple[str, int] | None = None,
) -> CompileUnit:
    """The unit of compilation that serves this config, for every M, N and K. The predicate must have agreed."""
    explicit = replace(config, prefetch=config.early_stages)
    return CompileUnit(NAME, arch.compile_target, SplitKSpec(explicit, dtype, output_dtype or dtype, residual, hold))


#: Of ``default_config``: CTAs that share an SM, units of K that a rank has at least, and rows of a tile to choose from.
DEFAULT_CTAS_PER_SM = 2
DEFAULT_UNITS_PER_RANK = 4
DEFAULT_ROWS = tuple(range(WARPGROUP_ROWS, 31, -8))


def default_config(arch: Arch, n: int, k: int, m: int, sm_count: int) -> SplitKConfig | None:
    """A sound config for a shape that no table has, on a device of ``sm_count`` SMs; None where there is none.

    Not measured. The weight streams fastest when every SM has loads in flight from the first moment to the last, so:
    as many CTAs as two an SM hold at once, in one wave; of equals the one with more rows, whose tokens are read less
    often. A rank has at least 512 of K, below which adding up costs more than it gains. The ring takes its half of the
    SM, and no more stages than a slice of K has. All M of one token tile get one split, and so the same bits.
    """
    columns = next((width for width in token_columns(arch) if width >= m), token_columns(arch)[-1])
    units = -(-k // K_UNIT)
    choices = {}
    for rows in DEFAULT_ROWS:
        for split in range(1, max(1, min(MAX_SPLIT, units // DEFAULT_UNITS_PER_RANK)) + 1):
            ctas = -(-n // rows) * split * -(-m // columns)
            if ctas <= DEFAULT_CTAS_PER_SM * sm_count:
                choices.setdefault(ctas, (rows, split))
    # More tiles than that: whole warpgroups and no split, in several waves.
    rows, split = choices[max(choices)] if choices else (WARPGROUP_ROWS, 1)
    half = (arch.shared_memory_bytes + CTA_RESERVED_BYTES) // DEFAULT_CTAS_PER_SM - CTA_RESERVED_BYTES
    deepest = max(2, min(32, -(-units // split) * K_UNIT // K_BLOCK))
    served = [
        config
        for config in (SplitKConfig(rows, columns, split, stages) for stages in range(deepest, 1, -1))
        if why_not(arch, n, k, m, config) is None
    ]
    # Where no ring that the predicate takes is small enough, tensor memory asks for more: the smallest that it takes.
    fitting = [config for config in served if shared_memory_bytes(config, "float32") <= half]
    return next(iter(fitting), served[-1] if served else None)
