"""A tuning run: screen what the cost model leaves, refine the best tilings, time the finalists in two passes.

    screen   per token class: the best candidates by the model, and a few random ones that it would have left out
    refine   per token class: the variants of the best tilings
    final    per M: the finalists of its class in two separate passes, in the first one also in the linked chain

Everything that a stage needs is compiled before it, in parallel processes, which take seconds to start. So shapes go
through a stage together: through the first all of them, through the others so many that a run that is stopped has rows.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lowlat_gemm.arch import Arch, DeviceProperties
from lowlat_gemm.kernels import fused_a, split_k
from lowlat_gemm.kernels.compile_cache import CompileUnit

from ..checking import Shape
from .candidates import (
    SKINNY_TOKENS,
    Candidate,
    fused_a_candidates,
    screened_width,
    skinny_candidates,
    tilings,
    variants,
)
from .choose import choose_row, row_times
from .cost_model import predict_us, prune, rank_correlation
from .jobs import BACK_TO_BACK, LINKED, Job, JobResult
from .journal import Journal
from .outcome import ModelCheck, Outcome, Request
from .supervise import Supervisor
from .table_writer import RowResult
from .worker import chains_for

#: Candidates outside the pruned list that are timed to see what the model would have lost.
PROBES = 3
#: Tilings whose variants are timed, and how many candidates go on to every M of a class.
REFINED, FINALISTS, FINALISTS_IN_BOTH = 2, 3, 2
#: The same where K is tiny and a launch's latency decides: there the trigger changes which tiling wins.
REFINED_OF_TINY_K = 6
SCREEN_REPLAYS, FINAL_REPLAYS = 5, 15
PASSES = (1, 2)
#: K up to which a launch's latency decides, of which the model of ``split_k`` knows little.
TINY_K = 256
#: (bytes of a weight up to which, candidates of ``fused_a`` as a share of ``split_k``'s): the smaller the weight, the more
#: often warps that stream it into registers win.
FUSED_A_SHARES = ((6_000_000, 1.0), (12_000_000, 0.5), (math.inf, 0.17))
#: Shapes that go through the later stages together.
TOGETHER = 8


@dataclass
class Tuner:
    """Carries a request out. ``compile``: brings units into the store; ``progress(done, total, text)``: in units of one
    candidate to be screened."""

    request: Request
    arch: Arch
    device: DeviceProperties
    supervisor: Supervisor
    journal: Journal
    compile: Callable[[Iterable[CompileUnit], Callable[[int, int], None]], None]
    progress: Callable[[float, float, str], None] = lambda done, total, text: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began, self._done = self.clock(), 0.0
        self._probes: dict[str, frozenset[Candidate]] = {}
        self.supervisor.excluded |= self.journal.excluded
        self.outcome = Outcome(excluded=self.supervisor.excluded)

    def run(self) -> Outcome:
        shapes = list(self.request.shapes)
        screens = {shape: list(self._screens(shape)) for shape in shapes}
        self._compile(job for jobs in screens.values() for job in jobs)
        screened: dict[Shape, dict[Job, JobResult]] = {}
        for shape in shapes:
            if self._out_of_time():
                break
            screened[shape] = {job: self._measure(job) for job in screens[shape]}
            self._check_model(screened[shape])
        for first in range(0, len(shapes), TOGETHER):
            self._later_stages(shapes[first : first + TOGETHER], screened)
        self.progress(1, 1, "done")
        return self.outcome

    def _later_stages(self, shapes: Sequence[Shape], screened: Mapping[Shape, dict[Job, JobResult]]) -> None:
        """Refines and finishes the shapes that were screened, while there is time; the others are not reached."""
        begun = [shape for shape in shapes if shape in screened and not self._out_of_time()]
        refines = {shape: list(self._refines(screened[shape])) for shape in begun}
        self._compile(job for jobs in refines.values() for job in jobs)
        finals: dict[Shape, list[Job]] = {}
        for shape in begun:
            if self._out_of_time():
                break
            refined = {job: self._measure(job) for job in refines[shape]}
            finals[shape] = self._finals(shape, self._finalists(shape, screened[shape], refined))
        self._compile(job for jobs in finals.values() for job in jobs)
        for shape in shapes:
            if shape not in finals or self._out_of_time():
                self.outcome.not_reached.append(shape)
            else:
                self._finish(shape, finals[shape])

    def _screens(self, shape: Shape) -> Iterator[Job]:
        n, k = shape.n, shape.k
        for one in self.request.screens:
            m, most = one.screened, self.request.most
            chosen, probes = self._pruned(tilings(self.arch, n, k, m), n, k, m, most, PROBES)
            warps = fused_a_candidates(self.arch, n, k, m)
            share = next(share for size, share in FUSED_A_SHARES if 2 * n * k <= size)
            chosen += self._pruned(warps, n, k, m, math.ceil(most * share), 0)[0]
            job = self._job("screen", shape, m, [*chosen, *probes], SCREEN_REPLAYS)
            self._probes[job.identity] = frozenset(probes)
            yield job
        least = self.request.tokens[0]
        few = skinny_candidates(self.arch, n, k, least, self.request.known.get((n, k), ()))
        if few:
            yield self._job("screen", shape, least, few[: max(4, self.request.most // 3)], SCREEN_REPLAYS, turn=1)

    def _pruned(self, candidates, n: int, k: int, m: int, most: int, probes: int):
        return prune(candidates, n, k, m, self.device, most, probes) if candidates else ([], [])

    def _job(
        self, stage: str, shape: Shape, m: int, candidates: Iterable[Candidate], replays: int,
        *, turn: int = 0, residual: bool = False, chains: tuple[str, ...] = (BACK_TO_BACK,),
    ) -> Job:  # fmt: skip
        unique = tuple(dict.fromkeys(candidates))
        return Job(stage, shape.n, shape.k, m, residual, turn, self.request.tokens[-1], replays, chains, unique)

    def _refines(self, screened: dict[Job, JobResult]) -> Iterator[Job]:
        """The variants of each class's best tilings, beside what they have to beat."""
        for job, result in screened.items():
            ranked = _ranked(result)
            again = ranked[:FINALISTS]
            refined = REFINED_OF_TINY_K if job.k <= TINY_K else REFINED
            best = [one for one in ranked if len(variants(one, job.k)) > 1][:refined]
            found = [variant for one in best for variant in variants(one, job.k)]
            found = [one for one in found if one.why_not(self.arch, job.n, job.k, job.m) is None]
            if found:
                unique = tuple(dict.fromkeys([*again, *found]))
                yield replace(job, stage="refine", chains=chains_for(job.n, job.k), candidates=unique)

    def _finals(self, shape: Shape, finalists: Mapping[int, Sequence[Candidate]]) -> list[Job]:
        """Two passes over every M of a shape. ``finalists``: by width of token tile at which they were screened."""
        n, k = shape.n, shape.k
        jobs = []
        for turn in PASSES:
            for residual in self._residuals(shape):
                for one in self.request.classes:
                    for m in one.tokens:
                        found = [c.narrowed(one.columns) for c in finalists[screened_width(one.columns)]]
                        fit = [c for c in dict.fromkeys(found) if c.why_not(self.arch, n, k, m, residual) is None]
                        job = self._job(
                            "final", shape, m, fit[:: 1 if turn == 1 else -1], FINAL_REPLAYS,
                            turn=turn, residual=residual, chains=chains_for(n, k)[: 2 if turn == 1 else 1],
                        )  # fmt: skip
                        jobs.append(job)
        return jobs

    def _residuals(self, shape: Shape) -> tuple[bool, ...]:
        return (False, True) if (shape.n, shape.k) in self.request.residual else (False,)

    def _finish(self, shape: Shape, finals: Iterable[Job]) -> None:
        """Measures the finals and chooses the shape's rows."""
        n, k = shape.n, shape.k
        for job in finals:
            passes = self.outcome.passes.setdefault((n, k, job.residual), {})
            passes.setdefault(job.m, []).append(self._measure(job))
        label = "/".join(dict.fromkeys(name.split()[0] for name in shape.names))
        for residual in self._residuals(shape):
            times = row_times(self.outcome.passes[n, k, residual])
            # What broke at a later M is not trusted at an earlier one.
            times = {m: {c: t for c, t in at.items() if c not in self.supervisor.excluded} for m, at in times.items()}
            chosen = choose_row(times, self.request.classes)
            self.outcome.rows.append(RowResult(n, k, label, residual, tuple(sorted(times)), chosen, times, self.request.widths))

    def _finalists(
        self, shape: Shape, screened: dict[Job, JobResult], refined: dict[Job, JobResult]
    ) -> dict[int, list[Candidate]]:
        """By class: the fastest, those that are fast in both chains, the fastest of the order of additions that a whole row
        could have, the ``split_k`` configs of tables, and for few tokens the fastest ``fused_a`` and ``skinny``."""
        by_class: dict[int, list[Candidate]] = {}
        pools: dict[int, dict[Candidate, float]] = {}
        for one in self.request.screens:
            pool: dict[Candidate, float] = {}
            both: dict[Candidate, float] = {}
            for results in (screened, refined):  # what was timed again counts as it was the last time
                for job, result in results.items():
                    if job.m == one.screened and job.turn == 0:
                        pool |= {c: us[BACK_TO_BACK] for c, us in result.times.items()}
                        both |= {c: us[BACK_TO_BACK] * us[LINKED] for c, us in result.times.items() if LINKED in us}
            pools[one.columns] = pool
            by_class[one.columns] = [*sorted(pool, key=pool.get)[:FINALISTS], *sorted(both, key=both.get)[:FINALISTS_IN_BOTH]]
        order = _cheapest_order(list(pools.values()))
        for columns, pool in pools.items():
            fitting = [one for one in sorted(pool, key=pool.get) if one.invariance == order]
            by_class[columns] += fitting[:1] if order is not None else []
            by_class[columns] += self._known(shape, columns)
        few = next((result for job, result in screened.items() if job.turn == 1), None)
        if self.request.tokens[0] <= SKINNY_TOKENS:
            first = self.request.screens[0].columns
            warps = [one for one in sorted(pools[first], key=pools[first].get) if one.backend == fused_a.NAME]
            by_class[first] += warps[:1] + (_ranked(few)[:1] if few is not None else [])
        return {columns: list(dict.fromkeys(found)) for columns, found in by_class.items()}

    def _known(self, shape: Shape, columns: int) -> list[Candidate]:
        """The ``split_k`` configs that tables name for a shape in a class: they are measured beside the others."""
        known = self.request.known.get((shape.n, shape.k), ())
        tiled = [one for one in known if one.backend == split_k.NAME]
        return [one for one in tiled if screened_width(one.config.token_columns) == columns]

    def _check_model(self, screened: dict[Job, JobResult]) -> None:
        for job, result in screened.items():
            for backend in dict.fromkeys(one.backend for one in result.times):
                us = {one: chains[BACK_TO_BACK] for one, chains in result.times.items() if one.backend == backend}
                predicted = [predict_us(one, job.n, job.k, job.m, self.device) for one in us]
                probes = self._probes.get(job.identity, frozenset()) & us.keys()
                correlation = rank_correlation(predicted, list(us.values()))
                lost = min(us, key=us.get) in probes
                self.outcome.model.append(ModelCheck(job.n, job.k, job.m, backend, correlation, len(probes), lost))

    def _measure(self, job: Job) -> JobResult:
        self.progress(self._done, max(self._total(), self._done), str(job))
        result = self.journal.result(job)
        if result is None:
            with self._clocked(job.stage):
                result = self.supervisor.run(job)
            self.journal.add(job, result)
            self.outcome.measured_jobs += 1
            self.outcome.measured_candidates += len(job.candidates)
        else:
            self.outcome.journal_jobs += 1
            self.outcome.journal_candidates += len(job.candidates)
        self._done += _weight(job.stage, len(job.candidates))
        return replace(result, times={c: us for c, us in result.times.items() if c not in self.supervisor.excluded})

    def _total(self) -> float:
        """Expected work: the stages that are still to come counted at their usual size."""
        classes, most = len(self.request.screens), self.request.most
        finals = len(PASSES) * (len(self.request.tokens)) * (len(self.request.shapes) + len(self.request.residual))
        screens = len(self.request.shapes) * classes * (_weight("screen", most + PROBES) + _weight("refine", 24))
        return screens + finals * _weight("final", FINALISTS + 1)

    def _compile(self, jobs: Iterable[Job]) -> None:
        units = {
            one.unit(self.arch, job.n, job.k, job.m, job.residual)
            for job in jobs
            if self.journal.result(job) is None
            for one in job.candidates
            if one not in self.supervisor.excluded
        }
        if units:
            total = max(self._total(), self._done)
            with self._clocked("compile"):
                self.compile(units, lambda done, of: self.progress(self._done, total, f"compiled {done} of {of}"))

    @contextlib.contextmanager
    def _clocked(self, stage: str) -> Iterator[None]:
        began = self.clock()
        yield
        self.outcome.seconds[stage] = self.outcome.seconds.get(stage, 0.0) + self.clock() - began

    def _out_of_time(self) -> bool:
        return self.request.minutes is not None and self.clock() - self._began > 60 * self.request.minutes


def _weight(stage: str, candidates: int) -> float:
    """Work of a job: finals replay more often, they and the refined in two chains, and none without a start of its own."""
    return 4 + candidates * {"final": 3, "refine": 2}.get(stage, 1)


def _ranked(result: JobResult) -> list[Candidate]:
    return sorted(result.times, key=lambda one: result.times[one][BACK_TO_BACK])


def _cheapest_order(pools: Sequence[dict[Candidate, float]]):
    """The order of additions that every class has a candidate for, at the least cost over all, or None."""
    costs: dict = {}
    for pool in pools:
        best: dict = {}
        for one, us in pool.items():
            if one.invariance is not None:
                best[one.invariance] = min(us, best.get(one.invariance, us))
        for order, us in best.items():
            costs.setdefault(order, []).append(us / min(pool.values()))
    whole = {order: sum(found) for order, found in costs.items() if len(found) == len(pools)}
    return min(whole, key=lambda order: (whole[order], repr(order)), default=None)
