"""Runs parts of the GPU suite under compute-sanitizer: memcheck, racecheck and synccheck.

    python -m conformance.sanitize --arch sm90 [--record FILE]

torch's caching allocator is off, so that memcheck sees the end of a tensor and not that of a pool. Each tool has a time
limit; what it reports, or a failed test, fails the run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lowlat_cli import environment

#: Tests that reach every path of the kernels with small shapes; racecheck is a hundred times slower than the GPU.
TESTS = ["conformance/gpu/test_tails.py", "conformance/gpu/test_layouts.py", "conformance/gpu/test_split_k.py"]
FILTERS = {
    "memcheck": "3-residual-bfloat16 or (ends_with and 2304x1536) or sanitizer",
    "racecheck": "(32 and 3-residual-bfloat16) or sanitizer",
    "synccheck": "3-residual-bfloat16 or sanitizer",
}
LIMIT_S = 150
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error)|(?:RACECHECK SUMMARY: (\d+) hazard)")


def run_tool(tool: str, arch: str) -> dict:
    """One tool's outcome: errors it reports (None: no summary), pytest's last line, seconds."""
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "--arch", arch, "-k", FILTERS[tool], *TESTS]
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
    return {
        "tool": tool,
        "errors": int(found[-1][0] or found[-1][1]) if found else None,
        "exit": code,
        "tests": tests[-1] if tests else "no test ended",
        "seconds": round(time.monotonic() - began, 1),
        "tail": [] if code == 0 else output.splitlines()[-20:],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    gpus, why = environment.find_gpus()
    if not gpus or gpus[0].arch is None or gpus[0].arch.name != arguments.arch:
        print(f"no {arguments.arch} GPU here: {why or gpus[0]}", file=sys.stderr)
        return 2
    started = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    outcomes = []
    for tool in FILTERS:
        outcomes.append(run_tool(tool, arguments.arch))
        print(f"{tool}: {outcomes[-1]['errors']} errors, {outcomes[-1]['tests']}", *outcomes[-1]["tail"], sep="\n  ", flush=True)
    clean = all(outcome["errors"] == 0 and outcome["exit"] == 0 for outcome in outcomes)
    if arguments.record is not None:
        record = {
            "command": f"python -m conformance.sanitize --arch {arguments.arch}",
            "started": started.isoformat(),
            "commit": environment.commit(),
            "machine": environment.machine(gpus[0]),
            "versions": environment.versions(),
            "clean": clean,
            "tools": outcomes,
        }
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
