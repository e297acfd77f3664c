"""``lowlat plan``: the decisions for every projection of a model, by M."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lowlat_gemm.arch import Arch
from lowlat_gemm.dispatch import Decision, explain
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.operands import Reason
from lowlat_gemm.tables import MAX_TOKENS, load_table


@dataclass(frozen=True)
class PlanRow:
    """The decisions for one projection: one a token count that the table has, residual ones apart."""

    name: str
    n: int
    k: int
    decisions: tuple[Decision, ...]
    residual_decisions: tuple[Decision, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "n": self.n,
            "k": self.k,
            "cells": [decision.to_json() for decision in self.decisions + self.residual_decisions],
        }


def plan_rows(model: str, tp: int, arch: Arch) -> list[PlanRow]:
    """One row a projection. ValueError for an unknown model or a TP that does not divide it, or a missing table."""
    load_table(model, arch)
    rows = []
    for projection in projection_shapes(model, tp):
        by_residual = []
        for residual in (False, True):
            decisions = (
                explain(m, projection.n, projection.k, arch=arch, has_residual=residual, names=(model,))
                for m in range(1, MAX_TOKENS + 1)
            )
            by_residual.append(tuple(decision for decision in decisions if decision.backend is not None))
        rows.append(PlanRow(projection.name, projection.n, projection.k, *by_residual))
    return rows


def summary(decisions: tuple[Decision, ...]) -> str:
    """The backends by ranges of M: "1-6 skinny, 7-16 fused_a (not built)"."""
    parts = []
    for label, run in itertools.groupby(decisions, key=_label):
        tokens = [decision.num_tokens for decision in run]
        parts += [f"{_range(first, last)} {label}" for first, last in _consecutive(tokens)]
    return ", ".join(parts)


def _label(decision: Decision) -> str:
    if decision.runs or decision.refusal.reason is Reason.BACKEND_UNAVAILABLE:
        return decision.backend
    if decision.refusal.reason is Reason.BACKEND_NOT_BUILT:
        return f"{decision.backend} (not built)"
    return f"{decision.backend} ({decision.refusal.reason})"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _consecutive(tokens: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for m in tokens:
        if runs and runs[-1][1] == m - 1:
            runs[-1] = (runs[-1][0], m)
        else:
            runs.append((m, m))
    return runs
