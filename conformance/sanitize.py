"""Runs parts of the GPU suite under compute-sanitizer: memcheck, racecheck and synccheck, kernel by kernel.

    python -m conformance.sanitize --arch sm90 [--kernel skinny] [--jobs 4] [--record FILE]

torch's caching allocator is off, so that memcheck sees the end of a tensor and not that of a pool. Each run has a time
limit; what a tool reports, or a failed test, fails the run, and the report's lines are printed and recorded. Several run
side by side: most of their time is the tool's own, on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lowlat_cli import environment
from lowlat_cli.record import command_line, make_sanitizer_record, write_record

TOOLS = ("memcheck", "racecheck", "synccheck")
#: kernel -> (test files, pytest filter, narrower filter for racecheck, which is a hundred times slower than the GPU):
#: every path of the kernel with small shapes.
PARTS = {
    "skinny": (
        ["conformance/gpu/test_tails.py", "conformance/gpu/test_layouts.py"],
        "3-residual-bfloat16 or (ends_with and 2304x1536)",
        "(32 and 3-residual-bfloat16) or (128 and 1-plain-bfloat16)",
    ),
    "fused_a": (["conformance/gpu/test_fused_a.py"], "sanitizer", "sanitizer"),
    "split_k": (["conformance/gpu/test_split_k.py"], "sanitizer", "sanitizer"),
    "kda": (["conformance/gpu/test_kda.py"], "fp16 or skinny_n-5 or skinny_k-5", "skinny_n-5 or skinny_k-5"),
}
LIMIT_S = 150
#: Lines of a report that are kept.
REPORT_LINES = 40
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error)|(?:RACECHECK SUMMARY: (\d+) hazard)")


def run_tool(tool: str, kernel: str, arch: str) -> dict:
    """One tool on one kernel: how many errors it reports (None: it did not end), pytest's last line, the report."""
    files, usual, narrow = PARTS[kernel]
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--arch", arch]
    command += ["-k", narrow if tool == "racecheck" else usual, *files]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "LOWLAT_TEST_SANITIZER": "1"},
        )  # fmt: skip
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(), None
    found = _SUMMARY.findall(output)
    tests = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed)", line)]
    report = [line for line in output.splitlines() if line.startswith("=========") or line.startswith("E ")]
    return {
        "tool": tool,
        "kernel": kernel,
        "errors": int(found[-1][0] or found[-1][1]) if found else None,
        "exit": code,
        "tests": tests[-1] if tests else "no test ended",
        "seconds": round(time.monotonic() - began, 1),
        "report": [] if code == 0 else report[:REPORT_LINES],
    }


def is_clean(outcome: dict) -> bool:
    """Whether the tool ended, reported nothing, and the tests passed."""
    return outcome["errors"] == 0 and outcome["exit"] == 0 and re.match(r"\d+ passed", outcome["tests"].strip("= ")) is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--kernel", choices=list(PARTS), action="append")
    parser.add_argument("--jobs", type=int, default=4, help="tools that run side by side")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    gpus, why = environment.find_gpus()
    if not gpus or gpus[0].arch is None or gpus[0].arch.name != arguments.arch:
        print(f"no {arguments.arch} GPU here: {why or gpus[0]}", file=sys.stderr)
        return 2
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    runs = [(tool, kernel, arguments.arch) for kernel in arguments.kernel or PARTS for tool in TOOLS]
    outcomes = []
    with ThreadPoolExecutor(max_workers=max(1, arguments.jobs)) as side_by_side:
        for outcome in side_by_side.map(lambda run: run_tool(*run), runs):
            outcomes.append(outcome | {"clean": is_clean(outcome)})
            verdict = "clean" if is_clean(outcome) else f"{outcome['errors']} errors"
            head = f"{outcome['kernel']} {outcome['tool']}: {verdict}; {outcome['tests']}"
            print(head, *outcome["report"], sep="\n  ", flush=True)
    if arguments.record is not None:
        command = command_line("python -m conformance.sanitize", sys.argv[1:])
        record = make_sanitizer_record(command, outcomes, gpus[0], started, time.monotonic() - clock)
        write_record(record, arguments.record)
    return 0 if all(outcome["clean"] for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
