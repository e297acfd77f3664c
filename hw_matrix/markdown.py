"""The report as one Markdown table, with what each word means."""

from __future__ import annotations

from .coverage import MEANING, PROVENANCE_MEANING
from .summary import CUBLAS, OURS, Generation, Summary

_HEAD = """\
# What is proven where

Made from `hw_matrix/records/` by `./tools/bazelw run //hw_matrix -- report`; do not edit. Cells are those of the tables
in `lowlat_gemm/tables/`, each a local (N, K) at one token count M.
"""


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(generation: Generation) -> list[str]:
    worst = generation.worst
    return [
        f"{generation.arch.name.upper()} ({generation.runner.gpu})",
        str(len(generation.states)),
        *(str(count or "") for count in generation.proofs.values()),
        *(str(count or "") for count in generation.provenances.values()),
        number(None if worst is None else worst.worst_share, 3),
        number(generation.mean_over_floor(OURS)),
        number(generation.mean_over_floor(CUBLAS)),
    ]


def render(summary: Summary) -> str:
    first = summary.generations[0]
    columns = [
        "generation", "cells", *map(str, first.proofs), *first.provenances, "worst error / bound",
        "ours / floor", "cuBLAS / floor",
    ]  # fmt: skip
    rows = [columns, ["---"] + ["---:"] * (len(columns) - 1), *map(_row, summary.generations)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    missing = [
        f"- {g.arch.name.upper()}: {len(g.missing)} cells claim hardware and have no record"
        for g in summary.generations
        if g.missing
    ]
    words = [f"- **{word}**: {text}" for word, text in {**MEANING, **PROVENANCE_MEANING}.items()]
    said = [f"- {change}" for generation in summary.generations for change in generation.changes]
    red = [f"- {text}" for generation in summary.generations for text in generation.red]
    parts = [_HEAD, table, "", *missing, *([""] if missing else [])]
    parts += ["Not all was green in the runs that this rests on:", "", *red, ""] if red else []
    parts += [
        "The worst error, over the cells that ran on hardware, is a share of what its element may be off FP64: half a",
        "unit in the last place of BF16 and the error of FP32 accumulation. At most 1 is right; `-`: not recorded.",
        "Times are geometric means over the benchmarked cells that a kernel of ours serves: cold weights, PDL, GEMM",
        "after GEMM; the floor is a streaming read of the weight's bytes in the same run.",
    ]
    beside = [f"{generation.optional} on {generation.arch.name.upper()}" for generation in summary.generations if generation.optional]
    if beside:
        parts += [
            "",
            f"Optional cells, kernels of another package that beat the table's own where it is installed: {', '.join(beside)}.",
            "They are not among the cells above, nothing is shown of them, and they are not dispatched.",
        ]
    if said:
        parts += ["", "Since the last record:", "", *said]
    parts += ["", "## Words", "", *words]
    return "\n".join(parts) + "\n"
