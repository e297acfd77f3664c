"""What a report says, as data: per generation the cells by proof and provenance, errors, times, and what changed."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cases import optional_count
from lowlat_gemm.arch import ARCHES, Arch
from lowlat_gemm.tables import PROVENANCE_KINDS

from .coverage import RECORDS, CellState, Proof, Record, cell_key, cell_states, counts, kernel_sources, load_records
from .runners import Runner, load_runners

FLOOR, OURS, CUBLAS = "floor", "ours", "cublas"
#: A change of a time below this is the spread of two runs.
NOISE = 0.03
#: Cells that two records must both have timed to be compared.
IN_COMMON = 10


@dataclass(frozen=True)
class Times:
    """Microseconds of one (N, K, M) in one benchmark: cold weights, PDL, GEMM after GEMM. None: nothing like it ran."""

    n: int
    k: int
    m: int
    floor: float
    ours: float | None
    cublas: float | None
    backend: str | None
    record: Record

    def over_floor(self, who: str) -> float | None:
        time = getattr(self, who)
        return None if time is None else time / self.floor

    @property
    def over_cublas(self) -> float | None:
        return None if self.ours is None or self.cublas is None else self.ours / self.cublas


@dataclass(frozen=True)
class Generation:
    """One GPU generation."""

    arch: Arch
    runner: Runner
    states: tuple[CellState, ...]
    records: tuple[Record, ...]
    times: tuple[Times, ...]
    changes: tuple[str, ...]

    @property
    def optional(self) -> int:
        """Optional cells of the generation's tables; they are not among its cells, and no record shows any of them."""
        return optional_count(self.arch)

    @property
    def proofs(self) -> dict[Proof, int]:
        return counts(self.states)

    @property
    def provenances(self) -> dict[str, int]:
        found = collections.Counter(state.provenance for state in self.states)
        return {kind: found[kind] for kind in PROVENANCE_KINDS}

    @property
    def missing(self) -> list[CellState]:
        """Cells that claim hardware and have no good record."""
        return [state for state in self.states if state.is_missing]

    @property
    def worst(self) -> CellState | None:
        """The cell with the largest error, as a share of its bound, among those that ran on hardware."""
        ran = [state for state in self.states if state.proof is Proof.HARDWARE and state.worst_share is not None]
        return max(ran, key=lambda state: state.worst_share, default=None)

    @property
    def used(self) -> list[Record]:
        """Records that proofs rest on."""
        return list({state.record.name: state.record for state in self.states if state.record is not None}.values())

    @property
    def stale(self) -> list[Record]:
        """Records that proofs rest on and that were made with other kernel sources than those of now."""
        return [record for record in self.used if record.data.get("kernel_sources") != kernel_sources()]

    @property
    def red(self) -> list[str]:
        """Tests that failed in runs that proofs rest on, in sentences: the cells ran, and the run as a whole was not right."""
        return [
            f"{record.name}: {test['id']} failed"
            for record in self.used
            for test in record.data.get("tests", ())
            if test["outcome"] == "failed"
        ]

    def mean_over_floor(self, who: str, m: int | None = None) -> float | None:
        """Geometric mean over the cells where a kernel of ours was timed."""
        ratios = [t.over_floor(who) for t in self.times if t.ours is not None and m in (None, t.m)]
        found = [ratio for ratio in ratios if ratio is not None]
        return statistics.geometric_mean(found) if found else None


@dataclass(frozen=True)
class Summary:
    generations: tuple[Generation, ...]
    records: Mapping[str, list[Record]] = field(default_factory=dict)

    @property
    def missing(self) -> list[CellState]:
        return [state for generation in self.generations for state in generation.missing]


def summarize(folder: Path = RECORDS, runners: Mapping[str, Runner] | None = None) -> Summary:
    """The state of all generations by the records in ``folder``."""
    runners = runners or load_runners()
    records = load_records(folder)
    made = []
    for arch in ARCHES:
        own = records[arch.name]
        states = cell_states(arch, own, runners[arch.name])
        shapes = {(state.case.n, state.case.k) for state in states}
        times = tuple(times for times in newest_times(own) if (times.n, times.k) in shapes)
        made.append(Generation(arch, runners[arch.name], tuple(states), tuple(own), times, tuple(changes(own))))
    return Summary(tuple(made), records)


def _is_usual(mode: Mapping | None) -> bool:
    """Cold weights, PDL, back to back: what every benchmark has; the first schema had nothing else, unsaid."""
    return mode is None or (mode["weights"], mode["pdl"], mode["chain"]) == ("cold", True, "back_to_back")


