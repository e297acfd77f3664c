"""What start-up costs a Kimi-K3 rank at TP 8: every kernel that its projections may launch, made ready before serving.

    python -m tools.bench_startup --record hw_matrix/records/sm90/h200-startup-tp8.json
    python -m tools.bench_startup --arch sm103 --archive sm103_aot.zip        # compiles for it; no GPU is needed

Each start is a process of its own with a folder of compiled kernels of its own:

    nothing   an empty folder: everything compiles
    archive   a folder with the generation's archive of kernels made ahead of time, and nothing else
    warm      the folder that ``nothing`` left behind

The ready set is what an adapter makes at its install: all cells of the model's shapes, with and without residual, and
the branches of the KDA overlap. A start is timed from the spawn to the end; within it: importing torch and the library,
making the kernels (compile or load), and on a GPU of the generation the CUDA context and the first launch of each
kernel, which brings its code to the device. Starts take turns over ``--rounds``; numbers are medians. Exit code 1: a
start failed or made something else than it should; 2: it could not be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTHING, ARCHIVE, WARM = "nothing", "archive", "warm"
WAYS = (NOTHING, ARCHIVE, WARM)
MODEL, TP = "kimi_k3", 8
#: Longest that one start may take.
TIMEOUT_S = 600


class Wrong(RuntimeError):
    """A start that failed, or that did not do what its way is to show."""


# The child: one start


def start(arch_name: str) -> dict[str, Any]:
    """One start in this process: seconds by phase, and what was made how."""
    seconds, clock = {}, time.perf_counter()

    def phase(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    import torch

    from lowlat_gemm import execute, settings
    from lowlat_gemm.arch import arch_of_device, parse_arch
    from tools.startup_set import Ready

    phase("import")
    arch = parse_arch(arch_name)
    on_gpu = torch.cuda.is_available() and arch_of_device(torch.cuda.current_device()) == arch
    if on_gpu:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        phase("CUDA context")
    ready = Ready(arch, MODEL, TP)
    phase("plans")
    folder = Path(settings.current().cache_dir)
    before = len(list(folder.glob("*.o")))
    problems = execute.compile_ahead(ready.units)
    phase("kernels")
    if problems:
        raise Wrong("; ".join(problems.values()))
    launched = None
    if on_gpu:
        launched = ready.launch_each()
        torch.cuda.synchronize()
        phase("first launches")
    cache = execute.COMPILE_CACHE
    return {
        "units": len(ready.units), "objects_before": before, "objects_after": len(list(folder.glob("*.o"))),
        "compiles": cache.compiles, "loads": cache.loads, "late": cache.late, "launched": launched, "seconds": seconds,
    }  # fmt: skip


# The parent: starts in turns


def run_start(way: str, arch: str, folder: Path) -> dict[str, Any]:
    """A start in a process of its own with ``folder`` for its compiled kernels. Raises Wrong where it failed."""
    command = [sys.executable, "-m", "tools.bench_startup", "--child", "--arch", arch]
    begin = time.perf_counter()
    try:
        done = _subprocess(command, LOWLAT_GEMM_CACHE_DIR=str(folder))
    except subprocess.TimeoutExpired:
        raise Wrong(f"{way}: a start took more than {TIMEOUT_S} s") from None
    total = time.perf_counter() - begin
    if done.returncode:
        raise Wrong(f"{way}: a start ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"way": way, "total": total, "warnings": done.stderr.strip()[:2000]}


def _subprocess(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    """``command`` with this process's modules, and none of its user's switches of the library."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWLAT_GEMM_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S)


def check(found: Mapping[str, Any]) -> None:
    """Raises Wrong unless the start made its kernels as its way says."""
    way, units = found["way"], found["units"]
    before, after = found["objects_before"], found["objects_after"]
    if found["late"]:
        raise Wrong(f"{way}: {found['late']} launches came before their kernel was made")
    if found["compiles"] + found["loads"] != units:
        raise Wrong(f"{way}: {found['compiles']} kernels compiled and {found['loads']} loaded of {units}")
    if way != NOTHING and found["compiles"]:
        said = found["warnings"] or "nothing"
        raise Wrong(f"{way}: {found['compiles']} of {units} kernels were compiled; the start said: {said}")
    if (before, after) != ((units, units) if way == WARM else (0, units)):
        raise Wrong(f"{way}: the folder went from {before} objects to {after}, of {units} kernels")


