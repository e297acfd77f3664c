"""From a TOML file to a ``Table``: validation and inheritance.

Whether a config is valid for its (Arch, N, K, M) is not decided here: that is the backend's own predicate, and
tables do not depend on kernels.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import settings
from ..arch import ARCHES, Arch, DeviceClass, parse_arch
from ..backends import CONFIG_KEYS, OPTIONAL_BACKENDS, ConfigKeys
from .fields import (
    DATE,
    LIST,
    POSITIVE_INT,
    POSITIVE_NUMBER,
    SESSION,
    TABLE,
    TEXT,
    VERSIONS,
    Check,
    Where,
    one_of,
    read,
)
from .overlap import inherited_overlap, read_overlap
from .schema import (
    MAX_TOKENS,
    MINIMUM_SPEEDUP,
    PROVENANCE_KINDS,
    Cell,
    ProjectionSpec,
    Provenance,
    Source,
    Table,
    TableError,
    frozen,
)

_FOLDER = Path(__file__).parent
_ARCH_NAMES = tuple(arch.name for arch in ARCHES)

_FORMAT = Check("1", lambda v: type(v) is int and v == 1)
_FAMILY = Check("a name of a-z, 0-9 and _", lambda v: isinstance(v, str) and bool(re.fullmatch(r"[a-z0-9_]+", v)))
_K = Check("a multiple of 8 > 0 (16-byte loads of BF16)", lambda v: type(v) is int and v > 0 and v % 8 == 0)
_KINDS_IN_FILES = tuple(kind for kind in PROVENANCE_KINDS if kind != "inherited")
_TOKENS = Check(f'M in 1..{MAX_TOKENS} or a range "a..b" of it', lambda v: _tokens(v) is not None)

_DEVICE = {
    "name": TEXT,
    "sm_count": POSITIVE_INT,
    "memory": TEXT,
    "bandwidth_gbs": POSITIVE_NUMBER,
    "evidence": TEXT,
}
_SOURCE = {
    "public": {"kind": TEXT, "title": TEXT, "url": TEXT, "date": DATE, "retrieved": DATE, "note": TEXT},
    "measured": {"kind": TEXT, "device": TEXT, "date": DATE, "versions": VERSIONS, "note": TEXT},
}


def table_folders() -> tuple[Path, ...]:
    """Where tables are looked for, in this order: the folder of LOWLAT_GEMM_TABLES, and the one of this package."""
    own = settings.current().tables
    return (_FOLDER,) if own is None else (Path(own), _FOLDER)


def available_tables() -> list[tuple[str, str]]:
    """(family, arch name) of every table that is there, those of the user's own folder first."""
    found: list[tuple[str, str]] = []
    for folder in table_folders():
        here = [
            (path.stem.removesuffix(f"_{arch}"), arch)
            for path in folder.glob("*.toml")
            for arch in _ARCH_NAMES
            if path.stem.endswith(f"_{arch}")
        ]
        found += sorted(here, key=lambda item: (item[0], _ARCH_NAMES.index(item[1])))
    return list(dict.fromkeys(found))


def load_table(family: str, arch: str | Arch) -> Table:
    """The table of (family, arch), the same object on every call. TableError, naming those there are, if none is."""
    return _load_available(family, parse_arch(arch).name, table_folders())


