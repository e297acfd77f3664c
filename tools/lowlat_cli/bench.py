"""``lowlat bench``: our kernels and their peers against the streaming floor, side by side in one run.

The method is that of ``measure.py``, the peers are those of ``candidates.py``. Every candidate's result is judged
against FP64 before it is timed: a wrong one of ours ends the run, a wrong peer is listed and not timed; cuBLAS, which
may add split sums in BF16, is timed all the same and its error is in the record.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import compile_ahead, device_plan
from lowlat_gemm.operands import Refusal
from lowlat_gemm.reference import parity

from . import graphs as graphs_module
from .candidates import BOUNDS, CUBLAS, FLOOR, LINK, OURS, Candidate
from .checking import Shape
from .environment import Gpu
from .measure import LINKED, REPLAYS, Mode, Run, ShapeCopies, Timing, interleaved

#: Ours over a peer from which a loss is more than the spread of two runs.
CLEAR_LOSS = 1 / 0.97


@dataclass(frozen=True)
class Check:
    """What a candidate's result came to, and what one call launches (None where the driver did not say)."""

    ok: bool
    worst_ulps: float
    worst_share: float
    kernels: tuple[str, ...] | None = None

    def to_json(self) -> dict:
        worst = {
            name: round(value, 3) if math.isfinite(value) else str(value)
            for name, value in (("worst_ulps", self.worst_ulps), ("worst_share", self.worst_share))
        }
        return {"ok": self.ok, **worst, "kernels": None if self.kernels is None else list(self.kernels)}


@dataclass(frozen=True)
class BenchCell:
    """One (N, K, M) in one mode: a timing and a check per candidate, and a reason for each that has no timing."""

    n: int
    k: int
    m: int
    mode: Mode
    weight_bytes: int
    launches: int
    backend: str | None
    timings: dict[str, Timing]
    checks: dict[str, Check]
    skipped: dict[str, str]

    def ratio(self, candidate: str, base: str) -> float | None:
        """Time of ``candidate`` over that of ``base``; None where one is absent."""
        if candidate not in self.timings or base not in self.timings:
            return None
        return self.timings[candidate].us / self.timings[base].us

    def gbs(self, candidate: str) -> float:
        """Weight bytes over time, in GB/s."""
        return self.weight_bytes / self.timings[candidate].us / 1e3

    @property
    def best_peer(self) -> str | None:
        """The fastest candidate that is not ours."""
        peers = [name for name in self.timings if name not in (OURS, *BOUNDS)]
        return min(peers, key=lambda name: self.timings[name].us, default=None)

    @property
    def over_best_peer(self) -> float | None:
        """Ours over the fastest peer: above 1 is a loss, above ``CLEAR_LOSS`` a clear one."""
        return None if self.best_peer is None else self.ratio(OURS, self.best_peer)

    def to_json(self) -> dict:
        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 4)

        timed = [name for name in self.timings if name != FLOOR]
        peers = [name for name in timed if name not in (OURS, LINK)] if OURS in self.timings else []
        return {
            **{key: getattr(self, key) for key in ("n", "k", "m", "weight_bytes", "launches", "backend", "skipped")},
            "mode": asdict(self.mode),
            "timings": {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()},
            "gbs": {name: round(self.gbs(name), 1) for name in self.timings if name != LINK},
            "over_floor": {name: rounded(self.ratio(name, FLOOR)) for name in timed},
            "ours_over": {name: rounded(self.ratio(OURS, name)) for name in peers},
            "best_peer": self.best_peer,
            "checks": {name: check.to_json() for name, check in self.checks.items()},
        }


class BenchError(RuntimeError):
    """A kernel of ours computed something wrong: nothing of the run is of use."""


@dataclass
class Entry:
    """A candidate that gave a right result, or may be timed without."""

    run: Run
    y: torch.Tensor
    check: Check


def judged(
    copies: ShapeCopies, m: int, candidates: Sequence[Candidate]
) -> tuple[dict[str, Entry], dict[str, Check], dict[str, str]]:
    """What can be timed, what was checked and what is left out at M = ``m``. Raises BenchError when ours is wrong."""
    n, k = copies.shape.n, copies.shape.k
    entries, checks, skipped = {}, {}, {}
    for candidate in candidates:
        reason = candidate.why_not(copies.gpu.arch, n, k, m)
        if reason is not None:
            skipped[candidate.name] = reason
            continue
        try:
            y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=copies.device)
            run = candidate.make(n, k, m, copies.gpu.ordinal)
            report = parity(run(copies.x[:m], copies.weights[0], y), copies.reference.rows(m))
        except Exception as error:
            if candidate.name == OURS:
                raise
            # Other packages raise what they like for what they do not serve; that is a fact about them, not an error.
            skipped[candidate.name] = f"raised {type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"
            continue
        if not report.ok and candidate.name == OURS:
            raise BenchError(f"{OURS} at M={m} N={n} K={k}: {report}")
        check = Check(report.ok, report.worst_ulps, report.worst_share, _launched(run, copies, m, y))
        checks[candidate.name] = check
        if report.ok or candidate.timed_though_wrong:
            entries[candidate.name] = Entry(run, y, check)
        else:
            skipped[candidate.name] = f"wrong: {report}"
    return entries, checks, skipped


