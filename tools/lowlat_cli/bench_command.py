"""The body of ``lowlat bench``: what its options mean, the run, and where the results go."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import candidates as candidates_module
from . import show, show_bench
from .bench import BenchError, run_bench
from .checking import Shape
from .environment import Gpu
from .measure import BACK_TO_BACK, COLD, LINKED, WARM, Mode
from .record import make_bench_record, make_host_record, make_kda_record, render, write_record

_WEIGHTS, _PDL, _CHAINS = (COLD, WARM), {"on": True, "off": False}, (BACK_TO_BACK, LINKED)


def modes(weights: Sequence[str], pdl: Sequence[str], chains: Sequence[str]) -> list[Mode]:
    """Every combination. ValueError for a word that is none of the option's."""
    for option, given, known in (("--weights", weights, _WEIGHTS), ("--pdl", pdl, _PDL), ("--chain", chains, _CHAINS)):
        for word in given:
            if word not in known:
                raise ValueError(f"{option} {word!r}: expected {' or '.join(known)}")
    combined = itertools.product(dict.fromkeys(weights), dict.fromkeys(pdl), dict.fromkeys(chains))
    return [Mode(weight, _PDL[edge], chain) for weight, edge, chain in combined]


def run(
    command: str,
    title: str,
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    timed: Sequence[Mode],
    names: Sequence[str],
    *,
    replays: int,
    minutes: float | None,
    record: Path | None,
    plots: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> int:
    """Runs the benchmark and shows it; the exit code. ValueError where the request cannot be carried out."""
    chosen = candidates_module.chosen(list(names))
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plots: matplotlib is not installed")
    if replays < 1:
        raise ValueError(f"--replays {replays}: at least 1")
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()

    def out_of_time() -> bool:
        return minutes is not None and time.monotonic() - clock > 60 * minutes

    with show.progress(err, f"bench {title}", len(shapes) * len(tokens)) as report:
        try:
            cells, missed = run_bench(shapes, tokens, gpu, timed, chosen, report, replays, out_of_time)
        except BenchError as error:
            err.print(f"lowlat: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
            return 1
    result = make_bench_record(command, cells, missed, gpu, started, time.monotonic() - clock)
    if record is not None:
        write_record(result, record)
    if as_json:
        print(render(result), end="")
    else:
        show_bench.bench(out, cells, result["geometric_means"], gpu)
    if missed:
        err.print(f"not reached in {minutes:g} minutes: {', '.join(missed)}", style="yellow", soft_wrap=True)
    if plots is not None:
        from .plots import plot_bench

        for path in plot_bench(cells, plots, gpu.properties.name):
            err.print(f"plot: {path}", style="dim", highlight=False, soft_wrap=True)
    return 0


def run_host(
    command: str,
    title: str,
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    gpu: Gpu,
    *,
    record: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> int:
    """``lowlat bench --host``; the exit code."""
    from . import host_cost

    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    with show.progress(err, f"host cost {title}", len(shapes) * len(tokens)) as report:
        cells = host_cost.run_host(shapes, tokens, gpu, report)
    result = make_host_record(command, cells, gpu, started, time.monotonic() - clock)
    if record is not None:
        write_record(result, record)
    if as_json:
        print(render(result), end="")
    else:
        show_bench.host(out, cells, result["medians"], gpu)
    return 0


def run_kda(
    command: str,
    tokens: Sequence[int],
    chains: Sequence[str],
    gpu: Gpu,
    *,
    replays: int,
    record: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> int:
    """``lowlat bench --kda``; the exit code."""
    from . import kda_bench

    modes([COLD], ["on"], chains)  # says which word is none
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    with show.progress(err, "KDA overlap", len(tokens)) as report:
        try:
            cells = kda_bench.run_kda(tokens, gpu, list(dict.fromkeys(chains)), replays, report)
        except BenchError as error:
            err.print(f"lowlat: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
            return 1
    result = make_kda_record(command, cells, gpu, started, time.monotonic() - clock)
    if record is not None:
        write_record(result, record)
    if as_json:
        print(render(result), end="")
    else:
        show_bench.kda(out, cells, result["max_tokens"], gpu)
    return 0
