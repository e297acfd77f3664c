"""``lowlat bench``: our kernels, cuBLAS and the streaming floor on cold weights, side by side in one run.

Method. The weights of one shape lie in the memory as copies of 1.2 GB in total, each read by one launch, so that no
launch finds its weight in L2. All launches of one candidate are one CUDA graph with programmatic dependent launch.
Replays of the candidates take turns; a time is the median over replays, divided by the launches. Inputs are random
normal numbers (zeros run faster). Every candidate's result is judged against FP64 before it is timed: a wrong one of
ours ends the run; cuBLAS, which may add split sums in BF16, is timed all the same and its error is in the record.
Floors drift by a few percent between runs: compare ratios within a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import COMPILE_CACHE, device_plan, launch
from lowlat_gemm.operands import Refusal
from lowlat_gemm.reference import parity, reference_gemm

from .checking import Shape
from .environment import Gpu
from .floor_kernel import CTAS_PER_SM, compiled_streaming_read

COPIES_BYTES = 1_200_000_000
REPLAYS = 21
#: Replays from which the floor's best grid is chosen.
PROBES = 3
FLOOR, CUBLAS, OURS = "floor", "cublas", "ours"


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch over replays: median, and the 10th and 90th percentile."""

    us: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


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


def capture(calls: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` in their order."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    """Microseconds a launch in one replay, by events on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / launches


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], launches: int, replays: int = REPLAYS) -> dict[str, Timing]:
    """Times ``graphs`` in turn, each round in another order, so that drift meets all alike."""
    names = list(graphs)
    for graph in graphs.values():
        graph.replay()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(replays):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(replay_us(graphs[name], launches))
    return {name: Timing.of(values) for name, values in samples.items()}


class ShapeBench:
    """The copies of one shape's weight and the floor's graph; ``cell(m)`` times one token count."""

    def __init__(self, shape: Shape, gpu: Gpu, max_tokens: int, copies_bytes: int = COPIES_BYTES):
        self.shape, self.gpu = shape, gpu
        self.device = torch.device("cuda", gpu.ordinal)
        self.weight_bytes = 2 * shape.elements
        self.copies = max(2, math.ceil(copies_bytes / self.weight_bytes))
        generator = torch.Generator(self.device).manual_seed(0)
        self.weights = torch.empty(self.copies, shape.n, shape.k, dtype=torch.bfloat16, device=self.device)
        for copy in self.weights:
            for rows in copy.split(4096):
                rows.normal_(generator=generator)
        self.x = torch.randn(max_tokens, shape.k, generator=generator, device=self.device).bfloat16()
        self.reference = reference_gemm(self.x, self.weights[0])
        self.floor = self._floor_graph()

    def _floor_graph(self) -> torch.cuda.CUDAGraph:
        """The streaming read of every copy with the best number of CTAs."""
        read = compiled_streaming_read(self.gpu.arch.compile_target)
        self._floor_out = out = torch.zeros(1, dtype=torch.int32, device=self.device)
        words = [copy.view(torch.int32).view(-1, 4) for copy in self.weights]
        best = None
        for per_sm in CTAS_PER_SM:
            ctas = per_sm * self.gpu.properties.sm_count
            read(words[0], out, ctas, self._stream())
            graph = capture(lambda w=w: read(w, out, ctas, self._stream()) for w in words)
            us = min(replay_us(graph, self.copies) for _ in range(PROBES))
            if best is None or us < best[0]:
                best = (us, graph)
        return best[1]

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def cell(self, m: int, replays: int = REPLAYS) -> BenchCell:
        """Times M = ``m``. Raises BenchError when a candidate's result is wrong."""
        x, n, k = self.x[:m], self.shape.n, self.shape.k
        candidates: dict[str, Callable] = {}
        decision = explain(m, n, k)
        if decision.runs:
            plan = device_plan(self.device.index, n, k)
            compiled = COMPILE_CACHE.get(plan.entry(m, False).unit)
            candidates[OURS] = lambda w, y: launch(compiled, x, w, None, y)
        candidates[CUBLAS] = lambda w, y: torch.mm(x, w.T, out=y)
        graphs, errors = {FLOOR: self.floor}, {}
        outputs = {name: torch.empty(m, n, dtype=torch.bfloat16, device=self.device) for name in candidates}
        for name, run in candidates.items():
            y = outputs[name]
            run(self.weights[0], y)
            report = parity(y, self.reference.rows(m))
            errors[name] = round(report.worst_ulps, 3)
            if not report.ok and name == OURS:
                raise BenchError(f"{name} at M={m} N={n} K={k}: {report}")
            graphs[name] = capture(lambda w=w: run(w, y) for w in self.weights)
        reason = None if decision.runs else str(decision.refusal)
        timings = interleaved(graphs, self.copies, replays)
        return BenchCell(n, k, m, self.weight_bytes, self.copies, decision.backend, reason, timings, errors)


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
            bench = ShapeBench(shape, gpu, max(tokens))
            cells += [bench.cell(m) for m in tokens]
            done += shape.elements
            del bench
            torch.cuda.empty_cache()
    return cells
