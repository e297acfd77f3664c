"""``lowlat bench --host``: what one call costs the process that makes it, before any GPU work is waited for.

For each (N, K, M) that runs on a kernel of ours: wall time of a batch of calls without synchronisation, over the
calls, for ``F.linear``, a module with an installed plan, a plain ``torch.nn.Linear``, and ``try_low_latency_gemm``.
Batches take turns, and the device is idle before each. A batch is kept short, for once the launch queue is full the
host waits for the GPU; the weight is one, and warm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from lowlat_gemm import enable_low_latency_gemm, try_low_latency_gemm
from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import compile_ahead, device_plan
from lowlat_gemm.operands import Refusal

from .checking import Shape
from .environment import Gpu
from .measure import Timing

#: Calls of one batch.
CALLS = 128
ROUNDS = 15
F_LINEAR, LINEAR, PLANNED_FORWARD, PLANNED, TRY = (
    "F.linear", "torch.nn.Linear", "PlannedLinear.forward", "PlannedLinear", "try_low_latency_gemm",
)  # fmt: skip
#: What is compared with what: a forward with the function, a module's call with a module's call.
PAIRS = {"forward_over_f_linear": (PLANNED_FORWARD, F_LINEAR), "module_over_module": (PLANNED, LINEAR)}


@dataclass(frozen=True)
class HostCell:
    """Host microseconds a call at one (N, K, M)."""

    n: int
    k: int
    m: int
    backend: str
    timings: dict[str, Timing]

    def ratio(self, pair: str) -> float:
        ours, theirs = PAIRS[pair]
        return self.timings[ours].us / self.timings[theirs].us

    def to_json(self) -> dict:
        timings = {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()}
        ratios = {pair: round(self.ratio(pair), 4) for pair in PAIRS}
        return {"n": self.n, "k": self.k, "m": self.m, "backend": self.backend, "timings": timings, **ratios}


def batch_us(call: Callable[[], object], calls: int) -> float:
    """Host microseconds a call over a batch, begun on an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) * 1e6 / calls


def in_turns(calls: Mapping[str, Callable[[], object]], batch: int = CALLS, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Times ``calls`` batch by batch, each round in another order; the first batch of each is not counted."""
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        batch_us(calls[name], batch)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(batch_us(calls[name], batch))
    return {name: Timing.of(values) for name, values in samples.items()}


def host_cell(planned: torch.nn.Linear, plain: torch.nn.Linear, x: torch.Tensor, backend: str) -> HostCell:
    """Times the ways to compute one linear of ``x`` [M, K]. RuntimeError where a call of ours does not run a kernel."""
    weight = planned.weight
    (m, k), n = x.shape, weight.shape[0]
    if try_low_latency_gemm(x, weight) is None:
        raise RuntimeError(f"{n}x{k} M={m}: the call fell back, {backend} was expected")
    calls = {
        F_LINEAR: lambda: F.linear(x, weight),
        LINEAR: lambda: plain(x),
        PLANNED_FORWARD: lambda: planned.forward(x),
        PLANNED: lambda: planned(x),
        TRY: lambda: try_low_latency_gemm(x, weight),
    }
    return HostCell(n, k, m, backend, in_turns(calls))


def run_host(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
) -> list[HostCell]:
    """Every shape at every M that runs on a kernel of ours; ``progress`` is told how many (shape, M) are behind."""
    cells, done = [], 0
    with torch.cuda.device(gpu.ordinal), torch.inference_mode():
        device = torch.device("cuda", gpu.ordinal)
        # At once for all shapes: installing compiles a module's whole plan, and would start processes for each shape.
        plans = [device_plan(gpu.ordinal, shape.n, shape.k) for shape in shapes]
        compile_ahead(unit for plan in plans if not isinstance(plan, Refusal) for unit in plan.units(residual=False))
        for shape in shapes:
            progress(shape, done)
            done += len(tokens)
            decisions = {m: explain(m, shape.n, shape.k) for m in tokens}
            if not any(decision.runs for decision in decisions.values()):
                continue
            planned, plain = (
                torch.nn.Linear(shape.k, shape.n, bias=False, dtype=torch.bfloat16, device=device) for _ in range(2)
            )
            enable_low_latency_gemm(planned, torch.bfloat16)
            for m, decision in decisions.items():
                if decision.runs:
                    x = torch.randn(m, shape.k, device=device).bfloat16()
                    cells.append(host_cell(planned, plain, x, decision.backend))
    return cells


def medians(cells: Sequence[HostCell]) -> dict[str, float]:
    """Over all cells: median host microseconds of each way, and the geometric mean of each ratio."""
    if not cells:
        return {}
    found = {name: round(statistics.median(cell.timings[name].us for cell in cells), 3) for name in cells[0].timings}
    ratios = {pair: round(statistics.geometric_mean(cell.ratio(pair) for cell in cells), 4) for pair in PAIRS}
    return found | ratios
