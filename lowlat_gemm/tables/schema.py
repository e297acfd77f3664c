"""What a loaded table holds. Everything is frozen: a table is loaded once and shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ..arch import DeviceClass

#: The most tokens that a cell can be about.
MAX_TOKENS = 64

#: Where a cell comes from. ``inherited`` is never written in a file: the loader makes it.
PROVENANCE_KINDS = ("measured", "interpolated", "public", "inherited")

#: A measured cell is in a table only if it beats the baseline by this factor.
MINIMUM_SPEEDUP = 1.05


class TableError(ValueError):
    """A table is missing or wrong. The message names file, row, cell and field, what was found and what is needed."""


def frozen(mapping: Mapping) -> Mapping:
    """A read-only copy."""
    return MappingProxyType(dict(mapping))


@dataclass(frozen=True)
class Source:
    """One entry of a table's ``[sources]``: a publication, or one session of our own measurements."""

    key: str
    kind: str  # "public" or "measured"
    date: str  # ISO; of publication or of measurement
    note: str
    title: str | None = None
    url: str | None = None
    retrieved: str | None = None
    device: str | None = None
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Provenance:
    """Why a cell is believed. Which fields are set depends on ``kind``."""

    kind: str
    source: str | None = None
    device: str | None = None
    date: str | None = None
    time_us: float | None = None
    baseline_us: float | None = None
    versions: Mapping[str, str] | None = None
    inherited_from: str | None = None
    origin: Provenance | None = None

    def __str__(self) -> str:
        if self.kind == "measured":
            return (
                f"measured on {self.device}, {self.date}: {self.time_us:g} us, baseline {self.baseline_us:g} us"
                f" ({self.baseline_us / self.time_us:.2f}x)"
            )
        if self.kind == "public":
            return f"public ({self.source})"
        if self.kind == "inherited":
            return f"inherited from {self.inherited_from}: {self.origin}"
        return self.kind

    def to_json(self) -> dict[str, object]:
        """The fields that are set, as plain JSON values."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if self.versions is not None:
            fields["versions"] = dict(self.versions)
        if self.origin is not None:
            fields["origin"] = self.origin.to_json()
        return fields


@dataclass(frozen=True)
class Cell:
    """The winner for one (N, K, M): a backend, its config as the backend's config dataclass names it, and why."""

    backend: str
    config: Mapping[str, int | str]
    provenance: Provenance


@dataclass(frozen=True)
class ProjectionSpec:
    """One row. ``label`` is for people; nothing is decided by it.

    ``optional_cells``: where a backend that another package brings beats ``cells``, without residual. Such a cell serves
    where that package is installed and serves it; everywhere else the one of ``cells`` does.
    """

    n: int
    k: int
    label: str
    cells: Mapping[int, Cell]
    residual_cells: Mapping[int, Cell] = field(default_factory=lambda: frozen({}))
    optional_cells: Mapping[int, Cell] = field(default_factory=lambda: frozen({}))


#: The most tokens that the KDA projection overlap can be about.
MAX_OVERLAP_TOKENS = 16


@dataclass(frozen=True)
class OverlapLimit:
    """The largest M up to which the overlap beats the sequential path at every M (0: at none), and why it is believed.

    ``provenance`` of a measured limit: the overlap's time at that M (at M = 1 for 0), and as baseline the other path's.
    """

    max_tokens: int
    provenance: Provenance


@dataclass(frozen=True)
class KdaOverlap:
    """The ``[kda_overlap]`` of a table: KDA's input projections on two streams, at TP 8.

    ``limit``: None where nobody has measured one. ``qkvg``, ``fa_beta``, ``f_b``: by M, what a branch runs where it is
    not the cell of the table's own row for its shape.
    """

    limit: OverlapLimit | None
    qkvg: Mapping[int, Cell]
    fa_beta: Mapping[int, Cell]
    f_b: Mapping[int, Cell]


class CellKey(NamedTuple):
    """Which cell of a table."""

    n: int
    k: int
    m: int
    residual: bool


@dataclass(frozen=True)
class Table:
    """The table of one (family, Arch), inherited cells included."""

    family: str
    arch: str
    device: DeviceClass
    device_evidence: str
    inherits: str | None
    sources: Mapping[str, Source]
    projections: Mapping[tuple[int, int], ProjectionSpec]
    path: str
    kda_overlap: KdaOverlap | None = None

    def cell(self, n: int, k: int, m: int, *, residual: bool = False) -> Cell | None:
        """The cell for a local (N, K) at M tokens that needs no other package, or None where the table has none."""
        spec = self.projections.get((n, k))
        if spec is None:
            return None
        return (spec.residual_cells if residual else spec.cells).get(m)

    def cells(self) -> Iterator[tuple[CellKey, Cell]]:
        """Every cell but the optional ones, row by row and M by M; those with residual follow the others of their row."""
        for spec in self.projections.values():
            for residual, cells in ((False, spec.cells), (True, spec.residual_cells)):
                for m, cell in cells.items():
                    yield CellKey(spec.n, spec.k, m, residual), cell

    def optional_cells(self) -> Iterator[tuple[CellKey, Cell]]:
        """Every optional cell, row by row and M by M."""
        for spec in self.projections.values():
            for m, cell in spec.optional_cells.items():
                yield CellKey(spec.n, spec.k, m, False), cell
