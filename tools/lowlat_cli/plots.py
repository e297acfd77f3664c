"""Pictures of a benchmark's record: time against weight bytes with the floor, and ours over the floor by M."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from .bench import BenchCell
from .candidates import BOUNDS, FLOOR, OURS


def plot_bench(cells: Sequence[BenchCell], folder: Path, gpu_name: str) -> list[Path]:
    """Writes ``roofline-*.png`` and ``ratio-by-m-*.png``, one of each a mode, into ``folder``; returns their paths.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        some = [cell for cell in cells if cell.mode == mode and cell.timings]
        if not some:
            continue
        suffix = f"{mode.chain}-{mode.weights}-pdl-{'on' if mode.pdl else 'off'}.png"
        title = f"{gpu_name}: {mode}"
        written.append(_roofline(some, folder / f"roofline-{suffix}", title))
        written.append(_ratios(some, folder / f"ratio-by-m-{suffix}", title))
    return written


def _roofline(cells: Sequence[BenchCell], path: Path, title: str) -> Path:
    """Microseconds over weight megabytes, log-log; the floor is a line through its medians."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    floors: dict[int, list[float]] = {}
    for cell in cells:
        floors.setdefault(cell.weight_bytes, []).append(cell.timings[FLOOR].us)
    sizes = sorted(floors)
    axes.plot([size / 1e6 for size in sizes], [statistics.median(floors[size]) for size in sizes], "k-", label=FLOOR)
    for name in _gemms(cells):
        timed = [cell for cell in cells if name in cell.timings]
        axes.plot(
            [cell.weight_bytes / 1e6 for cell in timed], [cell.timings[name].us for cell in timed],
            "o" if name == OURS else ".", label=name, alpha=0.8, markersize=6 if name == OURS else 5,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="weight, MB", ylabel="us a launch, every M", title=title)
    return _save(figure, axes, path)


def _ratios(cells: Sequence[BenchCell], path: Path, title: str) -> Path:
    """Geometric mean of time over the floor by M, a line a candidate, each over the cells that it ran."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name in _gemms(cells):
        by_m: dict[int, list[float]] = {}
        for cell in cells:
            if name in cell.timings:
                by_m.setdefault(cell.m, []).append(cell.ratio(name, FLOOR))
        tokens = sorted(by_m)
        axes.plot(
            tokens, [statistics.geometric_mean(by_m[m]) for m in tokens],
            "o-" if name == OURS else ".--", label=name, linewidth=2 if name == OURS else 1,
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    tokens = sorted({cell.m for cell in cells})
    axes.set_xticks(tokens, [str(m) for m in tokens])
    axes.set(xlabel="M, tokens", ylabel="time over the floor, geometric mean", title=title)
    return _save(figure, axes, path)


def _gemms(cells: Sequence[BenchCell]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.timings if name not in BOUNDS))


def _save(figure, axes, path: Path) -> Path:
    from matplotlib import pyplot

    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
