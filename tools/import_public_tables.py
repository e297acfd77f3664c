"""Writes the kimi_k3 tables from the public figures in conformance/data.

    python -m tools.import_public_tables            # writes lowlat_gemm/tables/kimi_k3_*.toml
    python -m tools.import_public_tables --check    # says which of them differ; exit 1 if any does

The tables that are checked in are exactly what this prints: rows without a measured cell are the public ones, in the
order of the source. A row that has one belongs to ``lowlat tune``, as does its source; both are kept word for word,
and shapes that it names as lost stay away. So is a ``[kda_overlap]`` whose limit was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lowlat_gemm.arch import parse_arch
from lowlat_gemm.kernels import flashinfer
from lowlat_gemm.models import projection_shapes

from .lowlat_cli import table_text
from .lowlat_cli.table_text import TableText

ROOT = Path(__file__).parent.parent
DATA = ROOT / "conformance" / "data"
SOURCE = DATA / "kimi_k3_public_vllm_0_33_0.json"
FLASHINFER_SOURCE = DATA / "kimi_k3_public_flashinfer_pr_4908.json"
TABLES = ROOT / "lowlat_gemm" / "tables"
FAMILY = "kimi_k3"

#: TP sizes that name a shape which the public data leaves unnamed.
LABEL_TP = (4, 8, 16)

SOURCE_KEY = "vllm_0_33_0"
SOURCE_ENTRY = {
    "kind": '"public"',
    "title": '"vLLM 0.33.0, vllm/models/kimi_k3/nvidia/low_latency_gemm.py"',
    "url": '"https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/models/kimi_k3/nvidia/low_latency_gemm.py"',
    "date": "2026-11-01",
    "retrieved": "2026-11-30",
    "note": '"measured by its contributors, >= 5 % over cuBLAS over M = 1..16; not measured by this project"',
}

#: The tactics of split-K come from the same file, without times.
SPLIT_K_KEY = f"{SOURCE_KEY}_split_k"
SPLIT_K_ENTRY = SOURCE_ENTRY | {
    "note": '"tactics that it uses by padded token count from 4 tokens on; no times; not measured by this project"'
}
SPLIT_K_ARCHES = ("sm100", "sm103")
#: The fewest tokens that the public dispatch gives to split-K.
SPLIT_K_FEWEST = 4

#: FlashInfer's own figures: optional cells, where every token count of a row was faster on it than on fused_a.
FLASHINFER_KEY = "flashinfer_pr_4908"
FLASHINFER_ENTRY = {
    "kind": '"public"',
    "title": '"FlashInfer pull request 4908: warp split-K behind mm_bf16 cute-dsl"',
    "url": '"https://github.com/flashinfer-ai/flashinfer/pull/4908"',
    "date": "2026-09-03",
    "retrieved": "2026-11-30",
    "note": '"medians over a row\'s tokens against fused-A and cuBLAS, as in vllm-project/vllm pull 54524; no device in what was'
    " read, its token ranges are those of vLLM's fused-A table for SM103; not measured by this project\"",
}

#: The two-stream KDA projection of the same file: what its branches run, and up to which M. It says so for one part.
KDA_KEY = f"{SOURCE_KEY}_kda"
KDA_ENTRY = SOURCE_ENTRY | {
    "note": '"what the branches of its two-stream KDA projection run by M, tuned on B300; no times;'
    ' not measured by this project"'
}
KDA_ARCHES = ("sm90", "sm100", "sm103")
#: On SM90 the other branches have rows that were measured on it.
KDA_BRANCHES = {"sm90": ("fa_beta",)}

#: Device classes: (SM count, memory, GB/s, where that is from). The SM count is the one that CUDA reports, for
#: that is what a device is compared with; whole chips have more.
DEVICES = {
    "sm90": (
        "H200",
        132,
        "HBM3e",
        4814,
        "machine.gpu of hw_matrix/records/sm90/h200-check.json: 132 SMs; 2 x memory clock x bus width",
    ),
    "sm100": (
        "B200",
        148,
        "HBM3e",
        8000,
        "NVIDIA's nominal 8 TB/s; github.com/pytorch/ao/pull/4002: the driver reports 148 SMs and a 7680-bit bus at"
        " 3996 MHz, 7672 GB/s (older drivers an 8192-bit bus)",
    ),
    "sm103": (
        "B300",
        148,
        "HBM3e",
        8000,
        "8 TB/s: developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era, which"
        " counts the 160 SMs of the whole chip; CUDA reports 148 on a B300 SXM6 (152 on GB300)",
    ),
    "sm107": (
        "Rubin",
        212,
        "HBM4",
        22000,
        "secondary web pages give 224 SMs and 22 TB/s; public test code names 212 SMs for R200, and"
        " github.com/flashinfer-ai/flashinfer/issues/4218 shows 216 on a device; none of it read by this project",
    ),
}


def labels() -> dict[tuple[int, int], str]:
    """Names of the local shapes, for rows that the public data does not name."""
    names: dict[tuple[int, int], list[str]] = {}
    for tp in LABEL_TP:
        for shape in projection_shapes(FAMILY, tp):
            found = names.setdefault((shape.n, shape.k), [])
            if shape.name not in found:
                found.append(shape.name)
    return {key: "/".join(found) for key, found in names.items()}


def runs(tokens: list[int]) -> list[tuple[int, int]]:
    """[1, 2, 3, 8] -> [(1, 3), (8, 8)]."""
    found: list[tuple[int, int]] = []
    for token in sorted(tokens):
        if found and found[-1][1] == token - 1:
            found[-1] = (found[-1][0], token)
        else:
            found.append((token, token))
    return found


def cell_lines(fused_a: list[int], skinny: dict[str, dict[str, int]], tactics: dict[str, list[int]]) -> list[str]:
    """Cells in the order of M. ``tactics``: padded tokens -> (rows, token columns, split, stages), for what is left of M."""
    cells = {}
    for first, last in runs(fused_a):
        cells[first] = f'  {{m = {tokens(first, last)}, backend = "fused_a"}},'
    for m, config in skinny.items():
        if int(m) in fused_a:
            raise SystemExit(f"{SOURCE.name}: M = {m} is in both skinny and fused_a_tokens")
        fields = "".join(f", {key} = {value}" for key, value in config.items())
        cells[int(m)] = f'  {{m = {m}, backend = "skinny"{fields}}},'
    least = SPLIT_K_FEWEST
    for padded, tactic in tactics.items():
        left = [m for m in range(least, int(padded) + 1) if m not in fused_a and str(m) not in skinny]
        fields = "".join(f", {key} = {value}" for key, value in zip(("rows", "token_columns", "split", "stages"), tactic))
        for first, last in runs(left):
            cells[first] = f'  {{m = {tokens(first, last)}, backend = "split_k"{fields}, source = "{SPLIT_K_KEY}"}},'
        least = int(padded) + 1
    return [cells[m] for m in sorted(cells)]


def tokens(first: int, last: int) -> str:
    return str(first) if first == last else f'"{first}..{last}"'


def optional_lines(row: dict[str, Any], published: dict[str, Any], arch: str) -> list[str]:
    """The optional cells of a row: ``published`` is what FlashInfer says of its shape, or empty.

    It compares itself with fused_a, so a cell stands beside one of fused_a alone.
    """
    if not published or published["over_fused_a"][0] <= 1:
        return []
    config = {key: published[key] for key in ("kernel", "tactic")}
    first, last = published["tokens"]
    beside = [m for m in range(first, last + 1) if m in row["fused_a_tokens"]]
    fields = "".join(f', {key} = "{value}"' for key, value in config.items())
    for m in beside:
        problem = flashinfer.why_not(parse_arch(arch), row["n"], row["k"], m, flashinfer.parse_config(config))
        if problem or not flashinfer.warp_split_k_serves(row["n"], row["k"]):
            raise SystemExit(f"{FLASHINFER_SOURCE.name}: {row['n']}x{row['k']}, M = {m}: {problem or 'not on warp split-K'}")
    return [
        f'  {{m = {tokens(*run)}, backend = "flashinfer"{fields}, source = "{FLASHINFER_KEY}"}},' for run in runs(beside)
    ]


def row_lines(
    row: dict[str, Any], names: dict[tuple[int, int], str], tactics: dict[str, list[int]], optional: list[str]
) -> list[str]:
    label = row["projection"] or names[row["n"], row["k"]]
    lines = ["", "[[projection]]", f"n = {row['n']}", f"k = {row['k']}", f'label = "{label}"']
    lines += ["cells = [", *cell_lines(row["fused_a_tokens"], row["skinny"], tactics), "]"]
    if row["skinny_residual"]:
        lines += ["residual_cells = [", *cell_lines([], row["skinny_residual"], {}), "]"]
    if optional:
        lines += ["optional_cells = [", *optional, "]"]
    return lines


def flashinfer_rows(arch: str) -> dict[tuple[int, int], dict[str, Any]]:
    """(n, k) -> what FlashInfer has published of a generation."""
    published = json.loads(FLASHINFER_SOURCE.read_text(encoding="utf-8"))
    rows = published["rows"] if published["arch"] == arch else []
    return {(row["n"], row["k"]): row | {key: published[key] for key in ("kernel", "tactic")} for row in rows}


def kda_lines(arch: str, public: dict[str, Any], device: str) -> list[str]:
    """The ``[kda_overlap]`` of a table; its limit is for the device that the public data names, and no other."""

    def cell(backend: str, **config: int | str) -> dict[str, Any]:
        return {"backend": backend, **config, "source": KDA_KEY}

    few, many, most = public["skinny_n_split"], public["skinny_k_split"], public["max_tokens"]
    qkvg = {int(m): cell("skinny", **config) for m, config in public["qkvg_skinny"].items()}
    n_config, k_config = dict(k_warps=14, vector_width=8), dict(k_warps=1, vector_width=4)
    fa_beta = {int(m): cell("kda", rows_per_warp=rows, row_warps=1, **n_config) for m, rows in few.items()}
    f_b = {int(m): cell("kda", rows_per_warp=1, row_warps=rows, **k_config) for m, rows in many.items()}
    branches = {
        "qkvg": {m: cell("flashinfer", kernel="cute-dsl", tactic="autotuned") for m in range(1, most + 1)} | qkvg,
        "fa_beta": {1: cell("skinny", **public["fab_skinny_m1"])} | fa_beta,
        "f_b": f_b,
    }
    lines = ["", "[kda_overlap]"]
    if public["device"] == device:
        lines += [f'limit = {{max_tokens = {public["max_tokens"]}, source = "{KDA_KEY}"}}']
    for name in KDA_BRANCHES.get(arch, branches):
        lines += [f"{name} = [", *table_text.cell_lines(branches[name]), "]"]
    return lines


def split_k_tactics(arch: str, published: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """(n, k) -> what the public data has of split-K for a generation."""
    groups = [published[key] for key in ("tp8", "tp16")] if arch in SPLIT_K_ARCHES else []
    return {(row["n"], row["k"]): row for group in groups for row in group.values()}


def render(
    arch: str, public: dict[str, Any], names: dict[tuple[int, int], str], split_k: dict[str, Any], kda: dict[str, Any]
) -> str:
    """The TOML text of one table. ``split_k``: public tactics of split-K; ``kda``: the two-stream KDA projection."""
    name, sm_count, memory, bandwidth, evidence = DEVICES[arch]
    if public["device"] != name:
        raise SystemExit(f"{SOURCE.name}: {arch}: device is {public['device']!r}, need {name!r}")
    lines = [f"# Kimi-K3 decode projections on {name} ({arch}): the winner per local (N, K) and M."]
    lines += [f"# Written by tools/import_public_tables.py from conformance/data/{SOURCE.name}."]
    if "note" in public:
        lines += [f"# From there: {public['note']}."]
    lines += ["format = 1", f'family = "{FAMILY}"', f'arch = "{arch}"']
    if "inherits" in public:
        lines += [f'inherits = "{public["inherits"]}"']
    lines += ["", "[device]", f'name = "{name}"', f"sm_count = {sm_count}", f'memory = "{memory}"']
    lines += [f"bandwidth_gbs = {bandwidth}", f'evidence = "{evidence}"']
    if "table" in public:
        lines += ["", "# What a cell that names no provenance has.", "[defaults]"]
        lines += ['provenance = "public"', f'source = "{SOURCE_KEY}"']
        lines += ["", f"[sources.{SOURCE_KEY}]", *(f"{key} = {value}" for key, value in SOURCE_ENTRY.items())]
        tactics = split_k_tactics(arch, split_k)
        if tactics:
            lines += ["", f"[sources.{SPLIT_K_KEY}]", *(f"{key} = {value}" for key, value in SPLIT_K_ENTRY.items())]
        brought = flashinfer_rows(arch)
        if brought:
            lines += ["", f"[sources.{FLASHINFER_KEY}]", *(f"{key} = {value}" for key, value in FLASHINFER_ENTRY.items())]
        if arch in KDA_ARCHES:
            lines += ["", f"[sources.{KDA_KEY}]", *(f"{key} = {value}" for key, value in KDA_ENTRY.items())]
            lines += kda_lines(arch, kda, name)
        nothing = {"fused_a_tokens": [], "skinny": {}, "skinny_residual": {}}
        known = {(row["n"], row["k"]) for row in public["table"]}
        rows = public["table"] + [nothing | row for key, row in tactics.items() if key not in known]
        for row in rows:
            published = tactics.get((row["n"], row["k"]), {})
            optional = optional_lines(row, brought.get((row["n"], row["k"]), {}), arch)
            lines += row_lines(row, names, published.get("tactics_by_padded_tokens", {}), optional)
    return "\n".join(lines) + "\n"


def public_texts() -> dict[str, str]:
    """File name -> text of every table, of the public figures alone."""
    public = json.loads(SOURCE.read_text(encoding="utf-8"))
    names, split_k, kda = labels(), public["split_k_sm100"], public["kda_overlap"]
    return {f"{FAMILY}_{arch}.toml": render(arch, public[arch], names, split_k, kda) for arch in DEVICES}


def outputs() -> dict[str, str]:
    """File name -> text of every table, with what is measured in those that are there."""
    found = {}
    for name, text in public_texts().items():
        path = TABLES / name
        found[name] = with_measured(text, path.read_text(encoding="utf-8") if path.is_file() else "")
    return found


def with_measured(public: str, present: str) -> str:
    """The text ``public`` with what ``present`` holds of our own measurements in it."""
    made, there = TableText.parse(public), TableText.parse(present)
    rows = {key: text for key, text in there.rows.items() if "measured" in there.kinds(key)}
    sources = {key: text for key, text in there.sources.items() if 'kind = "measured"' in text}
    made.rows = {key: rows.get(key, text) for key, text in made.rows.items() if key not in there.lost} | rows
    made.lost = there.lost
    if 'provenance = "measured"' in there.overlap:
        made.overlap = there.overlap
    made.sources |= sources
    return made.render()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table differs")
    check = parser.parse_args().check
    differing = []
    for name, text in outputs().items():
        path = TABLES / name
        same = path.is_file() and path.read_bytes() == text.encode()
        if not same and not check:
            path.write_bytes(text.encode())
        differing += [] if same else [name]
    verb = "differs from" if check else "written from"
    for name in differing:
        print(f"{name}: {verb} the public figures")
    if not differing:
        print("all tables are what the public figures say")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
