"""Reading the ``[kda_overlap]`` of a table: what the branches run, and up to which M the overlap is the better path.

    [kda_overlap]
    limit = {max_tokens = 14, source = "..."}    # none: not measured, and the overlap is refused unless it is forced
    qkvg = [{m = 1, backend = "skinny", ...}]    # cells as those of rows, and of the kernel "kda"; also fa_beta and f_b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..backends import BRANCH_CONFIG_KEYS
from .fields import LIST, POSITIVE_NUMBER, SESSION, TABLE, TEXT, Check, Where, one_of, read
from .schema import MAX_OVERLAP_TOKENS, Cell, KdaOverlap, OverlapLimit, Provenance, frozen

BRANCHES = ("qkvg", "fa_beta", "f_b")
_MAX_TOKENS = Check(f"0 to {MAX_OVERLAP_TOKENS}", lambda v: type(v) is int and 0 <= v <= MAX_OVERLAP_TOKENS)


def read_overlap(where: Where, section: dict[str, Any], rows) -> KdaOverlap:
    """The section. ``rows``: the file's reader of cells and sources (``loader._Rows``)."""
    read(where, section, {}, {"limit": TABLE, **dict.fromkeys(BRANCHES, LIST)})
    limit = _limit(where.at("limit"), section["limit"], rows) if "limit" in section else None
    return KdaOverlap(limit, *(_branch(where.at(name), section.get(name, []), rows) for name in BRANCHES))


def _branch(where: Where, items: list, rows) -> Mapping[int, Cell]:
    cells = rows.cells(where, "cell", items, BRANCH_CONFIG_KEYS)
    for m in cells:
        if m > MAX_OVERLAP_TOKENS:
            raise where.error("m", f"M = {m}", f"at most {MAX_OVERLAP_TOKENS}")
    return frozen(cells)


def _limit(where: Where, item: dict[str, Any], rows) -> OverlapLimit:
    kind = item.get("provenance", rows.defaults.get("provenance"))
    where.check("provenance", kind, one_of(("measured", "public")))
    required, optional = {"max_tokens": _MAX_TOKENS}, {"provenance": TEXT, "source": TEXT}
    if kind == "public":
        read(where, item, required, optional)
        return OverlapLimit(item["max_tokens"], rows.public(where, item))
    read(where, item, required | {"time_us": POSITIVE_NUMBER, "baseline_us": POSITIVE_NUMBER}, optional | SESSION)
    provenance = rows.measured(where, item)
    if (provenance.time_us < provenance.baseline_us) != (item["max_tokens"] > 0):
        found = f"{item['time_us']} against a baseline_us of {item['baseline_us']}, max_tokens {item['max_tokens']}"
        raise where.error("time_us", found, "less than baseline_us, or max_tokens 0 and not less")
    return OverlapLimit(item["max_tokens"], provenance)


def inherited_overlap(parent: KdaOverlap, mark: Callable[[Provenance], Provenance]) -> KdaOverlap:
    """The parent's section as a child has it: all of it marked as inherited."""

    def marked(cells: Mapping[int, Cell]) -> Mapping[int, Cell]:
        return frozen({m: replace(cell, provenance=mark(cell.provenance)) for m, cell in cells.items()})

    limit = parent.limit and OverlapLimit(parent.limit.max_tokens, mark(parent.limit.provenance))
    return KdaOverlap(limit, *(marked(getattr(parent, name)) for name in BRANCHES))
