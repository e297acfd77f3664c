"""What the parts of ``split_k`` cost on a Hopper GPU, in the configs of the tables: microseconds by M and chain.

    python -m tools.bench_parts --shape 2880x7168 --shape 2048x1536 --tokens 1,16,64 --record FILE.json
    bazelw run //tools:bench_parts -- ...

``lowlat_cli/split_k_parts.py`` says which parts there are. Exit code 1: the whole kernel was wrong; 2: it could not be run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path

from lowlat_cli import parsing
from lowlat_cli.bench_command import modes
from lowlat_cli.record import command_line, hand_over, make_parts_record


def line(cell) -> str:
    """One cell for people."""
    times = ", ".join(f"{name} {timing.us:.2f}" for name, timing in cell.timings.items())
    costs = ", ".join(f"{part} {us:+.2f}" for part, us in cell.costs.items())
    return f"{cell.n}x{cell.k} M={cell.m} {cell.mode.chain}: {times}; costs {costs}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_parts", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", required=True, help="NxK; may be given again")
    parser.add_argument("--tokens", default="1,8,16,32,64", help="token counts, such as 1,2,4-8")
    parser.add_argument("--chain", action="append", help="back_to_back, or linked; both by default")
    parser.add_argument("--record", type=Path, help="file for the JSON record")
    asked = parser.parse_args()
    if folder := os.environ.get("BUILD_WORKING_DIRECTORY"):  # `bazel run` starts in its runfiles
        os.chdir(folder)
    from lowlat_cli.environment import gpu_for_kernels
    from lowlat_gemm.arch import SM90

    try:
        shapes, counts = [parsing.shape(text) for text in asked.shape], parsing.tokens(asked.tokens)
        timed = modes(["cold"], ["on"], asked.chain or ["back_to_back", "linked"])
    except ValueError as error:
        parser.error(str(error))
    gpu, problem = gpu_for_kernels(SM90)
    if problem is not None:
        print(f"bench_parts: {problem}", file=sys.stderr)
        return 2
    from lowlat_cli.bench import BenchError
    from lowlat_cli.split_k_parts import run_parts

    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    try:
        cells = run_parts(shapes, counts, gpu, timed, say=lambda cell: print(line(cell), flush=True))
    except BenchError as error:
        print(f"bench_parts: {error}", file=sys.stderr)
        return 1
    if not cells:
        print("bench_parts: the tables have split_k at none of these shapes and token counts", file=sys.stderr)
        return 2
    command = command_line("python -m tools.bench_parts", sys.argv[1:])
    hand_over(make_parts_record(command, cells, gpu, started, time.monotonic() - clock), asked.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
