"""``lowlat report``: what records say, on the command line: geometric means by M, worst cells, and what went wrong.

A benchmark's record says its kind since schema 2; of others it is seen from their cells. Means and worst cells are made
from the cells here, not taken from the record, so that records of both schemas read alike.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .record import Status

#: Cells named as the worst of a record.
WORST = 10
#: Keys of cells by which records without a kind are told apart, the first that is there.
_KINDS = {"layers": "layers", "timings": "bench", "winner": "tune", "status": "check"}


@dataclass(frozen=True)
class Mean:
    """Over ``cells`` cells of one M: geometric means of time over the floor and over the baseline (cuBLAS), and the median
    of the microseconds beyond the floor, which grow far less with the weight than the floor itself."""

    group: str
    m: int
    cells: int
    over_floor: float | None
    over_baseline: float | None
    beyond_us: float


@dataclass(frozen=True)
class Worst:
    """A cell by how it compares with the fastest alternative; above 1 is a loss."""

    cell: str
    ratio: float
    against: str


@dataclass(frozen=True)
class Summary:
    """One record."""

    path: str
    kind: str
    command: str
    gpu: str | None
    commit: str | None
    cells: int
    means: list[Mean] = field(default_factory=list)
    worst: list[Worst] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Cells that computed something wrong.
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def to_json(self) -> dict:
        return asdict(self)


#: Sizes of a weight, in MB, by which the cells of a tuning run are grouped: how far from the floor a launch ends goes by it.
WEIGHT_SIZES = (6, 20, 40, 85)


def weight_group(n: int, k: int) -> str:
    """The group of a BF16 weight [n, k]: "6 to 20 MB"."""
    megabytes = 2 * n * k / 1e6
    above = [size for size in WEIGHT_SIZES if megabytes >= size]
    below = [size for size in WEIGHT_SIZES if megabytes < size]
    if not above:
        return f"under {below[0]} MB"
    return f"{above[-1]} to {below[0]} MB" if below else f"{above[-1]} MB and more"


def find_records(paths: Iterable[Path]) -> list[Path]:
    """The JSON files of ``paths``, folders searched through. OSError for a path that is not there."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    return found


def summarise(path: Path) -> Summary:
    """Reads one record. ValueError, naming the file, for what is none."""
    return summarise_record(str(path), read_record(path))


def read_record(path: Path) -> dict:
    """A record's JSON. ValueError, naming the file, for what is none."""
    try:
        record = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("cells"), list) or "schema" not in record:
        raise ValueError(f"{path}: no record: it has no schema and cells")
    return record


def kind_of(record: dict) -> str:
    """What made a record: "tune", "bench", ...; "unknown"."""
    cells = record["cells"]
    return record.get("kind") or next((kind for key, kind in _KINDS.items() if cells and key in cells[0]), "unknown")


def family_of(record: dict) -> str:
    """The model family that a tuning run was for. Records say it since there are several; the earlier ones of this
    repository by their command."""
    if "family" in record:
        return record["family"]
    words = record["command"].split()
    return next((words[words.index(option) + 1] for option in ("--family", "--model") if option in words), "kimi_k3")


def join_tuned(records: Iterable[dict]) -> dict:
    """One record of a family's tuning runs on one kind of GPU: each cell as the newest run that measured it has it, by
    weight and M."""
    ordered = sorted(records, key=lambda record: record["started"])
    cells = {(c["n"], c["k"], c["m"], c["residual"]): c for record in ordered for c in record["cells"]}
    by_weight = sorted(cells.values(), key=lambda c: (c["n"] * c["k"], c["n"], c["m"], c["residual"]))
    return ordered[-1] | {"command": "lowlat tune, the newest run of each cell", "cells": by_weight, "excluded": [], "not_reached": []}


def tuned_together(paths: Iterable[Path]) -> list[Summary]:
    """For each family and GPU of which there are several tuning runs among the records, what they say together."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for record in map(read_record, paths):
        if kind_of(record) == "tune":
            runs.setdefault((family_of(record), record["machine"]["gpu"]["name"]), []).append(record)
    return [
        summarise_record(f"{len(records)} tuning runs of {family} on {gpu} together", join_tuned(records))
        for (family, gpu), records in runs.items()
        if len(records) > 1
    ]


def summarise_record(path: str, record: dict) -> Summary:
    """What one record says. ``path`` names it. ValueError where its cells cannot be read."""
    kind, cells = kind_of(record), record["cells"]
    gpu = (record.get("machine") or {}).get("gpu") or {}
    head = Summary(path, kind, record.get("command", ""), gpu.get("name"), record.get("commit"), len(cells))
    reader = _READERS.get(kind)
    if reader is None:
        head.notes.append(f"a record of kind {kind!r}: nothing is known of its cells")
    else:
        try:
            reader(record, head)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a record of kind {kind!r} with a cell that cannot be read: {error!r}") from None
    return head


def _name(cell: dict) -> str:
    return f"{cell['n']}x{cell['k']} M={cell['m']}"


def _mode(cell: dict) -> str:
    """The mode of a benchmark's cell; schema 1 had one."""
    mode = cell.get("mode") or {"chain": "back_to_back", "weights": "cold", "pdl": True}
    return f"{mode['chain']}, {mode['weights']}, PDL {'on' if mode['pdl'] else 'off'}"


