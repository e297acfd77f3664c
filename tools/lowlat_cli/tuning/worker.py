"""The child of a tuning run: judges candidates against FP64, then times them. It may hang or die; its parent watches.

    python -m lowlat_cli.tuning.worker ORDINAL        jobs on stdin, events on stdout, one JSON object a line

Events: ``ready``; for each job ``operands``, then for each candidate ``begun`` and one of ``passed``, ``refused`` (this
one is wrong or does not compile) or ``broken`` (the process cannot go on: it ends); then ``timing``, ``measured``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable

import torch

from lowlat_gemm.kernels.compile_cache import CompileError
from lowlat_gemm.reference import parity

from ..checking import Shape
from ..environment import find_gpus
from .candidates import Candidate
from .jobs import BACK_TO_BACK, FLOOR, LINKED, Job

Emit = Callable[[dict], None]
#: What the link between two GEMMs can take: whole vectors of 8, K up to 16384 (``chain_kernel``).
LINK_MAX_K = 16_384
#: Launches of one candidate that are enough for a median, and the fewest replays: a replay of a small weight's graph is
#: thousands of launches long.
ENOUGH_LAUNCHES, LEAST_REPLAYS = 8192, 5


class GpuBench:
    """What the child measures with. Tests put one in its place that needs no GPU and none of what this one imports."""

    def __init__(self, ordinal: int):
        from .. import measure

        torch.cuda.set_device(ordinal)
        self.gpu = find_gpus()[0][ordinal]
        self.interleaved, self.replay_us = measure.interleaved, measure.replay_us
        self._shape_copies = measure.ShapeCopies
        self._made: tuple | None = None

    def copies(self, n: int, k: int, max_tokens: int):
        """The operands of a shape; those of the last one are kept, and no others."""
        if self._made is None or self._made[0] != (n, k, max_tokens):
            self._made = None
            torch.cuda.empty_cache()
            self._made = ((n, k, max_tokens), self._shape_copies(Shape(n, k, ()), self.gpu, max_tokens))
        return self._made[1]

    def kernel(self, candidate: Candidate, n: int, k: int, m: int, residual: bool):
        """run(x, weight, residual, y). CompileError when it cannot be had."""
        from lowlat_gemm.execute import COMPILE_CACHE, launch

        compiled = COMPILE_CACHE.get(candidate.unit(self.gpu.arch, n, k, m, residual))
        return lambda x, w, r, y: launch(compiled, x, w, r, y)


def library_runs(residual) -> dict[str, Callable]:
    """What callers have without us, as run(x, weight, y)."""
    if residual is None:
        return {"mm": lambda x, w, y: torch.mm(x, w.T, out=y)}
    return {
        "addmm": lambda x, w, y: torch.addmm(residual, x, w.T, out=y),
        "mm + add": lambda x, w, y: torch.mm(x, w.T, out=y).add_(residual),
    }


class _Group:
    """One job in the child."""

    def __init__(self, bench, job: Job, emit: Emit):
        self.bench, self.job, self.emit = bench, job, emit
        self.copies = bench.copies(job.n, job.k, job.max_tokens)
        self.x = self.copies.x[: job.m]
        reference = self.copies.reference.rows(job.m)
        self.residual = None
        if job.residual:
            generator = torch.Generator(self.x.device).manual_seed(job.m)
            drawn = torch.randn(job.m, job.n, generator=generator, device=self.x.device)
            self.residual = drawn.bfloat16()
            reference = reference.plus(self.residual)
        self.reference = reference
        self.graphs: dict[tuple, object] = {(FLOOR, BACK_TO_BACK): self.copies.floor}
        self.runs: dict[Candidate, tuple[Callable, torch.Tensor]] = {}

    def _poisoned(self) -> torch.Tensor:
        return torch.full((self.job.m, self.job.n), float("nan"), dtype=self.x.dtype, device=self.x.device)

    def add_baselines(self) -> None:
        for name, run in library_runs(self.residual).items():
            y = self._poisoned()
            run(self.x, self.copies.weights[0], y)
            for chain in self.job.chains:
                self.graphs[name, chain] = getattr(self.copies, chain)(run, self.job.m, y)

    def add(self, candidate: Candidate) -> str | None:
        """Judges a candidate and captures its chains; why it is refused, or None."""
        try:
            kernel = self.bench.kernel(candidate, self.job.n, self.job.k, self.job.m, self.job.residual)
        except CompileError as error:
            return f"does not compile: {str(error).splitlines()[0]}"

        residual = self.residual  # not self: a graph must go when its job is done, without waiting for a collection

        def run(x, w, y):
            return kernel(x, w, residual, y)

        y = self._poisoned()
        run(self.x, self.copies.weights[0], y)
        report = parity(y, self.reference)
        if not report.ok:
            return f"wrong: {report}"
        for chain in self.job.chains:
            out = y if chain == BACK_TO_BACK else self._poisoned()
            graph = getattr(self.copies, chain)(run, self.job.m, out)
            self.bench.replay_us(graph, self.copies.copies)  # alone, so that a hang has a name
            self.graphs[candidate, chain] = graph
        self.runs[candidate] = (run, y)
        return None

    def timed(self) -> dict[tuple, float]:
        launches = self.copies.copies
        replays = min(self.job.replays, max(LEAST_REPLAYS, -(-ENOUGH_LAUNCHES // launches)))
        timings = self.bench.interleaved(self.graphs, launches, replays)
        return {name: timing.us for name, timing in timings.items()}

    def overlapped(self, candidate: Candidate) -> str | None:
        """Whether the last launch of a chain, in the middle of its neighbours, gave the bits of one that runs alone."""
        run, y = self.runs[candidate]
        alone = self._poisoned()
        run(self.x, self.copies.weights[-1], alone)
        return None if torch.equal(alone, y) else "wrong: other bits in a chain of launches than alone"


def measure(bench, job: Job, emit: Emit) -> None:
    """Carries out one job. Raises what a broken device raises; the parent knows the candidate from ``begun``."""
    group = _Group(bench, job, emit)
    group.add_baselines()
    emit({"event": "operands"})
    for candidate in job.candidates:
        emit({"event": "begun", "candidate": candidate.to_json()})
        reason = group.add(candidate)
        if reason is None:
            emit({"event": "passed"})
        else:
            emit({"event": "refused", "candidate": candidate.to_json(), "reason": reason})
    emit({"event": "timing"})
    us = group.timed()
    times = []
    for candidate in group.runs:
        reason = group.overlapped(candidate)
        if reason is None:
            chains = {chain: round(us[candidate, chain], 4) for chain in job.chains}
            times.append(candidate.to_json() | {"us": chains})
        else:
            emit({"event": "refused", "candidate": candidate.to_json(), "reason": reason})
    others = {name: round(t, 4) for (name, chain), t in us.items() if isinstance(name, str) and chain == BACK_TO_BACK}
    linked = {name: round(t, 4) for (name, chain), t in us.items() if isinstance(name, str) and chain == LINKED}
    emit({"event": "measured", "result": {"times": times, "others": others, "linked_others": linked}})


def chains_for(n: int, k: int) -> tuple[str, ...]:
    """The chains that a shape can be timed in."""
    return (BACK_TO_BACK, LINKED) if n % 8 == 0 and k % 8 == 0 and k <= LINK_MAX_K else (BACK_TO_BACK,)


def serve(bench, lines: Iterable[str], emit: Emit) -> int:
    """Carries out the jobs in ``lines``; the exit code."""
    emit({"event": "ready"})
    for line in lines:
        try:
            measure(bench, Job.from_json(json.loads(line)), emit)
        except Exception as error:  # a device that has seen an illegal access answers nothing any more
            said = (str(error).splitlines() or [""])[0]
            emit({"event": "broken", "reason": f"{type(error).__name__}: {said}"})
            return 1
    return 0


def main(make_bench=lambda: GpuBench(int(sys.argv[1]))) -> None:
    # Events alone go to the parent: what libraries print belongs to stderr.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    bench = make_bench()
    with torch.inference_mode():
        code = serve(bench, sys.stdin, lambda event: print(json.dumps(event), file=events, flush=True))
    events.flush()
    os._exit(code)  # a broken device must not hold the process in its destructors


if __name__ == "__main__":
    main()
