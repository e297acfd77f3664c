"""The text of a table file by its parts: what two tools write, each its own rows, without touching the other's.

    head       everything up to the first ``[sources.*]``, ``[kda_overlap]`` or ``[[projection]]``
    sources    one block each
    overlap    the ``[kda_overlap]`` block, if there is one
    rows       one ``[[projection]]`` block each
"""

from __future__ import annotations

import datetime
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lowlat_gemm.tables import Table, load_table_file

_OVERLAP = "[kda_overlap]"
_BLOCK = re.compile(r"^(?=\[\[projection\]\]|\[sources\.|\[kda_overlap\])", re.MULTILINE)
_LOST_WORDS = "# Measured, and no cell kept: "
_LOST = re.compile(rf"^{_LOST_WORDS}(.+)\n", re.MULTILINE)


@dataclass
class TableText:
    """Blocks end with one newline. ``rows``: (n, k) -> text. ``lost``: shapes that were measured and have no row, since
    nothing beat the baseline; a comment in the head names them, so that no other tool brings their old row back."""

    head: str
    sources: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[int, int], str] = field(default_factory=dict)
    lost: set[tuple[int, int]] = field(default_factory=set)
    overlap: str = ""

    @classmethod
    def parse(cls, text: str) -> "TableText":
        head, *blocks = (block.rstrip("\n") + "\n" for block in _BLOCK.split(text))
        made = cls(_LOST.sub("", head))
        for names in _LOST.findall(head):
            made.lost |= {tuple(map(int, name.split("x"))) for name in names.split(", ")}
        for block in blocks:
            if block.startswith("[sources."):
                made.sources[block[len("[sources.") : block.index("]")]] = block
            elif block.startswith(_OVERLAP):
                made.overlap = block
            else:
                row = tomllib.loads(block)["projection"][0]
                made.rows[row["n"], row["k"]] = block
        return made

    def render(self) -> str:
        head = self.head
        if self.lost:
            names = ", ".join(f"{n}x{k}" for n, k in sorted(self.lost))
            head = head.replace("format = 1\n", f"{_LOST_WORDS}{names}\nformat = 1\n", 1)
        return "\n".join([head, *self.sources.values(), *filter(None, [self.overlap]), *self.rows.values()])

    def kinds(self, key: tuple[int, int]) -> set[str | None]:
        """Provenance kinds that the row's cells name; None: the default of the file."""
        row = tomllib.loads(self.rows[key])["projection"][0]
        return {cell.get("provenance") for cell in (*row["cells"], *row.get("residual_cells", ()))}


def toml_value(value) -> str:
    """A string, number, date or flat table as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}" = {toml_value(inner)}' for key, inner in value.items()) + "}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return value.isoformat() if isinstance(value, datetime.date) else repr(value)


def cell_line(m: int | str, cell: Mapping) -> str:
    """One cell of a row: backend, config entries, and what its provenance needs."""
    fields = ", ".join(f"{key} = {toml_value(value)}" for key, value in cell.items())
    return f"  {{m = {toml_value(m)}, {fields}}},"


def cell_lines(cells: Mapping[int, Mapping]) -> list[str]:
    """The cells by M; neighbours that are equal and were not measured are one range."""
    lines: list[str] = []
    ordered = sorted(cells)
    while ordered:
        first = last = ordered.pop(0)
        if "time_us" not in cells[first]:
            while ordered and ordered[0] == last + 1 and cells[ordered[0]] == cells[first]:
                last = ordered.pop(0)
        lines.append(cell_line(first if first == last else f"{first}..{last}", cells[first]))
    return lines


def row_text(
    n: int, k: int, label: str, cells: Mapping[int, Mapping], residual_cells: Mapping[int, Mapping] = {}
) -> str:
    """A ``[[projection]]`` block."""
    lines = ["[[projection]]", f"n = {n}", f"k = {k}", f"label = {toml_value(label)}"]
    lines += ["cells = [", *cell_lines(cells), "]"]
    if residual_cells:
        lines += ["residual_cells = [", *cell_lines(residual_cells), "]"]
    return "\n".join(lines) + "\n"


def replace_table(path: Path, text: str) -> Table:
    """Puts ``text`` in the place of a table file, whole or not at all, once the library's own loader has read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the old one: a parent that it inherits from is looked for there.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        load_table_file(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return load_table_file(path)
