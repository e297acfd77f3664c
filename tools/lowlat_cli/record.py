"""The record of a run: what ran where, cell by cell. One JSON schema for the command line and the conformance suite."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from lowlat_gemm.kernels.store import source_hash

from . import environment

SCHEMA = 1
#: Since 2 a cell names its mode, and any number of candidates.
BENCH_SCHEMA = 2


class Status(str, enum.Enum):
    """What became of a cell. A closed set."""

    KERNEL = "kernel"  # ran on the table's kernel on a GPU of the generation, and every element was within the bound
    FAILED = "failed"  # ran and was wrong, or dispatch did something else than it said
    WAIVED = "waived"  # as failed, and a reviewed waiver that is in force names its test
    MODEL = "model"  # no GPU: the kernel was followed step by step in a model of the generation, and was right there
    COMPILED = "compiled"  # no GPU: the cell's kernel compiles for the generation and fits, without spills
    REFERENCE = "reference"  # no such GPU here: dispatch was followed to the kernel, the result is the reference's
    NOT_BUILT = "backend not built"  # the table names a backend that this build does not have yet
    FALLBACK = "fallback"  # the table has no cell, or the cell is refused: the caller's own GEMM runs

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CellResult:
    """One cell of one generation. ``worst_share``: largest error as a share of its element's bound, at most 1 where
    all is right. ``worst_ulps``: largest error in units in the last place of the output type (BF16 in every table) at
    the element itself: large, and right, where terms cancel. ``seconds``: what the test that judged it took."""

    arch: str
    n: int
    k: int
    m: int
    residual: bool
    status: Status
    family: str | None = None
    backend: str | None = None
    config: dict[str, int] | None = None
    reason: str | None = None
    provenance: str | None = None
    worst_ulps: float | None = None
    worst_share: float | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.arch} M={self.m} N={self.n} K={self.k}{' + residual' if self.residual else ''}"


def counts(cells: list[CellResult]) -> dict[str, int]:
    """How many cells ended in each status, every status named."""
    found = collections.Counter(cell.status for cell in cells)
    return {status.value: found[status] for status in Status}


def make_record(
    command: str, cells: list[CellResult], gpu, started: datetime.datetime, seconds: float, seed: int
) -> dict:
    """The record of a run, as plain JSON values. ``seed``: of its random operands, to repeat it."""
    rows = [
        asdict(cell)
        | {
            "status": cell.status.value,
            "worst_ulps": _finite(cell.worst_ulps),
            "worst_share": _finite(cell.worst_share),
        }
        for cell in cells
    ]
    return _head(command, gpu, started, seconds) | {"seed": seed, "counts": counts(cells), "cells": rows}


def make_bench_record(
    command: str, cells: list, not_reached: list[str], gpu, started: datetime.datetime, seconds: float
) -> dict:
    """The record of a benchmark; ``cells``: of ``bench.BenchCell``. Times are in microseconds."""
    from .bench import geometric_means

    head = _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "bench", "not_reached": not_reached}
    return head | {"geometric_means": geometric_means(cells), "cells": [cell.to_json() for cell in cells]}


def make_host_record(command: str, cells: list, gpu, started: datetime.datetime, seconds: float) -> dict:
    """The record of host costs; ``cells``: of ``host_cost.HostCell``. Times are host microseconds a call."""
    from .host_cost import medians

    head = _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "host", "medians": medians(cells)}
    return head | {"cells": [cell.to_json() for cell in cells]}


def make_kda_record(command: str, cells: list, gpu, started: datetime.datetime, seconds: float) -> dict:
    """The record of the KDA overlap; ``cells``: of ``kda_bench.KdaCell``. Times are in microseconds a layer."""
    from .kda_bench import limit_of

    head = _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "kda"}
    return head | {"max_tokens": limit_of(cells), "cells": [cell.to_json() for cell in cells]}


def make_startup_record(
    command: str, about: dict, cells: list[dict], gpu, started: datetime.datetime, seconds: float
) -> dict:
    """The record of start-up times; ``cells``: of ``tools.bench_startup``, one a way to start. Times are in seconds."""
    head = _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "startup"}
    return head | about | {"cells": cells}


def make_parts_record(command: str, cells: list, gpu, started: datetime.datetime, seconds: float) -> dict:
    """The record of what parts of ``split_k`` cost; ``cells``: of ``split_k_parts.PartsCell``. Times are in microseconds."""
    head = _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "parts"}
    return head | {"cells": [cell.to_json() for cell in cells]}


def make_sanitizer_record(command: str, runs: list[dict], gpu, started: datetime.datetime, seconds: float) -> dict:
    """The record of compute-sanitizer; ``runs``: of ``conformance.sanitize.run_tool``, one a tool and kernel."""
    return _head(command, gpu, started, seconds) | {"schema": BENCH_SCHEMA, "kind": "sanitizer", "cells": runs}


def make_tune_record(
    command: str, family: str, outcome: dict, gpu, started: datetime.datetime, seconds: float
) -> dict:
    """The record of a tuning run for the table of ``family``; ``outcome``: ``tuning.report.outcome_json``, with cells."""
    return _head(command, gpu, started, seconds) | {"kind": "tune", "family": family} | outcome


_PATH_OPTIONS = ("--record", "--journal", "--table", "--plots", "--archive")


def make_layers_record(command: str, cells: list, gpu, started: datetime.datetime, seconds: float) -> dict:
    """The record of a stack of layers; ``cells``: of ``tools.bench_layers.LayersCell``, one an M. Times: us a layer."""
    mean = round(statistics.geometric_mean(cell.ratio for cell in cells), 4)
    head = _head(command, gpu, started, seconds) | {"kind": "layers"}
    return head | {"geometric_mean_with_over_without": mean, "cells": [cell.to_json() for cell in cells]}


def command_line(program: str, arguments: list[str]) -> str:
    """The command as a record names it: without where files go, which are paths of one machine."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, given, _ = word.partition("=")
        if name in _PATH_OPTIONS:
            if not given:
                next(words, None)
        else:
            kept.append(word)
    return " ".join([program, *kept])


def _head(command: str, gpu, started: datetime.datetime, seconds: float) -> dict:
    return {
        "schema": SCHEMA,
        "command": command,
        "started": started.replace(microsecond=0).isoformat(),
        "seconds": round(seconds, 1),
        "commit": environment.commit(),
        "machine": environment.machine(gpu),
        "versions": environment.versions(),
        "kernel_sources": source_hash(),
    }


def _finite(value: float | None) -> float | str | None:
    """JSON has no NaN or infinity; a worst error that is one must still be seen."""
    return value if value is None or math.isfinite(value) else str(value)


#: The parts of a record that are lists of rows.
ROWS = ("tests", "cells")


def render(record: dict) -> str:
    """The record as text: a line a row, so that two records can be compared with diff."""
    text = json.dumps({key: value for key, value in record.items() if key not in ROWS}, indent=1)[:-2]
    for key in ROWS:
        if key in record:
            rows = ",\n".join("  " + json.dumps(row) for row in record[key])
            text += f',\n "{key}": [\n{rows}\n ]'
    return text + "\n}\n"


def hand_over(record: dict, path: Path | None) -> None:
    """Writes a record to ``path``, or prints it where there is none."""
    if path is None:
        print(render(record), end="")
    else:
        write_record(record, path)


def write_record(record: dict, path: Path) -> None:
    """Writes the record atomically: a reader sees the former file or the whole new one."""
    text = render(record)  # before any file is there: what cannot be rendered leaves nothing behind
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
