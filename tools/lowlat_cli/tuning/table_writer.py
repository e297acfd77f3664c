"""Measured rows into a table file: winners, the session that measured them, and nothing else of the file touched."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowlat_gemm.arch import Arch, DeviceProperties
from lowlat_gemm.backends import CONFIG_KEYS
from lowlat_gemm.tables import Table, available_tables, load_table

from ..table_text import TableText, replace_table, row_text, toml_value
from .candidates import Candidate
from .choose import Times, interpolated, serves_between


@dataclass(frozen=True)
class RowResult:
    """What a run found for one (N, K, residual). ``measured``: every M that was timed; ``chosen``: the winners by M;
    ``widths``: of the token tiles that the generation has."""

    n: int
    k: int
    label: str
    residual: bool
    measured: tuple[int, ...]
    chosen: Mapping[int, Candidate]
    times: Mapping[int, Mapping[Candidate, Times]]
    widths: tuple[int, ...]

    @property
    def between(self) -> dict[int, Candidate]:
        """M that were not measured and are served all the same."""
        return interpolated(self.chosen, self.measured, self.widths)

    @property
    def lost(self) -> set[int]:
        """M that were measured and have no winner."""
        return {*self.measured} - self.chosen.keys()

    def covered(self) -> set[int]:
        """Every M that this result speaks for, with a cell or without."""
        return {*self.measured, *self.between}

    def cells(self, source: str) -> dict[int, dict[str, Any]]:
        """The cells as a table has them."""
        found = {}
        for m, candidate in self.chosen.items():
            us, baseline = self.times[m][candidate].weakest
            found[m] = _config(candidate) | {
                "provenance": "measured", "source": source, "time_us": round(us, 3), "baseline_us": round(baseline, 3),
            }  # fmt: skip
        for m, candidate in self.between.items():
            found[m] = _config(candidate) | {"provenance": "interpolated"}
        return dict(sorted(found.items()))


def _config(candidate: Candidate) -> dict[str, Any]:
    return {"backend": candidate.backend, **candidate.mapping()}


@dataclass(frozen=True)
class Session:
    """Who measured: one entry of a table's ``[sources]``."""

    device: str
    date: datetime.date
    versions: Mapping[str, str]
    note: str

    def block(self, key: str) -> str:
        lines = [f"[sources.{key}]", 'kind = "measured"', f"device = {toml_value(self.device)}"]
        lines += [f"date = {self.date.isoformat()}", f"versions = {toml_value(self.versions)}"]
        return "\n".join([*lines, f"note = {toml_value(self.note)}"]) + "\n"


def new_head(family: str, arch: Arch, device: DeviceProperties) -> str:
    """The head of a table that is not there yet. Memory: as the tables of the same device class have it, or the bus's
    peak alone where there is none."""
    peers = (load_table(*known).device for known in available_tables() if known[1] == arch.name)
    peer = next((one for one in peers if one.mismatch(device) is None), None)
    name = device.name if peer is None else peer.name
    memory = "memory of unknown kind" if peer is None else peer.memory
    if device.bandwidth_gbs is None:
        raise ValueError(f"the memory bandwidth of {device.name} is not known: a table says for which device it is")
    lines = [f"# {family} on {name} ({arch}): the winner per local (N, K) and M.", "format = 1"]
    lines += [f"family = {toml_value(family)}", f'arch = "{arch}"', "", "[device]", f"name = {toml_value(name)}"]
    lines += [f"sm_count = {device.sm_count}", f"memory = {toml_value(memory)}"]
    lines += [f"bandwidth_gbs = {round(device.bandwidth_gbs)}"]
    return "\n".join([*lines, 'evidence = "the CUDA driver, asked by lowlat tune"']) + "\n"


