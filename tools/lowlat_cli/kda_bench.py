"""``lowlat bench --kda``: KDA's input projections at TP 8 on two streams against one stream, interleaved, by M.

The method is that of ``measure.py``: one graph a way, with as many layers as there are copies of the weights (cold), in
a chain of layers back to back or with a norm between, which reads QKVG and writes the next x; replays take turns.

    overlap      as the library runs it
    in turn      the same kernels on one stream
    sequential   what runs without the overlap: the packed projection, then F_B, as dispatch has them
    cublas       those two by torch

Each way's results are judged against FP64 before it is timed; a wrong one of ours ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from lowlat_gemm import try_low_latency_gemm
from lowlat_gemm.execute import compile_ahead, kernels_of, launch
from lowlat_gemm.kda_branches import GEOMETRY, branches, overlap_units
from lowlat_gemm.kda_overlap import run_kda_projection_overlap
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.tables import MAX_OVERLAP_TOKENS

from . import chain_kernel
from .bench import BenchError, Check
from .checking import Shape
from .environment import Gpu
from .graphs import capture
from .measure import COPIES_BYTES, LINKED, REPLAYS, Timing, interleaved

OVERLAP, IN_TURN, SEQUENTIAL, CUBLAS = "overlap", "in turn", "sequential", "cublas"
#: cuBLAS may add split sums in BF16: timed all the same, with its error in the record.
OURS = (OVERLAP, IN_TURN, SEQUENTIAL)
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: run(x [M, K], packed weight, F_B's) gives (qkvg, F_B's, the rows of F_A and beta).
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]


@dataclass(frozen=True)
class KdaCell:
    """One M in one chain: microseconds a layer by way, the norm of a linked chain included."""

    m: int
    chain: str
    layers: int
    timings: dict[str, Timing]
    checks: dict[str, Check]

    @property
    def ratio(self) -> float:
        """Time of the overlap over that of the sequential path: below 1 it is the better one."""
        return self.timings[OVERLAP].us / self.timings[SEQUENTIAL].us

    def to_json(self) -> dict:
        timings = {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()}
        over = {name: round(self.timings[OVERLAP].us / t.us, 4) for name, t in self.timings.items() if name != OVERLAP}
        checks = {name: check.to_json() for name, check in self.checks.items()}
        head = {"m": self.m, "chain": self.chain, "layers": self.layers}
        return head | {"timings": timings, "overlap_over": over, "checks": checks}


def limit_of(cells: Sequence[KdaCell]) -> int:
    """The largest M such that the overlap beat the sequential path at every M from 1 to it, in every chain."""
    limit = 0
    while found := [cell for cell in cells if cell.m == limit + 1]:
        if any(cell.ratio >= 1 for cell in found):
            break
        limit += 1
    return limit


class Layers:
    """Copies of a layer's weights, tokens, and the graphs over them."""

    def __init__(self, gpu: Gpu, max_tokens: int, copies_bytes: int = COPIES_BYTES):
        self.gpu, self.device = gpu, torch.device("cuda", gpu.ordinal)
        generator = torch.Generator(self.device).manual_seed(0)
        copies = max(2, math.ceil(copies_bytes / (2 * GEOMETRY.packed * GEOMETRY.hidden)))

        def random(*extents: int) -> torch.Tensor:
            return torch.empty(extents, dtype=torch.bfloat16, device=self.device).normal_(generator=generator)

        self.packed = random(copies, GEOMETRY.packed, GEOMETRY.hidden)
        self.f_b = random(copies, GEOMETRY.f_b, GEOMETRY.f_a)
        self.x, self.h = (random(max_tokens, GEOMETRY.hidden) for _ in range(2))
        self.aux, self.events = torch.cuda.Stream(self.device), (torch.cuda.Event(), torch.cuda.Event())

    def ways(self, m: int) -> dict[str, Way]:
        """What is timed at M = ``m``."""
        chosen = branches(self.gpu.arch, m)

        def ours(unit, x, weight):
            return x @ weight.T if unit is None else launch(kernels_of([unit])[0], x, weight)

        def overlap(x, packed, f_b):
            streams = {"aux_stream": self.aux, "events": self.events}
            qkvg, g1, beta = run_kda_projection_overlap(x, packed, f_b, **streams, max_tokens=MAX_OVERLAP_TOKENS)
            rows = (x.shape[0], GEOMETRY.f_a + GEOMETRY.beta)
            return qkvg, g1, beta.as_strided(rows, beta.stride(), beta.storage_offset() - GEOMETRY.f_a)

        def in_turn(x, packed, f_b):
            fa_beta = ours(chosen.fa_beta, x, packed[GEOMETRY.qkvg :])
            qkvg = ours(chosen.qkvg, x, packed[: GEOMETRY.qkvg])
            return qkvg, ours(chosen.f_b, fa_beta[:, : GEOMETRY.f_a], f_b), fa_beta

        def one_after_the_other(product) -> Way:
            def run(x, packed, f_b):
                y = product(x, packed)
                fa_beta = y[:, GEOMETRY.qkvg :]
                return y[:, : GEOMETRY.qkvg], product(fa_beta[:, : GEOMETRY.f_a], f_b), fa_beta

            return run

        def dispatched(x, weight):
            y = try_low_latency_gemm(x, weight)
            return x @ weight.T if y is None else y

        sequential, cublas = one_after_the_other(dispatched), one_after_the_other(lambda x, weight: x @ weight.T)
        return {OVERLAP: overlap, IN_TURN: in_turn, SEQUENTIAL: sequential, CUBLAS: cublas}

    def check(self, way: Way, m: int) -> Check:
        """A way's results against FP64; F_B's input is F_A as the way rounded it."""
        qkvg, g1, fa_beta = way(self.x[:m], self.packed[0], self.f_b[0])
        used = GEOMETRY.f_a + GEOMETRY.beta
        whole = torch.cat([qkvg, fa_beta[:, :used]], dim=1)
        reports = [
            parity(whole, reference_gemm(self.x[:m], self.packed[0, : GEOMETRY.qkvg + used])),
            parity(g1, reference_gemm(fa_beta[:, : GEOMETRY.f_a], self.f_b[0])),
        ]
        return Check(
            all(report.ok for report in reports),
            max(report.worst_ulps for report in reports),
            max(report.worst_share for report in reports),
        )

    def graph(self, way: Way, m: int, chain: str) -> torch.cuda.CUDAGraph:
        """As many layers of ``way`` as there are copies, at M = ``m``."""
        x, h, written = self.x[:m].clone(), self.h[:m], []

        def norm(outputs: Outputs) -> None:
            link = chain_kernel.compiled_norm_link(self.gpu.arch.compile_target)
            link(outputs[0], h, x, torch.cuda.current_stream(self.device).cuda_stream)

        def layer(packed, f_b) -> None:
            if chain == LINKED and written:
                norm(written[-1])
            written.append(way(x, packed, f_b))

        if chain == LINKED:
            norm(way(x, self.packed[0], self.f_b[0]))  # compiled and loaded outside of the capture

        made = capture(lambda p=p, f=f: layer(p, f) for p, f in zip(self.packed, self.f_b))
        made.kept = (x, h, written)  # a graph holds addresses, not tensors
        return made