def _add_means(head: Summary, rows: Iterable[tuple[str, int, float, float | None, float]]) -> None:
    """``rows``: (group, M, over the floor, over the baseline, microseconds beyond the floor) of each cell."""
    groups: dict[tuple[str, int], list[tuple[float, float | None, float]]] = {}
    for group, m, *times in rows:
        groups.setdefault((group, m), []).append(tuple(times))
    order = list(dict.fromkeys(group for group, _ in groups))
    for (group, m), times in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        over_floor, over_baseline, beyond = zip(*times)
        beyond_us = round(statistics.median(beyond), 2)
        head.means.append(Mean(group, m, len(times), _mean(over_floor), _mean(over_baseline), beyond_us))


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return round(statistics.geometric_mean(known), 4) if known else None


def _add_worst(head: Summary, found: Iterable[Worst]) -> None:
    head.worst.extend(sorted(found, key=lambda one: -one.ratio)[:WORST])


def _bench(record: dict, head: Summary) -> None:
    ran = [cell for cell in record["cells"] if "ours" in cell["timings"]]
    rows, worst = [], []
    for cell in ran:
        us = {name: timing["us"] for name, timing in cell["timings"].items()}
        peers = {name: value for name, value in us.items() if name not in ("ours", "floor", "norm alone")}
        over_cublas = us["ours"] / us["cublas"] if "cublas" in us else None
        beyond = us["ours"] - us["floor"]
        rows.append((_mode(cell), cell["m"], us["ours"] / us["floor"], over_cublas, beyond))
        if peers:
            best = min(peers, key=peers.get)
            worst.append(Worst(f"{_name(cell)}, {_mode(cell)}", round(us["ours"] / peers[best], 4), best))
    _add_means(head, rows)
    _add_worst(head, worst)
    lost = sum(one.ratio > 1 for one in worst)
    head.notes.append(f"{len(worst)} cells against a peer: {len(worst) - lost} won, {lost} lost")
    if len(ran) < head.cells:
        head.notes.append(f"{head.cells - len(ran)} cells have no kernel of ours")
    if record.get("not_reached"):
        head.notes.append(f"{len(record['not_reached'])} cells were not reached in the time given")


def _tune(record: dict, head: Summary) -> None:
    kept = [cell for cell in record["cells"] if cell["winner"] is not None]
    rows = []
    for cell in sorted(kept, key=lambda cell: (cell["residual"], cell["n"] * cell["k"])):
        group = weight_group(cell["n"], cell["k"]) + ", with residual" * cell["residual"]
        beyond = cell["us"] - cell["floor_us"]
        rows.append((group, cell["m"], cell["over_floor"], cell["over_baseline"], beyond))
    _add_means(head, rows)
    _add_worst(head, [Worst(_name(cell), cell["over_baseline"], "baseline") for cell in kept])
    head.notes.append(f"{len(kept)} of {head.cells} measured cells kept; the others are not 5 % under the baseline")
    for one in record.get("excluded", []):
        head.notes.append(f"excluded {one['backend']} {one['config']}: {one['reason']}")
    if record.get("not_reached"):
        head.notes.append(f"{len(record['not_reached'])} shapes were not reached in the time given")


def _check(record: dict, head: Summary) -> None:
    counts = record["counts"]
    head.notes.append(", ".join(f"{counts.get(status.value, 0)} {status}" for status in Status))
    for cell in record["cells"]:
        if cell["status"] == Status.FAILED.value:
            head.failures.append(f"{cell['arch']} {_name(cell)}: {cell['reason']}")


def _host(record: dict, head: Summary) -> None:
    cells = record["cells"]
    head.notes.append(", ".join(f"{name} {value:g}" for name, value in record["medians"].items()))
    _add_worst(head, [Worst(_name(cell), cell["forward_over_f_linear"], "F.linear, on the host") for cell in cells])


def _kda(record: dict, head: Summary) -> None:
    head.notes.append(f"the overlap beats the sequential path in all chains up to M = {record['max_tokens']}")
    for cell in record["cells"]:
        where, ratio = f"M = {cell['m']}, {cell['chain']}", cell["overlap_over"]["sequential"]
        head.worst.append(Worst(where, ratio, "sequential"))
    head.worst.sort(key=lambda one: -one.ratio)


