"""Which backend serves a local (N, K) at M tokens: one TOML per (model family, Arch), with provenance per cell.

Data only: nothing here imports torch or a kernel. ``load_table("kimi_k3", "sm90")`` gives a read-only ``Table``.
"""

from .loader import available_tables, load_table, load_table_file
from .schema import (
    MAX_OVERLAP_TOKENS,
    MAX_TOKENS,
    PROVENANCE_KINDS,
    Cell,
    CellKey,
    KdaOverlap,
    OverlapLimit,
    ProjectionSpec,
    Provenance,
    Source,
    Table,
    TableError,
)

__all__ = [
    "MAX_OVERLAP_TOKENS",
    "MAX_TOKENS",
    "PROVENANCE_KINDS",
    "Cell",
    "CellKey",
    "KdaOverlap",
    "OverlapLimit",
    "ProjectionSpec",
    "Provenance",
    "Source",
    "Table",
    "TableError",
    "available_tables",
    "load_table",
    "load_table_file",
]