@functools.lru_cache(maxsize=None)
def _load_available(family: str, arch: str, folders: tuple[Path, ...]) -> Table:
    paths = [folder / f"{family}_{arch}.toml" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None or (family, arch) not in available_tables():
        names = ", ".join(f"{f} {a}" for f, a in available_tables()) or "none"
        raise TableError(f"no table for model family {family!r} on {arch}; there are: {names}")
    table = load_table_file(path)
    if (table.family, table.arch) != (family, arch):
        found = f"{table.family} {table.arch}"
        raise TableError(f"{path}: family and arch: found {found}, need {family} {arch} as in its name")
    return table


def load_table_file(path: str | Path) -> Table:
    """The table in a file; a parent that it inherits from lies beside it as ``<family>_<arch>.toml``."""
    return _load(Path(path), ())


def _load(path: Path, children: tuple[str, ...]) -> Table:
    where = Where(str(path))
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: not valid TOML: {error}") from None
    read(
        where,
        data,
        {"format": _FORMAT, "family": _FAMILY, "arch": one_of(_ARCH_NAMES), "device": TABLE},
        {"inherits": one_of(_ARCH_NAMES), **dict.fromkeys(("defaults", "sources", "kda_overlap"), TABLE), "projection": LIST},
    )
    device = read(where.at("device"), data["device"], _DEVICE)
    evidence = device.pop("evidence")
    sources = {key: _source(where.at(f"sources.{key}"), key, entry) for key, entry in data.get("sources", {}).items()}
    reader = _Rows(where, sources, data.get("defaults"))
    rows = reader.read(data.get("projection", []))
    overlap = read_overlap(where.at("kda_overlap"), data["kda_overlap"], reader) if "kda_overlap" in data else None
    inherits = data.get("inherits")
    if inherits is not None:
        parent = _parent(path, where, data["family"], data["arch"], inherits, children)
        rows = {**{key: _inherited(spec, inherits) for key, spec in parent.projections.items()}, **rows}
        if overlap is None and parent.kda_overlap is not None:
            overlap = inherited_overlap(parent.kda_overlap, lambda one: _marked(one, inherits))
        for key, source in parent.sources.items():
            if sources.setdefault(key, source) != source:
                raise where.error(f"sources.{key}", "another source", f"the one that {inherits} has under this key")
    elif not rows:
        raise where.error("projection", "no row", "at least one, or inherits")
    return Table(
        family=data["family"],
        arch=data["arch"],
        device=DeviceClass(**device),
        device_evidence=evidence,
        inherits=inherits,
        sources=frozen(sources),
        projections=frozen(rows),
        path=str(path),
        kda_overlap=overlap,
    )


def _source(where: Where, key: str, entry: Any) -> Source:
    kind = where.check("kind", entry.get("kind") if isinstance(entry, dict) else None, one_of(_SOURCE))
    fields = read(where, entry, _SOURCE[kind])
    for name in ("date", "retrieved"):
        if name in fields:
            fields[name] = fields[name].isoformat()
    if "versions" in fields:
        fields["versions"] = frozen(fields["versions"])
    return Source(key=key, **fields)


def _parent(path: Path, where: Where, family: str, arch: str, inherits: str, children: tuple[str, ...]) -> Table:
    chain = (*children, arch)
    if inherits in chain:
        raise where.error("inherits", " -> ".join((*chain, inherits)), "no cycle")
    parent_path = path.parent / f"{family}_{inherits}.toml"
    if not parent_path.is_file():
        beside = ", ".join(sorted(p.name for p in path.parent.glob(f"{family}_*.toml") if p != path)) or "none"
        raise where.error("inherits", repr(inherits), f"{parent_path.name} beside it (there are: {beside})")
    parent = _load(parent_path, chain)
    if (parent.family, parent.arch) != (family, inherits):
        raise where.error("inherits", f"{parent.family} {parent.arch} in {parent_path.name}", f"{family} {inherits}")
    return parent


def _marked(origin: Provenance, parent: str) -> Provenance:
    return Provenance(kind="inherited", source=origin.source, inherited_from=parent, origin=origin)


def _inherited(spec: ProjectionSpec, parent: str) -> ProjectionSpec:
    def marked(cells: Mapping[int, Cell]) -> Mapping[int, Cell]:
        return frozen({m: replace(cell, provenance=_marked(cell.provenance, parent)) for m, cell in cells.items()})

    kinds = ("cells", "residual_cells", "optional_cells")
    return replace(spec, **{kind: marked(getattr(spec, kind)) for kind in kinds})


class _Rows:
    """The ``[[projection]]`` rows of one file, and how cells and what they are believed for are read."""

    def __init__(self, where: Where, sources: Mapping[str, Source], defaults: Any):
        self.where = where
        self.sources = sources
        if defaults is not None:
            read(where.at("defaults"), defaults, {"provenance": one_of(_KINDS_IN_FILES)}, {"source": TEXT})
        self.defaults = defaults or {}

    def read(self, items: list) -> dict[tuple[int, int], ProjectionSpec]:
        rows: dict[tuple[int, int], ProjectionSpec] = {}
        for index, item in enumerate(items, 1):
            spec = self._row(index, item)
            if (spec.n, spec.k) in rows:
                where = self.where.at(f"projection {spec.n}x{spec.k}")
                raise where.error("n, k", f"a second row (row {index})", "one row per (n, k)")
            rows[spec.n, spec.k] = spec
        return rows

    def _row(self, index: int, item: Any) -> ProjectionSpec:
        n, k = (item.get("n"), item.get("k")) if isinstance(item, dict) else (None, None)
        named = type(n) is int and type(k) is int
        where = self.where.at(f"projection {n}x{k}" if named else f"projection row {index}")
        optional = {"residual_cells": LIST, "optional_cells": LIST}
        read(where, item, {"n": POSITIVE_INT, "k": _K, "label": TEXT, "cells": LIST}, optional)
        cells = self.cells(where, "cell", item["cells"])
        residual = self.cells(where, "residual cell", item.get("residual_cells", []))
        brought = self.cells(where, "optional cell", item.get("optional_cells", []))
        for m, cell in brought.items():
            where.at(f"optional cell m={m}").check("backend", cell.backend, one_of(OPTIONAL_BACKENDS))
        if not cells and not residual:
            raise where.error("cells", "none", "at least one cell")
        return ProjectionSpec(n, k, item["label"], frozen(cells), frozen(residual), frozen(brought))

    def cells(
        self, row: Where, kind: str, items: list, kernels: Mapping[str, ConfigKeys] = CONFIG_KEYS
    ) -> dict[int, Cell]:
        """The cells of ``items`` by M; ``kernels``: those that they can name, with their config keys."""
        cells: dict[int, Cell] = {}
        for index, item in enumerate(items, 1):
            m = item.get("m") if isinstance(item, dict) else None
            row.at(f"{kind} {index}").check("m", m, _TOKENS)
            where = row.at(f"{kind} m={m}")
            cell = self._cell(where, item, kernels)
            for token in _tokens(m):
                if token in cells:
                    raise where.error("m", f"M = {token} in two cells", "one cell per M")
                cells[token] = cell
        cells = dict(sorted(cells.items()))
        for m, cell in cells.items():
            if cell.provenance.kind == "interpolated":
                _check_interpolated(row.at(f"{kind} m={m}"), m, cells)
        return cells

    def _cell(self, where: Where, item: dict[str, Any], kernels: Mapping[str, ConfigKeys]) -> Cell:
        backend = where.check("backend", item.get("backend"), one_of(kernels))
        kind = item.get("provenance", self.defaults.get("provenance"))
        where.check("provenance", kind, one_of(_KINDS_IN_FILES))
        keys = kernels[backend]
        required = {"m": _TOKENS, "backend": TEXT, **dict.fromkeys(keys.required, POSITIVE_INT)}
        required |= {key: one_of(values) for key, values in keys.words.items()}
        optional = {**dict.fromkeys(keys.optional, POSITIVE_INT), "provenance": TEXT}
        if kind == "measured":
            required |= {"time_us": POSITIVE_NUMBER, "baseline_us": POSITIVE_NUMBER}
            optional |= SESSION
        if kind != "interpolated":
            optional["source"] = TEXT
        read(where, item, required, optional)
        if kind == "public":
            provenance = self.public(where, item)
        elif kind == "measured":
            if isinstance(item["m"], str):
                raise where.error("m", repr(item["m"]), "one M: a time is measured at one token count")
            provenance = self.measured(where, item)
            time_us, baseline_us = item["time_us"], item["baseline_us"]
            if time_us * MINIMUM_SPEEDUP > baseline_us:
                need = f"at most baseline_us / {MINIMUM_SPEEDUP} = {baseline_us / MINIMUM_SPEEDUP:.4g}"
                raise where.error("time_us", f"{time_us} against a baseline_us of {baseline_us}", need)
        else:
            provenance = Provenance(kind=kind)
        config = {key: item[key] for key in keys.names if key in item}
        return Cell(backend=backend, config=frozen(config), provenance=provenance)

    def _source_of(self, where: Where, item: dict[str, Any], kind: str) -> Source | None:
        key = item.get("source", self.defaults.get("source") if kind == self.defaults.get("provenance") else None)
        if key is None:
            return None
        known = [name for name, source in self.sources.items() if source.kind == kind]
        if key not in known:
            need = f"a key of [sources] of kind {kind!r} (there are: {', '.join(known) or 'none'})"
            raise where.error("source", repr(key), need)
        return self.sources[key]

    def public(self, where: Where, item: dict[str, Any]) -> Provenance:
        """Of what names a public source, or has that of the defaults."""
        source = self._source_of(where, item, "public")
        if source is None:
            raise where.error("source", "nothing", "the key of a public entry of [sources]")
        return Provenance(kind="public", source=source.key)

    def measured(self, where: Where, item: dict[str, Any]) -> Provenance:
        """Of what has two times; device, date and versions are its own or those of a measured source."""
        source = self._source_of(where, item, "measured")
        session = {name: item[name] for name in SESSION if name in item}
        if source is None:
            for name, check in SESSION.items():
                where.check(name, session.get(name), check)
        else:
            session = {name: getattr(source, name) for name in SESSION} | session
        return Provenance(
            kind="measured",
            source=source.key if source else None,
            device=session["device"],
            date=str(session["date"]),
            time_us=float(item["time_us"]),
            baseline_us=float(item["baseline_us"]),
            versions=frozen(session["versions"]),
        )


def _tokens(m: Any) -> range | None:
    """The token counts that ``m`` of a cell names, or None if it is not valid."""
    if type(m) is int:
        first = last = m
    elif isinstance(m, str) and (match := re.fullmatch(r"([1-9]\d?)\.\.([1-9]\d?)", m)):
        first, last = map(int, match.groups())
    else:
        return None
    return range(first, last + 1) if 1 <= first <= last <= MAX_TOKENS else None


def _check_interpolated(where: Where, m: int, cells: Mapping[int, Cell]) -> None:
    """The measured cells next to ``m`` on both sides are there, and the one above has its backend and config."""
    measured = [other for other, cell in cells.items() if cell.provenance.kind == "measured"]
    ends = max((o for o in measured if o < m), default=None), min((o for o in measured if o > m), default=None)
    for side, end in zip(("below", "above"), ends):
        if end is None:
            found = f"'interpolated' with no measured cell {side}"
            raise where.error("provenance", found, "a measured cell on both sides")
    above = cells[ends[1]]
    if (above.backend, above.config) != (cells[m].backend, cells[m].config):
        found = f"'interpolated' with another backend or config than the measured cell m={ends[1]} above"
        raise where.error("provenance", found, "those of the measured cell above")
