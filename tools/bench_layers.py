"""A stack of Kimi-K3-shaped layers under CUDA graph, with and without the library: microseconds a layer, by M.

    bazelw run //tools:bench_layers -- --tokens 1-64 --record hw_matrix/records/sm90/h200-layers-tp8.json
    PYTHONPATH=tools python -m tools.bench_layers ...      # without Bazel

The layers are those of one rank (layer_stack.py says what is in them and what is not). Both stacks share
their weights (more than L2 holds) and differ only in what runs a projection: torch's own GEMM, or the library where
its table has a kernel and torch's own where it has none, as the vLLM adapter does it. Before anything is timed, every
projection's output that a kernel of ours computed is judged against FP64, and the decisions that were taken are
compared with what ``explain`` says. Needs a GPU of a served generation. Exit code 1: something was wrong; 2: it could
not be run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lowlat_cli import graphs
from lowlat_cli.measure import REPLAYS, Timing, interleaved
from lowlat_cli.parsing import tokens as parse_tokens
from lowlat_cli.record import command_line, hand_over, make_layers_record
from lowlat_gemm.dispatch import explain
from lowlat_gemm.execute import run_or_refuse
from lowlat_gemm.operands import Refusal
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.torch_op import linear_or_refuse
from lowlat_gemm.warmup import request_low_latency_warmup
from tools.layer_stack import Extents, Stack, TorchGemms

WITH, WITHOUT = "with", "without"


class Wrong(RuntimeError):
    """A result outside of its bound, or a decision that is not the one that ``explain`` gives."""


class LibraryGemms(TorchGemms):
    """The library where it has a kernel, as the vLLM adapter calls it. ``judge``: check results and decisions."""

    def __init__(self, judge: bool = False):
        self.judge = judge
        #: projection -> (backend or None, why torch ran or None)
        self.decisions: dict[str, tuple[str | None, str | None]] = {}

    def linear(self, name, x, weight):
        y = linear_or_refuse(x, weight)
        self._note(name, x, weight, None, y)
        return super().linear(name, x, weight) if type(y) is Refusal else y

    def linear_residual(self, name, x, weight, residual):
        y = run_or_refuse(x, weight, residual)
        self._note(name, x, weight, residual, y)
        return super().linear_residual(name, x, weight, residual) if type(y) is Refusal else y

    def _note(self, name, x, weight, residual, y) -> None:
        if not self.judge:
            return
        m, (n, k) = x.shape[0], weight.shape
        where = f"{name} at M={m} N={n} K={k}"
        wanted, ran = explain(m, n, k, has_residual=residual is not None), type(y) is not Refusal
        if wanted.runs != ran:
            raise Wrong(f"{where}: explain says {wanted.backend if wanted.runs else wanted.refusal}, the call {y if not ran else 'ran'}")
        if ran and name not in self.decisions:  # one layer of a kind stands for the others
            report = parity(y, reference_gemm(x, weight, residual))
            if not report.ok:
                raise Wrong(f"{where}: {report}")
        taken = (wanted.backend, None) if ran else (None, str(y))
        if self.decisions.setdefault(name, taken) != taken:
            raise Wrong(f"{where}: {taken} in one layer, {self.decisions[name]} in another")


@dataclass(frozen=True)
class LayersCell:
    """One M. ``timings``: microseconds a layer with and without the library; ``decisions``: the backend of each
    projection, None where torch's own GEMM runs, with the reason in ``reasons``."""

    m: int
    layers: int
    weight_bytes: int
    timings: dict[str, Timing]
    decisions: dict[str, str | None]
    reasons: dict[str, str]

    @property
    def ratio(self) -> float:
        """Time with the library over the time without it."""
        return self.timings[WITH].us / self.timings[WITHOUT].us

    def to_json(self) -> dict:
        timings = {name: {key: round(us, 3) for key, us in asdict(t).items()} for name, t in self.timings.items()}
        return {**vars(self), "timings": timings, "with_over_without": round(self.ratio, 4)}


def bench_m(stack: Stack, x, replays: int = REPLAYS) -> LayersCell:
    """Both stacks at one M, x: [M, hidden]. Raises Wrong before anything is timed."""
    judged = LibraryGemms(judge=True)
    stack.forward(judged, x)
    captured = {}
    for name, gemms in ((WITH, LibraryGemms()), (WITHOUT, TorchGemms())):
        stack.forward(gemms, x)  # libraries set themselves up outside of the capture
        captured[name] = graphs.capture([lambda gemms=gemms: stack.forward(gemms, x)])
    timings = interleaved(captured, len(stack.layers), replays)
    decisions = {name: backend for name, (backend, _) in judged.decisions.items()}
    reasons = {name: reason for name, (_, reason) in judged.decisions.items() if reason is not None}
    return LayersCell(x.shape[0], len(stack.layers), stack.weight_bytes, timings, decisions, reasons)


def run(extents: Extents, layers: int, counts: Sequence[int], device, replays: int = REPLAYS, say=lambda cell: None):
    """A cell for each of ``counts``; ``say`` is told each one."""
    with torch.inference_mode():
        stack = Stack(extents, layers, device)
        for weight in {tuple(weight.shape): weight for weight in stack.weights()}.values():
            request_low_latency_warmup(weight)
        x = torch.randn(max(counts), extents.hidden, generator=torch.Generator(device).manual_seed(1), device=device)
        x, cells = x.bfloat16(), []
        for m in counts:
            cells.append(bench_m(stack, x[:m], replays))
            say(cells[-1])
    return cells


def line(cell: LayersCell) -> str:
    """One cell for people."""
    ran = len(cell.decisions) - len(cell.reasons)
    times = f"without {cell.timings[WITHOUT].us:8.2f} us, with {cell.timings[WITH].us:8.2f} us, ratio {cell.ratio:.3f}"
    return f"M = {cell.m:2}: {times}; {ran} of {len(cell.decisions)} projections on our kernels"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_layers", description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size")
    parser.add_argument("--layers", type=int, default=8, help="layers of the stack")
    parser.add_argument("--tokens", default="1-64", help="token counts, such as 1,2,4-8")
    parser.add_argument("--record", type=Path, help="file for the JSON record")
    asked = parser.parse_args()
    if folder := os.environ.get("BUILD_WORKING_DIRECTORY"):  # `bazel run` starts in its runfiles
        os.chdir(folder)
    from lowlat_cli.environment import gpu_for_kernels

    try:
        counts, extents = parse_tokens(asked.tokens), Extents.of_kimi_k3(asked.tp)
    except ValueError as error:
        parser.error(str(error))
    gpu, problem = gpu_for_kernels()
    if problem is not None:
        print(f"bench_layers: {problem}", file=sys.stderr)
        return 2
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    with torch.cuda.device(gpu.ordinal):
        try:
            device = torch.device("cuda", gpu.ordinal)
            cells = run(extents, asked.layers, counts, device, say=lambda cell: print(line(cell), flush=True))
        except Wrong as error:
            print(f"bench_layers: {error}", file=sys.stderr)
            return 1
    command = command_line("python -m tools.bench_layers", sys.argv[1:])
    record = make_layers_record(command, cells, gpu, started, time.monotonic() - clock)
    hand_over(record, asked.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
