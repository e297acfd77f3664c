"""How times are taken: cold copies of a weight, one graph a candidate, replays that take turns.

Method. The weights of one shape lie in the memory as copies of 1.2 GB in total, each read by one launch, so that no
launch finds its weight in L2. All launches of one candidate are one CUDA graph with programmatic dependent launch.
Replays of the candidates take turns; a time is the median over replays, divided by the launches. Inputs are random
normal numbers (zeros run faster). Floors drift by a few percent between runs: compare ratios within a run.

Two chains: ``back_to_back`` is the GEMM after its own copies. ``linked`` puts between two GEMMs what stands there in a
model, a short kernel that reads the last output and writes the next input; its time is that of the pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat_gemm.reference import reference_gemm

from .chain_kernel import compiled_norm_link
from .checking import Shape
from .environment import Gpu
from .floor_kernel import CTAS_PER_SM, compiled_streaming_read

COPIES_BYTES = 1_200_000_000
REPLAYS = 21
#: Replays from which the floor's best grid is chosen.
PROBES = 3
#: What is timed: run(x [M, K], weight [N, K], y [M, N]).
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


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


def interleaved(
    graphs: Mapping[Hashable, torch.cuda.CUDAGraph], launches: int, replays: int = REPLAYS
) -> dict[Hashable, Timing]:
    """Times ``graphs`` in turn, each round in another order, so that drift meets all alike."""
    names = list(graphs)
    for graph in graphs.values():
        graph.replay()
    samples: dict[Hashable, list[float]] = {name: [] for name in names}
    for turn in range(replays):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(replay_us(graphs[name], launches))
    return {name: Timing.of(values) for name, values in samples.items()}


class ShapeCopies:
    """The copies of one shape's weight, random tokens with their FP64 result, and the floor's graph."""

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
        self.h = torch.randn(max_tokens, shape.k, generator=generator, device=self.device).bfloat16()
        #: What the norms of every linked chain write: a graph keeps no memory alive.
        self.normed = torch.empty_like(self.x)
        self.reference = reference_gemm(self.x, self.weights[0])
        self.floor = self._floor_graph()

    def _floor_graph(self) -> torch.cuda.CUDAGraph:
        """The streaming read of every copy with the best number of CTAs."""
        read = compiled_streaming_read(self.gpu.arch.compile_target)
        self._floor_out = out = torch.zeros(1, dtype=torch.int32, device=self.device)
        words = [copy.view(torch.int32).view(-1, 4) for copy in self.weights]
        best = None
        for per_sm in CTAS_PER_SM:
            ctas = int(per_sm * self.gpu.properties.sm_count)
            read(words[0], out, ctas, self._stream())
            graph = capture(lambda w=w: read(w, out, ctas, self._stream()) for w in words)
            us = min(replay_us(graph, self.copies) for _ in range(PROBES))
            if best is None or us < best[0]:
                best = (us, graph)
        return best[1]

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def back_to_back(self, run: Run, m: int, y: torch.Tensor) -> torch.cuda.CUDAGraph:
        """One launch of ``run`` a copy at M = ``m``, each writing ``y``."""
        return capture(lambda w=w: run(self.x[:m], w, y) for w in self.weights)

    def linked(self, run: Run, m: int, y: torch.Tensor) -> torch.cuda.CUDAGraph:
        """Norm, GEMM, norm, GEMM, ...: each GEMM reads what the norm wrote, each norm what the GEMM wrote."""
        link = compiled_norm_link(self.gpu.arch.compile_target)
        x, h = self.normed[:m], self.h[:m]
        y.zero_()
        link(y, h, x, self._stream())
        calls = []
        for w in self.weights:
            calls += [lambda: link(y, h, x, self._stream()), lambda w=w: run(x, w, y)]
        return capture(calls)