def _layers(record: dict, head: Summary) -> None:
    """Time of a layer with the library over the time without it."""
    cells = record["cells"]
    mean = statistics.geometric_mean(cell["with_over_without"] for cell in cells)
    head.notes.append(f"a layer with the library over one without: {mean:.3f}, geometric mean over {len(cells)} token counts")
    _add_worst(head, [Worst(f"M = {cell['m']}", cell["with_over_without"], "a layer without") for cell in cells])


def _parts(record: dict, head: Summary) -> None:
    """Medians of what each part of a kernel costs, by chain and M."""
    costs: dict[tuple[str, int], dict[str, list[float]]] = {}
    for cell in record["cells"]:
        by_part = costs.setdefault((cell["mode"]["chain"], cell["m"]), {})
        for part, us in cell["costs"].items():
            by_part.setdefault(part, []).append(us)
    for (chain, m), by_part in sorted(costs.items()):
        shown = ", ".join(f"{part} {statistics.median(us):+.2f} us" for part, us in by_part.items())
        head.notes.append(f"{chain}, M = {m}: {shown}")


def _startup(record: dict, head: Summary) -> None:
    for cell in record["cells"]:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cell["seconds"].items())
        head.notes.append(f"{cell['way']}: {cell['total']:.2f} s for {cell['units']} kernels ({phases})")


def _conformance(record: dict, head: Summary) -> None:
    """A run of the conformance suite, merged from its shards or of one alone."""
    outcomes = record.get("outcomes") or collections.Counter(test["outcome"] for test in record["tests"])
    head.notes.append(f"{record['suite']}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    head.failures.extend(f"{test['id']}: {test['outcome']}" for test in record["tests"] if test["outcome"] == "failed")
    for cell in record["cells"]:
        if cell["status"] == Status.FAILED.value:
            head.failures.append(f"{cell['arch']} {_name(cell)}: {cell['reason']}")


def _sanitizer(record: dict, head: Summary) -> None:
    for run in record["cells"]:
        said = f"{run['kernel']} {run['tool']}: {run['errors']} errors, {run['tests']}"
        (head.notes if run["clean"] else head.failures).append(said)


#: How the cells of each kind of record are read.
_READERS = {
    "bench": _bench, "tune": _tune, "check": _check, "host": _host, "kda": _kda, "sanitizer": _sanitizer,
    "layers": _layers, "parts": _parts, "startup": _startup, "conformance": _conformance, "conformance shard": _conformance,
}  # fmt: skip


def markdown(summaries: Sequence[Summary]) -> str:
    """The summaries as Markdown."""
    lines = []
    for one in summaries:
        where = f"{one.gpu or 'no GPU'}, commit {(one.commit or 'unknown')[:12]}"
        lines += [f"## {one.path}", "", f"`{one.command}` on {where}, {one.cells} cells.", ""]
        lines += [f"- {note}" for note in (*one.notes, *(f"FAILED {text}" for text in one.failures))]
        if one.means:
            lines += ["", "| | M | cells | x floor | x baseline | us beyond the floor |", "|---|---|---|---|---|---|"]
            for mean in one.means:
                shown = f"{_text(mean.over_floor)} | {_text(mean.over_baseline)} | {mean.beyond_us:.2f}"
                lines.append(f"| {mean.group} | {mean.m} | {mean.cells} | {shown} |")
        if one.worst:
            lines += ["", "| worst cells | x | against |", "|---|---|---|"]
            lines += [f"| {worst.cell} | {worst.ratio:.3f} | {worst.against} |" for worst in one.worst]
        lines.append("")
    return "\n".join(lines)


def show(console, summaries: Sequence[Summary]) -> None:
    """The summaries as tables."""
    from rich import box
    from rich.table import Table as Grid

    for one in summaries:
        console.print(f"{one.path}: {one.kind}, {one.cells} cells", style="bold", highlight=False, soft_wrap=True)
        console.print(f"{one.command} on {one.gpu or 'no GPU'}, commit {one.commit}", highlight=False, soft_wrap=True)
        for note in one.notes:
            console.print(note, highlight=False, soft_wrap=True, markup=False)
        for text in one.failures:
            console.print(f"FAILED {text}", style="bold red", highlight=False, soft_wrap=True, markup=False)
        if one.means:
            grid = Grid("", "M", "cells", "x floor", "x baseline", "us beyond", title="means by M", box=box.SIMPLE)
            for mean in one.means:
                shown = _text(mean.over_floor), _text(mean.over_baseline), f"{mean.beyond_us:.2f}"
                grid.add_row(mean.group, str(mean.m), str(mean.cells), *shown)
            console.print(grid)
        if one.worst:
            grid = Grid("cell", "x", "against", title="worst cells", box=box.SIMPLE)
            for worst in one.worst:
                grid.add_row(worst.cell, f"{worst.ratio:.3f}", worst.against, style="red" if worst.ratio > 1 else None)
            console.print(grid)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
