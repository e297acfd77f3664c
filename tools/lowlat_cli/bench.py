"""``lowlat bench``: our kernels, cuBLAS and the streaming floor on cold weights, side by side in one run.

The method is that of ``measure.py``. Every candidate's result is judged against FP64 before it is timed: a wrong one of
ours ends the run; cuBLAS, which may add split sums in BF16, is timed all the same and its error is in the record.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import COMPILE_CACHE, device_plan, launch
from lowlat_gemm.reference import parity

from .checking import Shape
from .environment import Gpu
from .measure import REPLAYS, Run, ShapeCopies, Timing, interleaved

FLOOR, CUBLAS, OURS = "floor", "cublas", "ours"


@dataclass(frozen=True)
class BenchCell:
    """One (N, K, M): a timing per candidate. ``ours`` is absent where nothing of ours runs; ``reason`` says why."""

    n: int
    k: int
    m: int
    weight_bytes: int
    copies: int
    backend: str | None
    reason: str | None
    timings: dict[str, Timing]
    worst_ulps: dict[str, float]

    def ratio(self, candidate: str, base: str) -> float | None:
        """Time of ``candidate`` over that of ``base``; None where one is absent."""
        if candidate not in self.timings or base not in self.timings:
            return None
        return self.timings[candidate].us / self.timings[base].us

    def gbs(self, candidate: str) -> float:
        """Weight bytes over time, in GB/s."""
        return self.weight_bytes / self.timings[candidate].us / 1e3

    def to_json(self) -> dict:
        ratios = {
            "ours_over_floor": self.ratio(OURS, FLOOR),
            "cublas_over_floor": self.ratio(CUBLAS, FLOOR),
            "ours_over_cublas": self.ratio(OURS, CUBLAS),
        }
        rounded = {name: None if value is None else round(value, 4) for name, value in ratios.items()}
        timings = {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()}
        return {**vars(self), "timings": timings, **rounded}


class BenchError(RuntimeError):
    """A candidate computed something wrong: it is not timed."""


def bench_cell(copies: ShapeCopies, m: int, replays: int = REPLAYS) -> BenchCell:
    """Times M = ``m``. Raises BenchError when a candidate's result is wrong."""
    x, n, k = copies.x[:m], copies.shape.n, copies.shape.k
    candidates: dict[str, Run] = {}
    decision = explain(m, n, k)
    if decision.runs:
        plan = device_plan(copies.device.index, n, k)
        compiled = COMPILE_CACHE.get(plan.entry(m, False).unit)
        candidates[OURS] = lambda x, w, y: launch(compiled, x, w, None, y)
    candidates[CUBLAS] = lambda x, w, y: torch.mm(x, w.T, out=y)
    graphs, errors = {FLOOR: copies.floor}, {}
    outputs = {name: torch.empty(m, n, dtype=torch.bfloat16, device=copies.device) for name in candidates}
    for name, run in candidates.items():
        y = outputs[name]
        run(x, copies.weights[0], y)
        report = parity(y, copies.reference.rows(m))
        errors[name] = round(report.worst_ulps, 3)
        if not report.ok and name == OURS:
            raise BenchError(f"{name} at M={m} N={n} K={k}: {report}")
        graphs[name] = copies.back_to_back(run, m, y)
    reason = None if decision.runs else str(decision.refusal)
    timings = interleaved(graphs, copies.copies, replays)
    return BenchCell(n, k, m, copies.weight_bytes, copies.copies, decision.backend, reason, timings, errors)




def geometric_means(cells: Sequence[BenchCell]) -> dict[int, dict[str, float]]:
    """By M, over the cells that run on a kernel of ours: ours and cuBLAS over the floor, ours over cuBLAS."""
    means = {}
    for m in sorted({cell.m for cell in cells}):
        ours = [cell for cell in cells if cell.m == m and OURS in cell.timings]
        if ours:
            pairs = {"ours_over_floor": (OURS, FLOOR), "cublas_over_floor": (CUBLAS, FLOOR), "ours_over_cublas": (OURS, CUBLAS)}
            means[m] = {
                name: round(statistics.geometric_mean(cell.ratio(*pair) for cell in ours), 4)
                for name, pair in pairs.items()
            }
            means[m]["cells"] = len(ours)
    return means


def run_bench(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
) -> list[BenchCell]:
    """Every shape at every M; ``progress`` is told before each shape and how many elements are behind."""
    cells, done = [], 0
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        for shape in shapes:
            progress(shape, done)
            copies = ShapeCopies(shape, gpu, max(tokens))
            cells += [bench_cell(copies, m) for m in tokens]
            done += shape.elements
            del copies
            torch.cuda.empty_cache()
    return cells
