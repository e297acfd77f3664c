"""``lowlat sweep``: every ``split_k`` config worth trying for a cell, timed side by side on cold weights.

The method is that of ``lowlat bench``. All candidates of a cell are judged against FP64, timed shortly, and the best few
timed again with the floor and cuBLAS in turn. A sweep shows what a kernel can do; tables are the tuner's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from lowlat_gemm.arch import Arch
from lowlat_gemm.execute import COMPILE_CACHE, compile_ahead, launch
from lowlat_gemm.kernels.split_k import (
    TOKEN_COLUMNS,
    SplitKConfig,
    compile_unit,
    shared_memory_bytes,
    why_not,
)
from lowlat_gemm.reference import parity

from .bench import CUBLAS, FLOOR
from .measure import REPLAYS, ShapeCopies, Timing, capture, interleaved
from .checking import Shape
from .environment import Gpu

#: Shared memory of an SM of the generations served so far, and what the system takes of it for each CTA.
_SM_SHARED_BYTES, _CTA_RESERVED_BYTES = 228 * 1024, 1024
#: A CTA may take so much and still leave room for one of the next kernel: the launches of a chain overlap.
HALF_AN_SM = _SM_SHARED_BYTES // 2 - _CTA_RESERVED_BYTES
#: Least share of the SMs' slots (one or two CTAs an SM) that the grid of a candidate fills.
LEAST_FILL = 0.72
#: Replays of the first round, and how many candidates go on to the second.
FIRST_REPLAYS, FINALISTS = 5, 5
ROWS = (32, 40, 48, 56, 64, 72, 80, 96, 128)
#: Where the search stops; nothing recorded says that more ranks cannot win.
SPLITS = range(1, 6)


def fill(n: int, config: SplitKConfig, sm_count: int) -> float:
    """Share of one or two CTAs an SM that the grid of a token tile fills; 0 for a grid that needs a second wave."""
    ctas = -(-n // config.rows) * config.split
    return next((ctas / slots for slots in (sm_count, 2 * sm_count) if ctas <= slots), 0.0)


def _deepest_ring(config: SplitKConfig) -> SplitKConfig | None:
    """The config with as many stages as half an SM holds; None where that is not even three."""
    fits = [
        stages
        for stages in range(3, 33)
        if shared_memory_bytes(SplitKConfig(**(asdict(config) | {"stages": stages}))) <= HALF_AN_SM
    ]
    return SplitKConfig(**(asdict(config) | {"stages": fits[-1]})) if fits else None


def candidates(arch: Arch, n: int, k: int, m: int, sm_count: int, most: int) -> list[SplitKConfig]:
    """At most ``most`` tilings for a cell, the fullest grids first, each with its prefetch and trigger variants."""
    columns = next((one for one in TOKEN_COLUMNS if m <= one), TOKEN_COLUMNS[-1])
    tilings = []
    for rows, split, k_blocks in itertools.product(ROWS, SPLITS, (1, 2)):
        token_stages = 5 if columns == 64 else 0
        config = _deepest_ring(SplitKConfig(rows, columns, split, 3, k_blocks=k_blocks, token_stages=token_stages))
        if config is not None and why_not(arch, n, k, m, config) is None and fill(n, config, sm_count) >= LEAST_FILL:
            tilings.append(config)
    tilings.sort(key=lambda config: (-round(fill(n, config, sm_count), 2), config.split))
    return [variant for config in tilings[:most] for variant in _variants(config)]


def _variants(config: SplitKConfig) -> Iterator[SplitKConfig]:
    """Prefetch of two thirds of the ring or all of it, and the next kernel let go a little earlier or later."""
    for prefetch, trigger in ((0, 4), (0, 8), (0, 12), (config.stages, 6)):
        yield SplitKConfig(**(asdict(config) | {"prefetch": prefetch, "trigger": trigger // config.k_blocks}))


@dataclass(frozen=True)
class SweepCell:
    """One (N, K, M): floor and cuBLAS, the finalists from the best on, and what was wrong. Times in microseconds."""

    n: int
    k: int
    m: int
    floor: Timing
    cublas: Timing
    finalists: tuple[tuple[SplitKConfig, Timing], ...]
    tried: int
    wrong: tuple[str, ...]

    @property
    def over_floor(self) -> float:
        return self.finalists[0][1].us / self.floor.us

    def to_json(self) -> dict:
        return {
            "n": self.n,
            "k": self.k,
            "m": self.m,
            "floor": asdict(self.floor),
            "cublas": asdict(self.cublas),
            "finalists": [{"config": asdict(config), **asdict(timing)} for config, timing in self.finalists],
            "tried": self.tried,
            "wrong": list(self.wrong),
            "over_floor": round(self.over_floor, 4),
            "over_cublas": round(self.finalists[0][1].us / self.cublas.us, 4),
        }


def sweep_cell(bench: ShapeCopies, m: int, configs: Sequence[SplitKConfig]) -> SweepCell | None:
    """Times ``configs`` at M = ``m``; None when not one of them is right."""
    shape, arch, x = bench.shape, bench.gpu.arch, bench.x[:m]
    outputs, graphs, wrong = [], {FLOOR: bench.floor}, []
    library = torch.empty(m, shape.n, dtype=torch.bfloat16, device=bench.device)
    torch.mm(x, bench.weights[0].T, out=library)
    graphs[CUBLAS] = capture(lambda w=w: torch.mm(x, w.T, out=library) for w in bench.weights)
    for config in configs:
        kernel = COMPILE_CACHE.get(compile_unit(arch, shape.n, shape.k, m, config))
        y = torch.full_like(library, float("nan"))
        outputs.append(y)  # graphs write into them until the last replay
        report = parity(launch(kernel, x, bench.weights[0], None, y), bench.reference.rows(m))
        if report.ok:
            graphs[config] = capture(lambda w=w: launch(kernel, x, w, None, y) for w in bench.weights)
        else:
            wrong.append(f"{config}: {report}")
    first = interleaved(graphs, bench.copies, FIRST_REPLAYS)
    best = sorted((one for one in graphs if isinstance(one, SplitKConfig)), key=lambda one: first[one].us)[:FINALISTS]
    if not best:
        return None
    final = interleaved({one: graphs[one] for one in (FLOOR, CUBLAS, *best)}, bench.copies, REPLAYS)
    ranked = tuple(sorted(((one, final[one]) for one in best), key=lambda pair: pair[1].us))
    return SweepCell(shape.n, shape.k, m, final[FLOOR], final[CUBLAS], ranked, len(configs), tuple(wrong))


def run_sweep(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    most: int,
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
) -> list[SweepCell]:
    """Every shape at every M that has candidates. Everything is compiled first, in several processes."""
    plan = {
        (shape, m): candidates(gpu.arch, shape.n, shape.k, m, gpu.properties.sm_count, most)
        for shape in shapes
        for m in tokens
    }
    compile_ahead(compile_unit(gpu.arch, s.n, s.k, m, config) for (s, m), configs in plan.items() for config in configs)
    cells, done = [], 0
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        for shape in shapes:
            progress(shape, done)
            bench = ShapeCopies(shape, gpu, max(tokens))
            cells += [sweep_cell(bench, m, plan[shape, m]) for m in tokens if plan[shape, m]]
            done += shape.elements
            del bench
            torch.cuda.empty_cache()
    return [cell for cell in cells if cell is not None]