def _launched(run: Run, copies: ShapeCopies, m: int, y: torch.Tensor) -> tuple[str, ...] | None:
    """The kernels of one call; None where this torch or driver cannot tell, for a benchmark must not end with that."""
    try:
        return tuple(graphs_module.kernel_names(lambda: run(copies.x[:m], copies.weights[0], y)))
    except Exception:  # what cannot be captured at all is said when its graph is made
        return None


def bench_cell(
    copies: ShapeCopies, m: int, modes: Sequence[Mode], candidates: Sequence[Candidate], replays: int = REPLAYS
) -> list[BenchCell]:
    """Times M = ``m`` in each of ``modes``. Raises BenchError when a result of ours is wrong."""
    shape = copies.shape
    backend = explain(m, shape.n, shape.k).backend
    entries, checks, reasons = judged(copies, m, candidates)
    cells = []
    for mode in modes:
        refused = copies.why_not(mode)
        if refused is not None:
            skipped = {**reasons, **{name: refused for name in entries}}
            cells.append(BenchCell(shape.n, shape.k, m, mode, copies.weight_bytes, 0, backend, {}, checks, skipped))
            continue
        skipped = dict(reasons)
        graphs = {FLOOR: copies.floor_graph(m, mode)}
        if mode.chain == LINKED:
            graphs[LINK] = copies.graph(lambda x, w, y: y, m, copies.empty_output(m), mode)
        for name, entry in entries.items():
            try:
                graphs[name] = copies.graph(entry.run, m, entry.y, mode)
            except Exception as error:
                if name in (OURS, CUBLAS):
                    raise
                skipped[name] = f"cannot be captured: {str(error).strip().split(chr(10))[0][:200]}"
        timings = interleaved(graphs, copies.copies, replays)
        size = (copies.weight_bytes, copies.copies)
        cells.append(BenchCell(shape.n, shape.k, m, mode, *size, backend, timings, checks, skipped))
    return cells


def geometric_means(cells: Sequence[BenchCell]) -> dict[str, dict[int, dict[str, dict]]]:
    """By mode, M and candidate: its time over the floor and ours over it, over the cells that it and ours ran."""
    means: dict[str, dict[int, dict[str, dict]]] = {}
    for mode in dict.fromkeys(cell.mode for cell in cells):
        for m in sorted({cell.m for cell in cells}):
            ran = [cell for cell in cells if cell.mode == mode and cell.m == m and OURS in cell.timings]
            for name in dict.fromkeys(name for cell in ran for name in cell.timings if name not in BOUNDS):
                both = [cell for cell in ran if name in cell.timings]
                row = {"cells": len(both), "over_floor": _mean(cell.ratio(name, FLOOR) for cell in both)}
                if name != OURS:
                    row["ours_over"] = _mean(cell.ratio(OURS, name) for cell in both)
                means.setdefault(str(mode), {}).setdefault(m, {})[name] = row
    return means


def _mean(ratios) -> float:
    return round(statistics.geometric_mean(ratios), 4)


def losses(cells: Sequence[BenchCell]) -> list[BenchCell]:
    """The cells in which some peer is faster than ours, worst first."""
    lost = [cell for cell in cells if (cell.over_best_peer or 0) > 1]
    return sorted(lost, key=lambda cell: -cell.over_best_peer)


def run_bench(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    modes: Sequence[Mode],
    candidates: Sequence[Candidate],
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
    replays: int = REPLAYS,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[list[BenchCell], list[str]]:
    """Every shape at every M in every mode; ``progress`` is told before each (shape, M) how many are behind.

    Once ``out_of_time`` says so no other (shape, M) begins; those are named in the second list.
    """
    cells, not_reached, done = [], [], 0
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        _compile_ahead(shapes, tokens, gpu)
        for shape in shapes:
            copies = None
            for m in tokens:
                progress(shape, done)
                done += 1
                if out_of_time():
                    not_reached.append(f"{shape.n}x{shape.k} M={m}")
                    continue
                copies = copies or ShapeCopies(shape, gpu, max(tokens))
                cells += bench_cell(copies, m, modes, candidates, replays)
            del copies
            torch.cuda.empty_cache()
    return cells, not_reached


def _compile_ahead(shapes: Sequence[Shape], tokens: Sequence[int], gpu: Gpu) -> None:
    """Compiles what of ours will be timed, in several processes."""
    plans = [device_plan(gpu.ordinal, shape.n, shape.k) for shape in shapes]
    entries = [plan.entry(m, False) for plan in plans if not isinstance(plan, Refusal) for m in tokens]
    compile_ahead(unit for entry in entries if entry is not None for unit in entry.units())
