"""What a tuning run says: for people and as JSON."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid

from .outcome import Outcome

#: Without a terminal, progress is a line at most so often.
LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress(console: Console, title: str) -> Iterator:
    """A bar with the time left; yields what ``Tuner`` calls. Without a terminal: a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        said = [float("-inf")]

        def report(done: float, total: float, text: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {text}")
            if not console.is_terminal and time.monotonic() - said[0] >= LINE_EVERY_S:
                said[0] = time.monotonic()
                share = f"{100 * done / total:.0f} %"
                console.print(f"{title}: {text} ({share})", style="dim", highlight=False, markup=False)

        yield report


def cell_rows(outcome: Outcome) -> list[dict]:
    """One entry an M that was measured, microseconds. ``winner`` is None where nothing of ours is in the table. ``us``,
    ``floor_us``, ``baseline_us``: geometric means of the passes; ``others`` and the finalists' ``us``: of each pass."""
    found = []
    for row in outcome.rows:
        for m, results in sorted(outcome.passes[row.n, row.k, row.residual].items()):
            floor = statistics.geometric_mean(result.floor_us for result in results)
            baseline = statistics.geometric_mean(result.baseline_us for result in results)
            winner = row.chosen.get(m)
            times = row.times[m]
            fastest = min(times, key=lambda one: times[one].us, default=None)
            us = None if winner is None else times[winner].us
            found.append({
                "n": row.n, "k": row.k, "m": m, "residual": row.residual,
                "winner": None if winner is None else {"backend": winner.backend, "config": winner.mapping()},
                "us": _rounded(us),
                "linked_us": _rounded(None if winner is None or not times[winner].linked else times[winner].linked_us),
                "floor_us": _rounded(floor),
                "baseline_us": _rounded(baseline),
                "over_floor": _rounded(None if us is None else us / floor),
                "over_baseline": _rounded(None if us is None else us / baseline),
                "best_us": _rounded(None if fastest is None else times[fastest].us),
                "others": {name: [result.others[name] for result in results] for name in results[0].others},
                "linked_others": {name: us for result in results for name, us in result.linked_others.items()},
                "finalists": [
                    {"backend": one.backend, "config": one.mapping(),
                     "us": times[one].back_to_back, "linked_us": times[one].linked}
                    for one in sorted(times, key=lambda one: times[one].us)
                ],
            })  # fmt: skip
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def means_by_m(cells: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Geometric means over the cells that have a winner, those with residual left out."""
    means = {}
    for m in sorted({cell["m"] for cell in cells}):
        plain = [cell for cell in cells if cell["m"] == m and not cell["residual"]]
        won = [cell for cell in plain if cell["winner"] is not None]
        if won:
            means[str(m)] = {
                name: round(statistics.geometric_mean(cell[name] for cell in won), 4)
                for name in ("over_floor", "over_baseline")
            } | {"cells": len(won), "of": len(plain)}
    return means


def model_summary(outcome: Outcome) -> dict[str, dict]:
    """By backend: how the cost model's order compared with what was measured, over the classes that were screened.
    ``lost``: [n, k, m] where a random candidate that it had left out was the fastest."""
    summary = {}
    for backend in dict.fromkeys(check.backend for check in outcome.model):
        checks = [check for check in outcome.model if check.backend == backend]
        known = [check.correlation for check in checks if check.correlation is not None]
        summary[backend] = {
            "classes": len(checks),
            "rank_correlation": _rounded(statistics.mean(known)) if known else None,
            "rank_correlation_least": _rounded(min(known)) if known else None,
            "probes": sum(check.probes for check in checks),
            "lost": [[check.n, check.k, check.m] for check in checks if check.lost],
        }
    return summary


def outcome_json(outcome: Outcome) -> dict:
    """Everything for a record; times in microseconds."""
    cells = cell_rows(outcome)
    return {
        "geometric_means": means_by_m(cells),
        "model": model_summary(outcome),
        "excluded": [one.to_json() | {"reason": reason} for one, reason in outcome.excluded.items()],
        "not_reached": [[shape.n, shape.k] for shape in outcome.not_reached],
        "measured_jobs": outcome.measured_jobs,
        "measured_candidates": outcome.measured_candidates,
        "journal_jobs": outcome.journal_jobs,
        "journal_candidates": outcome.journal_candidates,
        "seconds_by_stage": {stage: round(seconds, 1) for stage, seconds in outcome.seconds.items()},
        "cells": cells,
    }


def show(console: Console, outcome: Outcome, gpu, written: str | None) -> None:
    """One line a cell, geometric means, what was left out and why."""
    grid = Grid("N", "K", "M", "floor us", "baseline us", "ours us", "x floor", "x baseline", "winner", box=box.SIMPLE)
    cells = cell_rows(outcome)
    names = {(row.n, row.k, row.residual): row for row in outcome.rows}
    for cell in cells:
        winner = names[cell["n"], cell["k"], cell["residual"]].chosen.get(cell["m"])
        kept = winner is not None
        grid.add_row(
            str(cell["n"]), str(cell["k"]), f"{cell['m']}{' +r' if cell['residual'] else ''}",
            f"{cell['floor_us']:.2f}", f"{cell['baseline_us']:.2f}",
            f"{cell['us']:.2f}" if kept else f"({cell['best_us']:.2f})" if cell["best_us"] else "-",
            f"{cell['over_floor']:.3f}" if kept else "", f"{cell['over_baseline']:.3f}" if kept else "",
            str(winner) if kept else "no cell: less than 5 % over the baseline",
            style="green" if kept else "red",
        )  # fmt: skip
    console.print(grid)

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    between = sum(len(row.between) for row in outcome.rows)
    won = sum(cell["winner"] is not None for cell in cells)
    line(f"{won} of {len(cells)} measured cells kept, {between} more between two of them")
    for m, mean in means_by_m(cells).items():
        line(
            f"M={m}: geometric mean over {mean['cells']} of {mean['of']} cells: {mean['over_floor']:.3f} x floor, "
            f"{mean['over_baseline']:.3f} x baseline"
        )
    for backend, found in model_summary(outcome).items():
        correlation = found["rank_correlation"]
        if correlation is not None:
            line(
                f"cost model of {backend}: rank correlation {correlation:.2f} over {found['classes']} classes (least "
                f"{found['rank_correlation_least']:.2f}); the fastest was one of {found['probes']} left out in "
                f"{len(found['lost'])}"
            )
    for candidate, reason in outcome.excluded.items():
        line(f"excluded {candidate}: {reason}", "bold red")
    if outcome.not_reached:
        line(f"not reached: {', '.join(f'{shape.n}x{shape.k}' for shape in outcome.not_reached)}", "yellow")
    if outcome.journal_jobs:
        line(
            f"from the journal: {outcome.journal_candidates} candidates in {outcome.journal_jobs} jobs; measured now: "
            f"{outcome.measured_candidates} in {outcome.measured_jobs}"
        )
    line(f"seconds: {', '.join(f'{stage} {seconds:.0f}' for stage, seconds in outcome.seconds.items())}")
    line(f"table: {written}" if written else "no table written: nothing to keep")
    line(f"ran on: {gpu}; times are microseconds a launch, cold weights, graph replay with PDL")