def write_table(path: Path, head: str, rows: Sequence[RowResult], session: Session) -> Table | None:
    """Replaces in ``path``, or in a new table with ``head``, what ``rows`` speak for; None when no row is left.

    Cells of an old row at other M stay; so do other rows, word for word. The file is checked by the loader before it
    takes the old one's place.
    """
    text = TableText.parse(path.read_text(encoding="utf-8") if path.exists() else head)
    old = tomllib.loads(text.render())
    defaults = old.get("defaults", {})
    source = _source_key(text, session)
    text.sources[source] = session.block(source)
    by_shape: dict[tuple[int, int], dict[bool, RowResult]] = {}
    for row in rows:
        by_shape.setdefault((row.n, row.k), {})[row.residual] = row
    kept = {(row["n"], row["k"]): row for row in old.get("projection", [])}
    for (n, k), results in by_shape.items():
        former = kept.get((n, k), {})
        both = {}
        for residual, field in ((False, "cells"), (True, "residual_cells")):
            cells = _expanded(former.get(field, ()))
            if residual in results:
                row = results[residual]
                new, covered = row.cells(source), row.covered()
                cells = {m: cell for m, cell in cells.items() if m not in covered} | new
                cells = _with_sound_ends(cells, row.lost, row.widths)
            both[field] = cells
        label = former.get("label") or next(iter(results.values())).label
        if any(both.values()):
            text.rows[n, k] = row_text(n, k, label, both["cells"], both["residual_cells"])
            text.lost.discard((n, k))
        else:
            text.rows.pop((n, k), None)
            text.lost.add((n, k))
    _drop_unused_sources(text, defaults)
    if not text.rows and "inherits" not in old:
        return None
    return replace_table(path, text.render())


def _source_key(text: TableText, session: Session) -> str:
    """A key of this session: the same when the same session is there, else one that is free."""
    base = f"{'_'.join(session.device.lower().split())}_{session.date:%Y_%m_%d}".replace("-", "_")
    base = "".join(letter for letter in base if letter.isalnum() or letter == "_")
    numbered = (base if number == 1 else f"{base}_{number}" for number in range(1, 1000))
    return next(key for key in numbered if text.sources.get(key) in (None, session.block(key)))


def _expanded(items: Iterable[Mapping]) -> dict[int, dict[str, Any]]:
    """Old cells, one an M, word for word."""
    found = {}
    for item in items:
        first, _, last = str(item["m"]).partition("..")
        for m in range(int(first), int(last or first) + 1):
            found[m] = {key: value for key, value in item.items() if key != "m"}
    return dict(sorted(found.items()))


def _with_sound_ends(cells: Mapping[int, dict[str, Any]], lost: set[int], widths: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Interpolated cells as their measured neighbours are now, by the rule of ``interpolated``: with the config of the
    upper one, and gone where a neighbour is missing or a count between the two was measured and ``lost``."""
    measured = {m: _choice(cell) for m, cell in cells.items() if "time_us" in cell}
    found = {}
    for m, cell in sorted(cells.items()):
        if cell.get("provenance") == "interpolated":
            low, high = max((o for o in measured if o < m), default=None), min((o for o in measured if o > m), default=None)
            if low is None or high is None or any(low < gap < high for gap in lost):
                continue
            if not serves_between(measured[low], measured[high], high, m, widths):
                continue
            cell = measured[high] | {"provenance": "interpolated"}
        found[m] = cell
    return found


def _choice(cell: Mapping) -> dict[str, Any]:
    """Backend and config of a table's cell."""
    return {key: cell[key] for key in ("backend", *CONFIG_KEYS[cell["backend"]].names) if key in cell}


def _drop_unused_sources(text: TableText, defaults: Mapping) -> None:
    """Sources of measurements that no cell and no limit names any more."""
    rows = "".join([text.overlap, *text.rows.values()])
    for key, block in list(text.sources.items()):
        if 'kind = "measured"' in block and f'source = "{key}"' not in rows and defaults.get("source") != key:
            del text.sources[key]
