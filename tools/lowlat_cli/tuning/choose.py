"""From two passes of measurements to the cells of a row.

A cell is kept where a candidate beats the baseline by MINIMUM_SPEEDUP in both passes back to back, and is no slower
between other kernels. Among candidates that are about as fast back to back, the one that is faster between other
kernels is taken. A row is served by one split, so that its bits do not depend on M, where that costs little; a token
class by one config, where that costs little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowlat_gemm.tables.schema import MINIMUM_SPEEDUP

from .candidates import Candidate, TokenClass
from .jobs import BACK_TO_BACK, LINKED, JobResult

#: Candidates within this factor of the fastest are judged by the linked chain.
AS_FAST = 1.05
#: What one config for a whole token class may cost against the best of each cell, as a geometric mean.
ONE_CONFIG_COST = 1.02
#: What one order of additions for a whole row may cost, as a geometric mean in either chain, and at any single M.
ONE_SPLIT_COST, ONE_SPLIT_COST_OF_A_CELL = 1.03, 1.15


@dataclass(frozen=True)
class Times:
    """One candidate at one M, microseconds: both passes, and the baselines of the same passes."""

    back_to_back: tuple[float, ...]
    linked: tuple[float, ...]
    baselines: tuple[float, ...]
    linked_baselines: tuple[float, ...] = ()

    @property
    def us(self) -> float:
        return statistics.geometric_mean(self.back_to_back)

    @property
    def linked_us(self) -> float:
        """Of the pair; the back-to-back time where the shape has no linked chain."""
        return statistics.geometric_mean(self.linked or self.back_to_back)

    @property
    def weakest(self) -> tuple[float, float]:
        """(time, baseline) of the pass that shows the smaller gain, as a table has them."""
        return min(zip(self.back_to_back, self.baselines), key=lambda pair: pair[1] / pair[0])

    @property
    def wins(self) -> bool:
        """Faster than the baseline back to back by as much as a table asks for, and no slower between other kernels."""
        us, baseline = (round(value, 3) for value in self.weakest)
        linked = all(mine <= other for mine, other in zip(self.linked, self.linked_baselines))
        return us * MINIMUM_SPEEDUP <= baseline and linked


#: M -> candidate -> times.
RowTimes = Mapping[int, Mapping[Candidate, Times]]


def row_times(passes: Mapping[int, Sequence[JobResult]]) -> dict[int, dict[Candidate, Times]]:
    """``passes``: M -> the results of its passes. A candidate counts where every pass has it."""
    found: dict[int, dict[Candidate, Times]] = {}
    for m, results in passes.items():
        common = [one for one in results[0].times if all(one in result.times for result in results)]
        found[m] = {
            one: Times(
                tuple(result.times[one][BACK_TO_BACK] for result in results),
                tuple(result.times[one][LINKED] for result in results if LINKED in result.times[one]),
                tuple(result.baseline_us for result in results),
                tuple(result.linked_baseline_us for result in results if result.linked_baseline_us is not None),
            )
            for one in common
        }
    return found


def choose_row(times: RowTimes, classes: Iterable[TokenClass]) -> dict[int, Candidate]:
    """M -> the winner, for the M that have one."""
    eligible = {m: {one: t for one, t in at.items() if t.wins} for m, at in times.items()}
    eligible = {m: at for m, at in eligible.items() if at}
    groups = [tuple(m for m in one.tokens if m in eligible) for one in classes]
    groups = [tokens for tokens in groups if tokens]
    free = _choose(eligible, groups, lambda one: True)
    orders = {one.invariance for at in eligible.values() for one in at} - {None}
    best: tuple[float, dict[int, Candidate]] | None = None
    for order in sorted(orders, key=repr):
        bound = _choose(eligible, groups, lambda one: one.invariance == order)
        if bound.keys() == free.keys():
            pairs = [(eligible[m][bound[m]], eligible[m][free[m]]) for m in free]
            ratios = [[one.us / other.us for one, other in pairs], [one.linked_us / other.linked_us for one, other in pairs]]
            cost = max(map(statistics.geometric_mean, ratios))
            cheap = cost <= ONE_SPLIT_COST and max(map(max, ratios)) <= ONE_SPLIT_COST_OF_A_CELL
            if cheap and (best is None or cost < best[0]):
                best = cost, bound
    return free if best is None else best[1]


def _choose(
    eligible: RowTimes, groups: Sequence[tuple[int, ...]], allowed: Callable[[Candidate], bool]
) -> dict[int, Candidate]:
    """The winners among allowed candidates: one a group where that costs little, else one a cell."""
    chosen: dict[int, Candidate] = {}
    for tokens in groups:
        at = {m: {one: t for one, t in eligible[m].items() if allowed(one)} for m in tokens}
        cells = {m: _pick({one: (t.us, t.linked_us) for one, t in found.items()}) for m, found in at.items() if found}
        common = [one for one in at[tokens[0]] if all(one in at[m] for m in tokens)]
        means = {
            one: (
                statistics.geometric_mean(at[m][one].us for m in tokens),
                statistics.geometric_mean(at[m][one].linked_us for m in tokens),
            )
            for one in common
        }
        if means:
            one = _pick(means)
            best = statistics.geometric_mean(min(t.us for t in at[m].values()) for m in cells)
            if means[one][0] <= ONE_CONFIG_COST * best:
                cells = dict.fromkeys(cells, one)
        chosen |= cells
    return chosen


def _pick(us: Mapping[Candidate, tuple[float, float]]) -> Candidate:
    """Of those about as fast as the fastest back to back, the fastest between other kernels. (back to back, linked)"""
    best = min(first for first, _ in us.values())
    return min((one for one in us if us[one][0] <= AS_FAST * best), key=lambda one: us[one][1])


def serves_between(low: object, high: object, m_high: int, m: int, widths: Sequence[int]) -> bool:
    """Whether ``high``, the winner at ``m_high``, stands for the smaller ``m`` that nobody measured, ``low`` being the winner
    below it: one config at both ends, or one token class of ``widths``, in which the time grows with M alone."""
    return low == high or m > max((width for width in widths if width < m_high), default=0)


def interpolated(chosen: Mapping[int, Candidate], measured: Iterable[int], widths: Sequence[int]) -> dict[int, Candidate]:
    """M that nobody measured between two neighbours that were and have winners, with that of the upper one where it stands
    for them. ``measured``: every M that was timed: one without a winner is a gap that stays. ``widths``: of token tiles."""
    ordered = sorted(measured)
    found = {}
    for low, high in zip(ordered, ordered[1:]):
        if low in chosen and high in chosen:
            one = chosen[high]
            between = range(low + 1, high)
            found |= {m: one for m in between if serves_between(chosen[low], one, high, m, widths)}
    return found
