"""What may serve a local (N, K): every config that a kernel's own predicate takes, as hashable candidates.

A candidate is enumerated at one token count of a *token class*: up to 8, 16, 32 or 64 tokens, the widths of a token
tile. Inside a class one compiled kernel serves every M of ``split_k`` and of ``fused_a``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowlat_gemm.arch import Arch
from lowlat_gemm.kernels import fused_a, skinny, split_k
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.fused_a import FusedAConfig
from lowlat_gemm.kernels.registry import every_backend
from lowlat_gemm.kernels.skinny import SkinnyConfig
from lowlat_gemm.kernels.split_k import SplitKConfig, shared_memory_bytes

#: Shared memory of an SM of the generations served so far, and what the system takes of it for each CTA.
_SM_SHARED_BYTES, _CTA_RESERVED_BYTES = 228 * 1024, 1024
#: A CTA may take so much and still leave room for one of the next kernel: the launches of a chain overlap.
HALF_AN_SM = _SM_SHARED_BYTES // 2 - _CTA_RESERVED_BYTES
#: Tokens up to which dot products on CUDA cores are worth a try; beyond, it is assumed that tensor cores win.
SKINNY_TOKENS = 4
#: Loads that are still to be requested when the next kernel is let go, by blocks of 64 K in a load: those that won more
#: than a cell or two of the 475 in hw_matrix/records/sm90/h200-tune-k3-tp8-tp4.json, and 12.
TRIGGERS = {1: (2, 4, 6, 8, 10, 12), 2: (4, 5, 6, 10)}
ROWS = range(16, 2 * split_k.WARPGROUP_ROWS + 1, 8)
SPLITS = range(1, split_k.MAX_SPLIT + 1)
#: Blocks in flight of a ``fused_a`` warp beyond which its registers end.
MAX_UNROLL = 16
#: Depths of the token ring, the first for a start: as deep as the weight's (0), or of its own where token tiles are as
#: large as the weight's.
NARROW_TOKEN_STAGES, WIDE_TOKEN_STAGES = (0,), (5, 4, 6, 0)
#: Widths of token tiles at which candidates are enumerated and screened; the widths between take theirs from the next.
SCREENED_COLUMNS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """A backend and its config; equal candidates are one entry of a journal, a table and a compile."""

    backend: str
    config: Any

    def mapping(self) -> dict[str, int]:
        """The config as a table cell has it: entries that are zero or None are left out."""
        return {key: value for key, value in asdict(self.config).items() if value}

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "config": asdict(self.config)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Candidate":
        """ValueError, from the backend's own reader, for a config that it does not have."""
        name, given = value["backend"], value["config"]
        if not any(given.values()):  # left to the shape, which a table writes as nothing
            given = {}
        return cls(name, every_backend()[name].parse_config(given))

    def why_not(self, arch: Arch, n: int, k: int, m: int, residual: bool = False) -> str | None:
        return every_backend()[self.backend].why_not(arch, n, k, m, self.config, residual=residual)

    def unit(self, arch: Arch, n: int, k: int, m: int, residual: bool = False) -> CompileUnit:
        return every_backend()[self.backend].compile_unit(arch, n, k, m, self.config, residual=residual)

    def narrowed(self, columns: int) -> "Candidate":
        """The same with a token tile of ``columns``, for a backend that has token tiles of a width."""
        return replace(self, config=replace(self.config, token_columns=columns)) if self.backend == split_k.NAME else self

    @property
    def invariance(self):
        """What a token's bits depend on; None: on M. See ``registry.Backend``."""
        return every_backend()[self.backend].invariance(self.config)

    def __str__(self) -> str:
        return f"{self.backend} {'.'.join('-' if v is None else str(v) for v in asdict(self.config).values())}"


@dataclass(frozen=True)
class TokenClass:
    """Token counts that one width of token tile serves. Candidates are screened at ``screened``, the largest of them."""

    columns: int
    tokens: tuple[int, ...]

    @property
    def screened(self) -> int:
        return self.tokens[-1]


def token_classes(tokens: Iterable[int], widths: Sequence[int]) -> list[TokenClass]:
    """``tokens`` by the least of ``widths`` that holds them. ValueError for a count above the widest."""
    wanted = sorted(set(tokens))
    if wanted and not 1 <= wanted[0] <= wanted[-1] <= widths[-1]:
        raise ValueError(f"token counts {wanted}: a table has 1 to {widths[-1]}")
    lows = (0, *widths)
    classes = [TokenClass(high, tuple(m for m in wanted if low < m <= high)) for low, high in zip(lows, widths)]
    return [one for one in classes if one.tokens]


def screened_width(columns: int) -> int:
    """The width at which candidates for a token tile of ``columns`` are screened."""
    return next(width for width in SCREENED_COLUMNS if columns <= width)


def with_class_starts(tokens: Iterable[int], widths: Sequence[int]) -> list[int]:
    """``tokens`` and the first count of each class that they leave open below: 16, 24 gives 16, 17, 24.

    A count between two measured ones is served by the config of the upper one, which ends where its class begins.
    """
    wanted = sorted(set(tokens))
    lows = dict(zip(widths, (0, *widths)))
    starts = {lows[one.columns] + 1 for one in token_classes(wanted, widths) if lows[one.columns] >= wanted[0]}
    return sorted({*wanted, *starts})