def run(arch: str, archive: Path, rounds: int, say=lambda found: None) -> list[dict[str, Any]]:
    """``rounds`` starts of each way, in turns; ``say`` is told each one."""
    starts = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as with_archive:
            os.symlink(archive.absolute(), Path(with_archive) / f"{arch}_aot.zip")
            for way, folder in ((NOTHING, empty), (ARCHIVE, with_archive), (WARM, empty)):
                found = run_start(way, arch, Path(folder))
                check(found)
                starts.append(found)
                say(found)
    return starts


def summary(starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A cell for each way: medians over its starts, in seconds."""
    cells = []
    for way in WAYS:
        found = [one for one in starts if one["way"] == way]
        names = found[0]["seconds"]
        phases = {name: round(statistics.median(one["seconds"][name] for one in found), 3) for name in names}
        totals = sorted(round(one["total"], 3) for one in found)
        counts = {name: found[0][name] for name in ("units", "compiles", "loads", "late", "launched")}
        cells.append({"way": way, "total": statistics.median(totals), "totals": totals, "seconds": phases, **counts})
    return cells


def line(found: Mapping[str, Any]) -> str:
    """One start for people."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["seconds"].items())
    return f"{found['way']:8}{found['total']:8.2f} s ({phases})"


def archive_beside_the_kernels() -> list[Path]:
    """Archives that every start would find, whatever its folder."""
    import lowlat_gemm.kernels
    from lowlat_gemm.kernels.archive import PATTERN

    return sorted(Path(lowlat_gemm.kernels.__file__).parent.glob(PATTERN))


def make_archive(arch: str, folder: str) -> tuple[Path, int, float]:
    """The generation's archive, made now: where, how many kernels, and seconds."""
    path, begin = Path(folder) / f"{arch}_aot.zip", time.perf_counter()
    made = _subprocess([sys.executable, "-m", "tools.build_archive", "--arch", arch, "--out", str(path)])
    if made.returncode:
        raise Wrong(made.stderr.strip())
    return path, archived_kernels(path), time.perf_counter() - begin


def archived_kernels(path: Path) -> int:
    """How many kernels an archive has. ValueError where this Python may not use it."""
    from lowlat_gemm.kernels.archive import Archive
    from lowlat_gemm.kernels.store import origin

    archive = Archive.open(path, origin())
    if archive is None:
        raise ValueError(f"{path} is no archive of these sources and this toolchain")
    return len(archive)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_startup", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", help="generation to start for; by default that of the GPU here")
    parser.add_argument("--archive", type=Path, help="the generation's archive; by default it is made, not timed")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each way")
    parser.add_argument("--record", type=Path, help="file for the JSON record")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if folder := os.environ.get("BUILD_WORKING_DIRECTORY"):  # `bazel run` starts in its runfiles
        os.chdir(folder)
    if asked.child:
        print(json.dumps(start(asked.arch)))
        return 0
    try:
        return _measure(asked)
    except Wrong as error:
        print(f"bench_startup: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"bench_startup: {error}", file=sys.stderr)
        return 2


def _measure(asked: argparse.Namespace) -> int:
    from lowlat_cli.environment import find_gpus
    from lowlat_cli.record import command_line, hand_over, make_startup_record
    from lowlat_gemm.arch import parse_arch
    from lowlat_gemm.dispatch import missing_packages_refusal

    if asked.rounds < 1:
        raise ValueError(f"--rounds {asked.rounds}: at least 1")
    gpus, why = find_gpus()
    gpu = next((gpu for gpu in gpus if gpu.arch is not None and asked.arch in (None, gpu.arch.name)), None)
    if asked.arch is None and gpu is None:
        raise ValueError(f"{why or 'no GPU of a served generation'}; name one with --arch")
    arch = parse_arch(asked.arch or gpu.arch).name
    problem = missing_packages_refusal()
    if problem is not None:
        raise ValueError(str(problem))
    beside = archive_beside_the_kernels()
    if beside:
        raise ValueError(f"{beside[0]} lies beside the kernels: no start would be without an archive")
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if asked.archive is None:
            archive, archived, made_in = make_archive(arch, folder)
            print(f"archive of {archived} kernels made in {made_in:.1f} s", flush=True)
        else:
            archive, archived, made_in = asked.archive, archived_kernels(asked.archive), None
        starts = run(arch, archive, asked.rounds, say=lambda found: print(line(found), flush=True))
    command = command_line("python -m tools.bench_startup", sys.argv[1:])
    about = {"arch": arch, "model": MODEL, "tp": TP, "cores": len(os.sched_getaffinity(0)), "rounds": asked.rounds}
    about |= {"archived": archived, "archive_seconds": made_in and round(made_in, 1)}
    record = make_startup_record(command, about, summary(starts), gpu, started, time.monotonic() - clock)
    hand_over(record, asked.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
