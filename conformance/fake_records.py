"""Records as a conformance run would write them, for tests of what reads them."""

from __future__ import annotations

from conformance.cases import table_cases
from conformance.sharding import digest
from hw_matrix.coverage import Record, kernel_sources
from lowlat_cli.record import Status
from lowlat_gemm.arch import SM90

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cell_of(case, status="kernel", **changes) -> dict:
    return {
        "arch": case.arch.name, "n": case.n, "k": case.k, "m": case.m, "residual": case.residual, "status": status,
        "family": case.family, "backend": case.cell.backend, "config": dict(case.cell.config), "reason": None,
        "provenance": case.cell.provenance.kind, "worst_ulps": 0.5, "worst_share": 0.25, "seconds": 0.1,
    } | changes  # fmt: skip


def record_of(
    cells: list[dict], *, gpu: str | None = "NVIDIA H200", started="2026-12-01T00:00:00+00:00", **changes
) -> dict:
    machine = {"gpu": gpu and {"name": gpu}, "driver": gpu and "580.159.04", "platform": "Linux x86_64"}
    return {
        "schema": 1, "kind": "conformance", "command": "python -m pytest", "started": started,
        "seconds": 60.0, "commit": COMMIT,
        "machine": machine, "versions": {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}, "kernel_sources": kernel_sources(),
        "seed": 1, "cells": cells,
        "counts": {status.value: sum(c.get("status") == status.value for c in cells) for status in Status},
    } | changes  # fmt: skip


def shards_of(arch=SM90, total=3, status="kernel", suite="gpu", **changes) -> list[Record]:
    """A whole suite of one test a cell, cut into shards."""
    cases = table_cases(arch)
    ids = [f"conformance/{suite}/test_x.py::test_a[{case}]" for case in cases]
    shards = []
    for index in range(total):
        tests = [{"id": name, "outcome": "passed", "seconds": 0.1} for name in ids[index::total]]
        shard = {"index": index, "total": total, "collected": len(ids), "digest": digest(ids)}
        data = record_of([cell_of(case, status) for case in cases[index::total]], **changes)
        data |= {
            "kind": "conformance shard",
            "suite": f"{suite}_{arch}",
            "arch": arch.name,
            "shard": shard,
            "tests": tests,
        }
        shards.append(Record(f"{suite}-{index}", data))
    return shards