def token_stages(columns: int) -> tuple[int, ...]:
    """Depths of the token ring that are tried for a width of token tile."""
    return NARROW_TOKEN_STAGES if columns <= 32 else WIDE_TOKEN_STAGES


def tilings(arch: Arch, n: int, k: int, m: int) -> list[Candidate]:
    """Every ``split_k`` tiling for M = ``m``: rows, split and blocks a stage, with the deepest ring that lets two CTAs
    share an SM. What else there is to choose is ``variants``."""
    columns = screened_width(m)
    found = []
    for rows, split, k_blocks in itertools.product(ROWS, SPLITS, (1, 2)):
        start = SplitKConfig(rows, columns, split, 3, k_blocks=k_blocks, token_stages=token_stages(columns)[0])
        config = deepest_ring(start, k)
        if config is not None and split_k.why_not(arch, n, k, m, config) is None:
            found.append(Candidate(split_k.NAME, config))
    return found


def tiling_of(candidate: Candidate) -> object:
    """What two variants of one tiling share; the candidate itself where a backend has no variants."""
    return (candidate.config.rows, candidate.config.split) if candidate.backend == split_k.NAME else candidate


def deepest_ring(config: SplitKConfig, k: int) -> SplitKConfig | None:
    """The config with as many stages as half an SM holds, and no more than a rank has loads, three at least; None where
    three are too many."""
    most = _most_stages(replace(config, stages=2))
    units = -(-(-(-k // split_k.K_UNIT)) // config.split)
    loads = -(-units * split_k.K_UNIT // config.stage_k)
    return None if most < 3 else replace(config, stages=max(3, min(most, loads)))


@functools.lru_cache(maxsize=None)
def _most_stages(config: SplitKConfig) -> int:
    fits = (stages for stages in range(32, 2, -1) if shared_memory_bytes(replace(config, stages=stages)) <= HALF_AN_SM)
    return next(fits, 0)


def variants(candidate: Candidate, k: int) -> list[Candidate]:
    """What a tiling leaves open: when the next kernel is let go, and in ``split_k`` how much is requested before the
    previous one has finished, a ring that is one stage shorter, stages of one block or two, and the depth of the token
    ring."""
    config = candidate.config
    if candidate.backend == fused_a.NAME:
        return [replace(candidate, config=replace(config, trigger=trigger)) for trigger in fused_a.TRIGGERS]
    if candidate.backend != split_k.NAME:
        return [candidate]
    found = [replace(config, trigger=trigger) for trigger in TRIGGERS[config.k_blocks]]
    for prefetch in (-(-config.stages // 2), config.stages):
        found += [replace(config, prefetch=prefetch, trigger=trigger) for trigger in (6, 10)]
    if config.stages > 3:
        found.append(replace(config, stages=config.stages - 1))
    others = [replace(config, k_blocks=3 - config.k_blocks)]
    others += [replace(config, token_stages=depth) for depth in token_stages(config.token_columns)]
    for other in filter(None, (deepest_ring(one, k) for one in others)):
        found += [other, replace(other, trigger=10)]
    return [Candidate(split_k.NAME, one) for one in dict.fromkeys(found)]


def fused_a_candidates(arch: Arch, n: int, k: int, m: int) -> list[Candidate]:
    """Every ``fused_a`` tiling that its predicate takes at M = ``m``, and the one that it chooses by the shape, with one
    trigger; the others are ``variants``."""
    configs = [fused_a.resolved(FusedAConfig(), k)]
    for row_warps, k_warps, row_tiles in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4)):
        # A warp's whole share of K in flight at once: every weight is requested before the PDL wait.
        whole = k // fused_a.K_BLOCK // k_warps
        unrolls = sorted({1, 2, 4, 8, *([whole] if 1 <= whole <= MAX_UNROLL else [])})
        configs += [FusedAConfig(row_warps, k_warps, row_tiles, unroll) for unroll in unrolls]
    configs = [replace(one, trigger=fused_a.WEIGHTS_REQUESTED) for one in configs]
    return [
        Candidate(fused_a.NAME, one)
        for one in dict.fromkeys(configs)
        if fused_a.why_not(arch, n, k, m, one) is None
    ]


def skinny_candidates(arch: Arch, n: int, k: int, m: int, known: Iterable[Candidate] = ()) -> list[Candidate]:
    """``skinny`` around its own default and around the ``known`` configs of tables, one parameter at a time."""
    start = skinny.default_config(arch, n, k, m) if m <= SKINNY_TOKENS else None
    centres = [one.config for one in known if one.backend == skinny.NAME] if m <= SKINNY_TOKENS else []
    found = list(centres)
    for centre in [*([] if start is None else [start]), *centres[:1]]:
        found += [centre, *_skinny_neighbours(centre, k)]
    return [
        Candidate(skinny.NAME, one) for one in dict.fromkeys(found) if skinny.why_not(arch, n, k, m, one) is None
    ]


def _skinny_neighbours(centre: SkinnyConfig, k: int) -> Iterator[SkinnyConfig]:
    for field in ("outputs_per_block", "k_unroll", "block_size"):
        for value in (getattr(centre, field) // 2, getattr(centre, field) * 2):
            changed = replace(centre, **{field: value}) if value else None
            if changed is not None and k >= changed.step:
                yield changed if changed.static_k is not None else skinny.clamped(changed, k)
