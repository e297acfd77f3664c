"""What parts of ``split_k`` cost on SM90: builds of its kernel with one part left out, timed beside the whole in one run.

    wait      the tokens are loaded without waiting for the previous kernel
    weights   no weights are loaded, and the next kernel is let go at once: what is left is latency, and no traffic
    tokens    no tokens are loaded
    exchange  ranks keep their partial sums (only where K is split)
    store     y is not written

Such a build computes nothing of use and never leaves this module. What the whole takes longer is what the part costs
there, beside everything that hides it: costs do not add up to the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from unittest import mock

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from lowlat_gemm.execute import COMPILE_CACHE, device_plan, launch
from lowlat_gemm.kernels import device, split_k
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.compiling import compile_options
from lowlat_gemm.kernels.split_k_pipeline import compile_unit_of
from lowlat_gemm.kernels.split_k_sm90_kernel import SplitKSm90
from lowlat_gemm.operands import Refusal
from lowlat_gemm.reference import parity

from .bench import BenchError
from .checking import Shape
from .environment import Gpu
from .measure import REPLAYS, Mode, ShapeCopies, Timing, interleaved

FLOOR, WHOLE = "floor", "whole"


class _WithoutLoads(SplitKSm90):
    @cute.jit
    def give_away(self, full, empty, ring, stage_count):
        """What the producer of a ring of so many stages does, without the loads."""
        barrier, freed, freed_phase = Int32(0), *self.first_freed(ring)
        for _ in cutlass.range(stage_count, unroll=1):
            cute.arch.mbarrier_wait(empty + freed, freed_phase)
            freed = self.following(freed, self.config.barrier_ring)
            if freed == 0:
                freed_phase ^= 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full + barrier)
            barrier = self.following(barrier, self.config.barrier_ring)


class _WithoutTokens(_WithoutLoads):
    @cute.jit
    def load_tokens(self, tma_x, tXg, tXs, full, empty, first_stage, stage_count):
        self.give_away(full, empty, self.config.token_ring, stage_count)


class _WithoutWeights(_WithoutLoads):
    @cute.jit
    def load_weights(self, tma_w, tWg, tWs, full, empty, previous, tensor, first_stage, stage_count):
        # The next kernel is let go at once: there is no traffic that it could meet.
        device.let_next_kernel_start()
        self.give_away(full, empty, self.config.stages, stage_count)


class _WithoutExchange(SplitKSm90):
    @cute.jit
    def send_partials(self, acc, landing, landed, rank, warpgroup_index, thread_in_group):
        pass

    @cute.jit
    def add_partials(self, acc, landing, rank, warpgroup_index, thread_in_group):
        pass


class _WithoutStore(SplitKSm90):
    @cute.jit
    def store(self, acc, staged, mR, mY, rank, owned, token_tile, first_row, warpgroup_index, thread_in_group):
        pass


#: Part -> the kernel's class, and a device primitive that is nothing while it is compiled.
_BUILDS = {
    "wait": (SplitKSm90, "wait_for_previous_kernel"),
    "weights": (_WithoutWeights, None),
    "tokens": (_WithoutTokens, None),
    "exchange": (_WithoutExchange, "wait_for_cluster_data"),  # nothing lands that could be waited for
    "store": (_WithoutStore, None),
}
PARTS = tuple(_BUILDS)


@functools.lru_cache(maxsize=None)
def compile_without(part: str, unit: CompileUnit, options: str = ""):
    """The kernel of ``unit`` (of ``split_k`` on SM90) without ``part``. Raises what the compiler raises."""
    kernel, absent = _BUILDS[part]
    with mock.patch.object(device, absent, lambda *args: None) if absent else contextlib.nullcontext():
        options = f"{compile_options(unit.target)} {options}".rstrip()
        return compile_unit_of(kernel(unit.spec), unit, cute.compile, options)


@dataclass(frozen=True)
class PartsCell:
    """One (N, K, M) in one mode. ``timings``: microseconds a launch of the floor, the whole kernel, and of it without each
    part, by the part's name."""

    n: int
    k: int
    m: int
    mode: Mode
    config: dict[str, int]
    timings: dict[str, Timing]

    @property
    def costs(self) -> dict[str, float]:
        """Microseconds that the whole takes longer than without a part."""
        return {part: self.timings[WHOLE].us - self.timings[part].us for part in PARTS if part in self.timings}

    def to_json(self) -> dict:
        timings = {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()}
        costs = {part: round(us, 3) for part, us in self.costs.items()}
        return {**vars(self), "mode": asdict(self.mode), "timings": timings, "costs": costs}


def parts_of(unit: CompileUnit) -> tuple[str, ...]:
    return tuple(part for part in PARTS if part != "exchange" or unit.spec.config.split > 1)


def run_parts(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    modes: Sequence[Mode],
    replays: int = REPLAYS,
    say: Callable[[PartsCell], None] = lambda cell: None,
) -> list[PartsCell]:
    """A cell for every shape, M and mode where the table has ``split_k``. BenchError where the whole kernel is wrong."""
    cells = []
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        for shape in shapes:
            plan = device_plan(gpu.ordinal, shape.n, shape.k)
            entries = {m: None if isinstance(plan, Refusal) else plan.entry(m, False) for m in tokens}
            entries = {m: one for m, one in entries.items() if one is not None and one.cell.backend == split_k.NAME}
            if not entries:
                continue
            copies = ShapeCopies(shape, gpu, max(entries))
            for m, entry in entries.items():
                for cell in _cells(copies, m, entry, modes, replays):
                    cells.append(cell)
                    say(cell)
            del copies
            torch.cuda.empty_cache()
    return cells


def _cells(copies: ShapeCopies, m: int, entry, modes: Sequence[Mode], replays: int):
    kernels = {WHOLE: COMPILE_CACHE.get(entry.unit)}
    kernels |= {part: compile_without(part, entry.unit) for part in parts_of(entry.unit)}
    y = copies.empty_output(m)
    report = parity(launch(kernels[WHOLE], copies.x[:m], copies.weights[0], None, y.fill_(float("nan"))), copies.reference.rows(m))
    if not report.ok:
        raise BenchError(f"split_k at M={m} N={copies.shape.n} K={copies.shape.k}: {report}")
    for mode in modes:
        graphs = {FLOOR: copies.floor_graph(m, mode)}
        for name, kernel in kernels.items():
            graphs[name] = copies.graph(lambda x, w, out, kernel=kernel: launch(kernel, x, w, None, out), m, y, mode)
        timings = interleaved(graphs, copies.copies, replays)
        yield PartsCell(copies.shape.n, copies.shape.k, m, mode, dict(entry.cell.config), timings)
