"""Writes the limit of the KDA overlap that a record of ``lowlat bench --kda`` found into its generation's table.

    lowlat bench --kda --tokens 1-16 --record hw_matrix/records/sm90/h200-kda-overlap.json
    python -m tools.write_kda_limit hw_matrix/records/sm90/h200-kda-overlap.json

The limit is the largest M such that the overlap won at every M up to it, in every chain of the record; 0 where it never
did. Everything else of the table stays as it is, word for word.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowlat_gemm.arch import arch_of_capability
from lowlat_gemm.tables import load_table

from .import_public_tables import FAMILY, TABLES
from .lowlat_cli.kda_bench import limit_times
from .lowlat_cli.table_text import TableText, replace_table, toml_value


def limit_line(record: Mapping[str, Any]) -> str:
    """The ``limit`` of a ``[kda_overlap]``, from a record."""
    if record.get("kind") != "kda":
        raise ValueError(f"a record of kind {record.get('kind')!r}, not of lowlat bench --kda")
    limit, gpu = record["max_tokens"], record["machine"]["gpu"]
    time_us, baseline_us = limit_times(record["cells"], limit)
    versions = {name: text for name, text in record["versions"].items() if text}
    fields = {
        "max_tokens": limit, "provenance": "measured", "device": gpu["name"],
        "date": datetime.datetime.fromisoformat(record["started"]).date(),
        "versions": versions | {"driver": record["machine"]["driver"] or "unknown"},
        "time_us": time_us, "baseline_us": baseline_us,
    }  # fmt: skip
    return "limit = {" + ", ".join(f"{name} = {toml_value(value)}" for name, value in fields.items()) + "}"


def with_limit(overlap: str, line: str) -> str:
    """A ``[kda_overlap]`` block with another limit."""
    head, *rest = overlap.splitlines()
    return "\n".join([head, line, *(other for other in rest if not other.startswith("limit = "))]) + "\n"


def write(record: Mapping[str, Any], folder: Path = TABLES) -> str:
    """Writes the limit into the table of the record's generation in ``folder``; returns one line that says what."""
    gpu = record["machine"]["gpu"]
    arch = None if gpu is None else arch_of_capability(gpu["capability"])
    if arch is None:
        raise ValueError("the record is of no GPU of a served generation")
    device = load_table(FAMILY, arch).device
    if gpu["sm_count"] != device.sm_count:
        table = f"{device.name} with {device.sm_count}"
        raise ValueError(f"the record is of {gpu['name']} with {gpu['sm_count']} SMs, the table of {table}")
    path = folder / f"{FAMILY}_{arch}.toml"
    text = TableText.parse(path.read_text(encoding="utf-8"))
    text.overlap = with_limit(text.overlap or "[kda_overlap]\n", limit_line(record))
    limit = replace_table(path, text.render()).kda_overlap.limit
    return f"{path.name}: KDA overlap up to M = {limit.max_tokens}, {limit.provenance}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    try:
        print(write(json.loads(parser.parse_args().record.read_text())))
    except (OSError, ValueError, KeyError) as error:
        print(f"write_kda_limit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
