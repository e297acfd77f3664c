"""What the commands print for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid

import lowlat_gemm

from .checking import Shape
from .environment import DISTRIBUTIONS, Gpu
from .planning import PlanRow, summary
from .record import CellResult, Status, counts

STYLES = {
    Status.KERNEL: "green",
    Status.FAILED: "bold red",
    Status.WAIVED: "red",
    Status.MODEL: "magenta",
    Status.COMPILED: "blue",
    Status.REFERENCE: "cyan",
    Status.NOT_BUILT: "yellow",
    Status.FALLBACK: "dim",
}
#: What a cell of ``lowlat check`` can come to.
CHECKED = (Status.KERNEL, Status.FAILED, Status.REFERENCE, Status.NOT_BUILT, Status.FALLBACK)
#: At most this many failed cells are printed one by one; the record has all.
FAILURES_SHOWN = 20


@contextlib.contextmanager
def progress(console: Console, title: str, total: int) -> Iterator:
    """A progress bar over ``total`` units of work; yields what a run calls before each: (shape, units behind it)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        said: list[Shape] = []

        def report(shape: Shape, done: int) -> None:
            bar.update(task, completed=done, description=f"{title}: {shape.n}x{shape.k}")
            if not console.is_terminal and said[-1:] != [shape]:
                said.append(shape)
                console.print(f"{title}: {shape.n}x{shape.k} ({100 * done // total} %)", style="dim", highlight=False)

        yield report
        bar.update(task, completed=total, description=title)


def doctor(console: Console, report) -> None:
    grid = Grid(show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")  # a path that is cut is no path
    grid.add_row("lowlat_gemm", lowlat_gemm.__version__)
    for gpu in report.gpus:
        grid.add_row(f"GPU {gpu.ordinal}", f"{gpu} -> {gpu.arch or 'not served'}")
    grid.add_row("driver", report.driver or "none")
    for name, version in report.versions.items():
        purpose = DISTRIBUTIONS.get(name)
        grid.add_row(name, f"{version or 'not installed'}" + (f" ({purpose})" if purpose else ""))
    grid.add_row("cache", report.cache)
    for framework, state in report.plugins.items():
        grid.add_row(f"{framework} plugin", state)
    for arch, state in report.flashinfer.items():
        grid.add_row(f"flashinfer on {arch}", state)
    for table in report.tables:
        state = table.error or f"{table.cells} cells, {table.built} of them on backends of this build"
        grid.add_row(f"{table.family}/{table.arch}", state)
    console.print(grid)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"problem: {problem}", style="red", highlight=False, soft_wrap=True)
    verdict = "kernels do not run here: every GEMM falls back" if report.problems else "kernels run here"
    console.print(verdict, style="red" if report.problems else "green", highlight=False)


def plan(console: Console, model: str, tp: int, table, rows: Sequence[PlanRow]) -> None:
    title = f"{model} tp {tp} on {table.arch} (table for {table.device.name})"
    grid = Grid("projection", "N", "K", "by M, else the caller's own GEMM", "cells from", title=title, box=box.SIMPLE)
    for row in rows:
        plain, residual = summary(row.decisions), summary(row.residual_decisions)
        text = plain or "-"
        if residual:
            text += f"\nwith residual: {residual}"
        kinds = sorted({decision.provenance.kind for decision in row.decisions + row.residual_decisions})
        grid.add_row(row.name, str(row.n), str(row.k), text, ", ".join(kinds))
    console.print(grid)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def check(
    console: Console,
    shapes: Sequence[Shape],
    cells: Sequence[CellResult],
    gpu: Gpu | None,
    why_no_gpu: str | None,
    record,
) -> None:
    """One line a shape and generation, the failures, the totals."""
    by_row: dict[tuple[str, int, int], list[CellResult]] = {}
    for cell in cells:
        by_row.setdefault((cell.arch, cell.n, cell.k), []).append(cell)
    present = [status for status in Status if any(cell.status is status for cell in cells)]
    for arch in dict.fromkeys(cell.arch for cell in cells):
        grid = Grid("N", "K", *map(str, present), "worst / bound", "projections", title=arch, box=box.SIMPLE)
        for shape in shapes:
            row = by_row[arch, shape.n, shape.k]
            found = counts(row)
            worst = max((cell.worst_share for cell in row if cell.worst_share is not None), default=None)
            grid.add_row(
                str(shape.n),
                str(shape.k),
                *(f"[{STYLES[status]}]{found[status.value] or ''}[/]" for status in present),
                "" if worst is None else f"{worst:.2f}",
                ", ".join(dict.fromkeys(name.split()[0] for name in shape.names)),
            )
        console.print(grid)
    for cell in [cell for cell in cells if cell.status is Status.FAILED][:FAILURES_SHOWN]:
        console.print(f"FAILED {cell}: {cell.reason}", style=STYLES[Status.FAILED], highlight=False, soft_wrap=True)
    _reasons(console, cells)
    console.print(f"ran on: {gpu}" if gpu else f"no kernel ran: {why_no_gpu}", highlight=False, soft_wrap=True)
    total = counts(cells)
    text = ", ".join(f"{total[status.value]} {status}" for status in CHECKED)
    console.print(f"{_plural(len(cells), 'cell')}: {text}", highlight=False, soft_wrap=True)
    if record is not None:
        console.print(f"record: {record}", highlight=False, soft_wrap=True)


def _reasons(console: Console, cells: Sequence[CellResult]) -> None:
    """How many cells do not run on a kernel, by reason (without the detail, which differs from cell to cell)."""
    found: dict[tuple[Status, str], int] = {}
    for cell in cells:
        if cell.status in (Status.NOT_BUILT, Status.FALLBACK):
            detail = f" ({cell.backend})" if cell.status is Status.NOT_BUILT else ""
            key = (cell.status, cell.reason.split(":")[0] + detail)
            found[key] = found.get(key, 0) + 1
    for (status, reason), count in sorted(found.items(), key=lambda item: -item[1]):
        console.print(f"{count:6d}  {reason}", style=STYLES[status], highlight=False)
