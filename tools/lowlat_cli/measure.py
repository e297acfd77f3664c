"""How times are taken: copies of a weight, one graph a candidate, replays that take turns.

Method. All launches of one candidate are one CUDA graph; its time is the whole sequence of launches in it, whatever
kernels a candidate needs. Replays of the candidates take turns; a time is the median over replays, divided by the
launches. Inputs are random normal numbers (zeros run faster). Floors drift by a few percent between runs: compare
ratios within a run. Three switches, ``Mode``:

- weights: ``cold``, copies of 1.2 GB in total, each read by one launch, so that no launch finds its weight in L2; of a
  small weight 1024 copies, or more where these would be less than 200 MB, four times the L2 of an H200;
  ``warm``, one copy for all launches, which a weight smaller than L2 finds there.
- pdl: with programmatic dependent launch, or with every programmatic edge of the graph made a full one.
- chain: ``back_to_back``, the GEMM after its own twin. ``linked`` puts between two GEMMs what stands there in a model,
  a short kernel that reads the last output and writes the next input; its time is that of the pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat_gemm.reference import reference_gemm

from . import chain_kernel
from .checking import Shape
from .environment import Gpu
from .floor_kernel import CTAS_PER_SM, compiled_streaming_read
from .graphs import capture

COPIES_BYTES = 1_200_000_000
#: A graph need not be longer than this to be timed, where its copies are still so many bytes.
ENOUGH_COPIES, LEAST_COPIES_BYTES = 1024, 200_000_000
REPLAYS = 21
#: Replays from which the floor's best grid is chosen.
PROBES = 3
#: What is timed: run(x [M, K], weight [N, K], y [M, N]) gives the tensor with the result, ``y`` or one of its own.
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

COLD, WARM = "cold", "warm"
BACK_TO_BACK, LINKED = "back_to_back", "linked"


@dataclass(frozen=True)
class Mode:
    """Under which conditions a GEMM is timed."""

    weights: str = COLD
    pdl: bool = True
    chain: str = BACK_TO_BACK

    def __str__(self) -> str:
        return f"{self.chain}, {self.weights}, PDL {'on' if self.pdl else 'off'}"


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


def copies_of(weight_bytes: int, copies_bytes: int = COPIES_BYTES) -> int:
    """How many copies of a weight are laid out, each for one launch of a graph."""
    enough = max(ENOUGH_COPIES * weight_bytes, LEAST_COPIES_BYTES)
    return max(2, math.ceil(min(copies_bytes, enough) / weight_bytes))


class ShapeCopies:
    """The copies of one shape's weight, random tokens with their FP64 result, and the graphs over them.

    ``floor``: the graph of the streaming read in the default mode; ``floor_graph`` has it in any.
    """

    def __init__(self, shape: Shape, gpu: Gpu, max_tokens: int, copies_bytes: int = COPIES_BYTES):
        self.shape, self.gpu = shape, gpu
        self.device = torch.device("cuda", gpu.ordinal)
        self.weight_bytes = 2 * shape.elements
        self.copies = copies_of(self.weight_bytes, copies_bytes)
        generator = torch.Generator(self.device).manual_seed(0)
        self.weights = torch.empty(self.copies, shape.n, shape.k, dtype=torch.bfloat16, device=self.device)
        for copy in self.weights:
            for rows in copy.split(4096):
                rows.normal_(generator=generator)
        self.x = torch.randn(max_tokens, shape.k, generator=generator, device=self.device).bfloat16()
        self.h = torch.randn(max_tokens, shape.k, generator=generator, device=self.device).bfloat16()
        self.reference = reference_gemm(self.x, self.weights[0])
        self._floor_out = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._floors: dict[Mode, tuple[Run, torch.cuda.CUDAGraph]] = {}
        self.floor = self.floor_graph(1, Mode())

    def floor_graph(self, m: int, mode: Mode) -> torch.cuda.CUDAGraph:
        """The streaming read in the place of the GEMM, with the number of CTAs that is best back to back."""
        alone = Mode(mode.weights, mode.pdl, BACK_TO_BACK)
        if alone not in self._floors:
            self._floors[alone] = self._best_floor(alone)
        run, graph = self._floors[alone]
        return graph if mode == alone else self.graph(run, m, self.empty_output(m), mode)

    def _best_floor(self, mode: Mode) -> tuple[Run, torch.cuda.CUDAGraph]:
        read = compiled_streaming_read(self.gpu.arch.compile_target)

        def with_grid(ctas: int) -> Run:
            def run(x, w, y):
                read(w.view(torch.int32).view(-1, 4), self._floor_out, ctas, self._stream())
                return y

            return run

        best, y = None, self.empty_output(1)
        for per_sm in CTAS_PER_SM:
            run = with_grid(int(per_sm * self.gpu.properties.sm_count))
            run(self.x[:1], self.weights[0], y)
            graph = self.graph(run, 1, y, mode)
            us = min(replay_us(graph, self.copies) for _ in range(PROBES))
            if best is None or us < best[0]:
                best = (us, (run, graph))
        return best[1]

    def empty_output(self, m: int) -> torch.Tensor:
        return torch.empty(m, self.shape.n, dtype=torch.bfloat16, device=self.device)

    def why_not(self, mode: Mode) -> str | None:
        """Why this shape cannot be timed in ``mode``, or None."""
        return chain_kernel.why_not(self.shape.n, self.shape.k) if mode.chain == LINKED else None

    def back_to_back(self, run: Run, m: int, y: torch.Tensor) -> torch.cuda.CUDAGraph:
        """``graph`` in the default mode."""
        return self.graph(run, m, y)

    def linked(self, run: Run, m: int, y: torch.Tensor) -> torch.cuda.CUDAGraph:
        """``graph`` in the default mode with a norm between two GEMMs."""
        return self.graph(run, m, y, Mode(chain=LINKED))

    def graph(self, run: Run, m: int, y: torch.Tensor, mode: Mode = Mode()) -> torch.cuda.CUDAGraph:
        """As many launches of ``run`` as there are copies, at M = ``m``, each given ``y`` to write."""
        weights = self.weights if mode.weights == COLD else [self.weights[0]] * self.copies
        x, h = self.x[:m], self.h[:m]
        if mode.chain == BACK_TO_BACK:
            graph = capture((lambda w=w: run(x, w, y) for w in weights), pdl=mode.pdl)
        else:
            x = torch.empty_like(x)
            graph = capture(self._pairs(run, x, h, y, weights), pdl=mode.pdl)
        graph.kept = (x, h, y)  # a graph holds addresses, not tensors
        return graph

    def _pairs(self, run: Run, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor, weights) -> list[Callable[[], None]]:
        """Norm and GEMM, as often as there are weights: each reads what the other wrote before it."""
        link = chain_kernel.compiled_norm_link(self.gpu.arch.compile_target)
        y.zero_()
        link(y, h, x, self._stream())
        written = [y]  # a candidate may give a tensor of its own instead

        def pair(w: torch.Tensor) -> None:
            link(written[0], h, x, self._stream())
            written[0] = run(x, w, y)

        return [lambda w=w: pair(w) for w in weights]

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream
