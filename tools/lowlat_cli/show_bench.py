"""What ``lowlat bench`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from .bench import CLEAR_LOSS, BenchCell, losses
from .candidates import CUBLAS, FLOOR, LINK, OURS
from .environment import Gpu
from .measure import LINKED

#: At most this many losses are printed one by one; the record has all.
LOSSES_SHOWN = 40


def bench(console: Console, cells: Sequence[BenchCell], means: Mapping, gpu: Gpu) -> None:
    """A table a mode, the geometric means, the losses, and what was wrong or left out."""
    for mode in dict.fromkeys(cell.mode for cell in cells):
        console.print(_table([cell for cell in cells if cell.mode == mode], str(mode), mode.chain == LINKED))
    console.print(_means(means))
    ran = [cell for cell in cells if cell.over_best_peer is not None]
    lost = losses(cells)
    clear = sum(cell.over_best_peer > CLEAR_LOSS for cell in lost)
    console.print(
        f"{len(ran)} cells against a peer: {len(ran) - len(lost)} won, {len(lost)} lost, {clear} by more than 3 %",
        highlight=False,
    )
    for cell in lost[:LOSSES_SHOWN]:
        where = f"{cell.n}x{cell.k} M={cell.m}, {cell.mode}, {cell.backend}"
        console.print(
            f"LOST {cell.over_best_peer:.3f} x {cell.best_peer}: {where}",
            style="red" if cell.over_best_peer > CLEAR_LOSS else "yellow",
            highlight=False,
            soft_wrap=True,
        )
    _left_out(console, cells)
    console.print(f"ran on: {gpu}; times are microseconds a launch, medians over replays of one graph", highlight=False)


def _table(cells: Sequence[BenchCell], title: str, linked: bool) -> Grid:
    columns = ["N", "K", "M", "floor us", "cuBLAS us", "best peer us", "ours us", "p10-p90", "GB/s", "% of floor"]
    columns += ["x cuBLAS", "x best peer", "backend"]
    grid = Grid(*columns, title=title + (" (times of a norm and the GEMM)" if linked else ""), box=box.SIMPLE)
    for cell in cells:
        timings, ours, best = cell.timings, cell.timings.get(OURS), cell.best_peer
        against = cell.over_best_peer
        row = [str(cell.n), str(cell.k), str(cell.m)]
        row += [f"{timings[name].us:.2f}" if name in timings else "-" for name in (FLOOR, CUBLAS)]
        row.append("-" if best is None else f"{timings[best].us:.2f} {best}")
        if ours is None:
            row += ["-", "", "", "", "", "", cell.skipped.get(OURS, "").split(":")[0]]
        else:
            row += [f"{ours.us:.2f}", f"{ours.p10:.2f}-{ours.p90:.2f}", f"{cell.gbs(OURS):.0f}"]
            row.append(f"{100 / cell.ratio(OURS, FLOOR):.0f}")
            row.append(f"{cell.ratio(OURS, CUBLAS):.3f}" if CUBLAS in timings else "-")
            row += ["-" if against is None else f"{against:.3f}", cell.backend or ""]
        grid.add_row(*row, style=None if against is None else "red" if against > 1 else "green")
    return grid


def _means(means: Mapping) -> Grid:
    grid = Grid("mode", "M", "candidate", "cells", "x floor", "ours over it", title="geometric means", box=box.SIMPLE)
    for mode, by_m in means.items():
        for m, rows in by_m.items():
            for name, row in rows.items():
                over = row.get("ours_over")
                style = "bold" if name == OURS else "red" if over > 1 else None
                ratios = f"{row['over_floor']:.3f}", "" if over is None else f"{over:.3f}"
                grid.add_row(mode, str(m), name, str(row["cells"]), *ratios, style=style)
    return grid


def _left_out(console: Console, cells: Sequence[BenchCell]) -> None:
    """Why candidates have no time, each reason once with its count."""
    found: dict[tuple[str, str], int] = {}
    for cell in cells:
        for name, reason in cell.skipped.items():
            key = (name, reason.split(":")[0])
            found[key] = found.get(key, 0) + 1
    for (name, reason), count in found.items():
        style = "bold red" if reason == "wrong" else "dim"
        console.print(f"{count:6d}  {name}: {reason}", style=style, highlight=False, soft_wrap=True)
    norm = [cell.timings[LINK].us for cell in cells if LINK in cell.timings]
    if norm:
        console.print(f"the norm of the linked chain alone: {min(norm):.2f} to {max(norm):.2f} us", highlight=False)


def host(console: Console, cells: Sequence, medians: Mapping[str, float], gpu: Gpu) -> None:
    """Host microseconds a call, a line a cell; then the medians and ratios over all."""
    if not cells:
        console.print("no cell runs on a kernel of ours: nothing to compare", highlight=False)
        return
    grid = Grid("N", "K", "M", "backend", *cells[0].timings, title="host us a call", box=box.SIMPLE)
    for cell in cells:
        times = (f"{timing.us:.2f} ({timing.p10:.2f}-{timing.p90:.2f})" for timing in cell.timings.values())
        grid.add_row(str(cell.n), str(cell.k), str(cell.m), cell.backend, *times)
    console.print(grid)
    console.print(", ".join(f"{name} {value:.3f}" for name, value in medians.items()), highlight=False, soft_wrap=True)
    console.print(f"ran on: {gpu}; no GPU work is waited for", highlight=False)


def kda(console: Console, cells: Sequence, limit: int, gpu: Gpu) -> None:
    """Microseconds a layer by way, a line an M and chain; then up to which M the overlap won."""
    columns = "M", "chain", *cells[0].timings, "overlap x sequential"
    grid = Grid(*columns, title="KDA projections, us a layer", box=box.SIMPLE)
    for cell in cells:
        times = (f"{timing.us:.2f} ({timing.p10:.2f}-{timing.p90:.2f})" for timing in cell.timings.values())
        style = "green" if cell.ratio < 1 else "red"
        grid.add_row(str(cell.m), cell.chain, *times, f"{cell.ratio:.3f}", style=style)
    console.print(grid)
    won = f"at every M up to {limit}" if limit else "not at M = 1"
    console.print(f"the overlap beats the sequential path in all chains {won}", highlight=False)
    console.print(f"ran on: {gpu}; times are medians over replays of one graph", highlight=False)