def times_of(record: Record) -> list[Times]:
    """The times of a benchmark, or of a tuning run (there by the cell, with the baseline cuBLAS), without residual."""
    found = []
    for cell in record.data["cells"]:
        if "n" not in cell:
            continue  # of something else than a GEMM
        shape = (cell["n"], cell["k"], cell["m"])
        timings = cell.get("timings", {})
        if FLOOR in timings and _is_usual(cell.get("mode")):
            us = {name: timings[name]["us"] for name in (FLOOR, OURS, CUBLAS) if name in timings}
            backend = cell["backend"] if OURS in us else None
            found.append(Times(*shape, us[FLOOR], us.get(OURS), us.get(CUBLAS), backend, record))
        elif "floor_us" in cell and not cell["residual"]:
            winner = cell["winner"]
            backend = None if winner is None else winner["backend"]
            found.append(Times(*shape, cell["floor_us"], cell["us"], cell["baseline_us"], backend, record))
    return found


def newest_times(records: Iterable[Record]) -> list[Times]:
    """The newest times of each (N, K, M); ``records``: oldest first."""
    found: dict[tuple, Times] = {}
    for record in records:
        for times in times_of(record):
            found[times.n, times.k, times.m] = times
    return sorted(found.values(), key=lambda times: (times.n * times.k, times.n, times.m))


def changes(records: Sequence[Record]) -> list[str]:
    """What the newest record of each series says otherwise than the one before, in sentences; of times the newest that has
    one before it that timed enough of its cells. ``records``: oldest first."""
    verdicts = [record for record in records if record.has_verdicts and record.gpu]
    found = []
    for series in dict.fromkeys(record.series for record in verdicts):
        last_two = [record for record in verdicts if record.series == series][-2:]
        if len(last_two) == 2:
            found += _changed_verdicts(*last_two)
    timed = [record for record in records if times_of(record)]
    for series in dict.fromkeys(record.series for record in timed):
        newest_first = [record for record in reversed(timed) if record.series == series]
        pairs = itertools.combinations(newest_first, 2)  # the newest with each before it, then the next one
        comparable = ((b, a) for a, b in pairs if len(_over_cublas(a).keys() & _over_cublas(b).keys()) >= IN_COMMON)
        found += [_changed_times(before, after) for before, after in itertools.islice(comparable, 1)]
    return found


def _on_kernel(record: Record) -> dict[tuple, Mapping]:
    judged = ("kernel", "failed", "waived")
    return {cell_key(cell): cell for cell in record.data["cells"] if cell.get("status") in judged}


def _changed_verdicts(before: Record, after: Record) -> list[str]:
    old, new = _on_kernel(before), _on_kernel(after)
    both = old.keys() & new.keys()
    turned = [key for key in both if old[key]["status"] != new[key]["status"]]
    rows = [
        (len(new.keys() - old.keys()), "cells ran that had not run before"),
        (len(old.keys() - new.keys()), "cells that had run did not run"),
        (sum(new[key]["status"] == "kernel" for key in turned), "cells became right"),
        (sum(new[key]["status"] == "failed" for key in turned), "cells became wrong"),
        (sum(old[key]["config"] != new[key]["config"] or old[key]["backend"] != new[key]["backend"] for key in both),
         "cells ran with another backend or config"),
    ]  # fmt: skip
    said = [f"{count} {text}" for count, text in rows if count]
    shares = [[c["worst_share"] for c in cells.values() if c.get("worst_share") is not None] for cells in (old, new)]
    if all(shares):
        worst = [max(map(float, found)) for found in shares]
        said.append(f"worst error {worst[0]:.3f} to {worst[1]:.3f} of its bound")
    return [f"{before.name} to {after.name}: {'; '.join(said) or 'the same verdicts'}"]


def _over_cublas(record: Record) -> dict[tuple[int, int, int], float]:
    """Ours over cuBLAS in its own run: clocks and the latency of a launch differ between two sessions, and the floor, which
    does next to nothing, feels the latter most."""
    return {(t.n, t.k, t.m): t.over_cublas for t in times_of(record) if t.over_cublas is not None}


def _changed_times(before: Record, after: Record) -> str:
    old, new = _over_cublas(before), _over_cublas(after)
    ratios = {key: new[key] / old[key] for key in old.keys() & new.keys()}
    mean = statistics.geometric_mean(ratios.values())
    slower, faster = sum(r > 1 + NOISE for r in ratios.values()), sum(r < 1 - NOISE for r in ratios.values())
    text = f"ours over cuBLAS changed by {100 * (mean - 1):+.1f} % over {len(ratios)} cells"
    return f"{before.name} to {after.name}: {text}; {faster} faster, {slower} slower by more than {100 * NOISE:.0f} %"