def bench_m(layers: Layers, m: int, chains: Sequence[str], replays: int = REPLAYS) -> list[KdaCell]:
    """Every way at M = ``m``, a cell for each of ``chains``. BenchError where one of ours is wrong."""
    ways = layers.ways(m)
    checks = {name: layers.check(way, m) for name, way in ways.items()}
    for name in OURS:
        if not checks[name].ok:
            raise BenchError(f"KDA {name} at M={m}: wrong by {checks[name].worst_share:.3g} times what is allowed")
    cells = []
    for chain in chains:
        graphs = {name: layers.graph(way, m, chain) for name, way in ways.items()}
        copies = len(layers.packed)
        cells.append(KdaCell(m, chain, copies, interleaved(graphs, copies, replays), checks))
    return cells


def run_kda(
    tokens: Sequence[int],
    gpu: Gpu,
    chains: Sequence[str],
    replays: int = REPLAYS,
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
) -> list[KdaCell]:
    """Every M of ``tokens`` in every chain; ``progress`` is told how many are behind. ValueError for an M above 16."""
    if max(tokens) > MAX_OVERLAP_TOKENS:
        raise ValueError(f"--kda: up to {MAX_OVERLAP_TOKENS} tokens, found {max(tokens)}")
    cells = []
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        problems = compile_ahead(overlap_units(gpu.arch))
        if problems:
            raise BenchError("; ".join(problems.values()))
        layers = Layers(gpu, max(tokens))
        for done, m in enumerate(tokens):
            progress(Shape(GEOMETRY.packed, GEOMETRY.hidden, ("in_proj_qkvgfab",)), done)
            cells += bench_m(layers, m, chains, replays)
    return cells


def limit_times(cells: Sequence[Mapping], limit: int) -> tuple[float, float]:
    """(overlap us, sequential us) that a limit of a record's ``cells`` rests on: at that M (at M = 1 for 0), in the
    chain where the overlap does worst."""
    found = [cell for cell in cells if cell["m"] == max(limit, 1)]
    if not found:
        raise ValueError(f"the record has no cell of M = {max(limit, 1)}")
    weakest = max(found, key=lambda cell: cell["overlap_over"][SEQUENTIAL])
    return weakest["timings"][OVERLAP]["us"], weakest["timings"][SEQUENTIAL]["us"]
