#!/usr/bin/env python3
"""Regenerates the locks beside it for Python 3.11, from the package index that uv is set up for.

Needs uv (`pip install uv`; or its path in UV). Versions that the locks hold stay as they are; `--upgrade` moves them.

    base.lock        base.in and all it needs, except for
    torch_cpu.lock   the small torch for machines without a GPU, where the index has it
    cuda.lock        what only the CUDA build of torch needs
    flashinfer.lock  flashinfer.in, less what the two others hold
    serving.lock     serving.in and all it needs, as base.lock, and serving_alone.in without anything; for an
                     environment of its own, on whose versions base.lock has no say
    serving_cuda.lock   what only the CUDA build of torch needs there
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# The CPU build of that version of torch, for CPython 3.11 on Linux and x86-64; most indexes do not have it.
TORCH_CPU = "torch==2.13.0+cpu --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
CUDA_ONLY = ("cuda-", "nvidia-", "triton")  # torch's requirements that a CPU build does not have


def resolve(source: str, known_locks: tuple[str, ...], *options: str) -> dict[str, str]:
    """Package name -> its lines of the lock, in order, with the `# via` comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock"
        locks = [HERE / name for name in known_locks]
        known = "\n".join(lock.read_text() for lock in locks if lock.exists() and "--upgrade" not in options)
        # uv keeps the versions that it finds in its output; not the hashes, so that none outlives its file.
        out.write_text("".join(f"{pin}\n" for pin in re.findall(r"(?m)^[\w.-]+==[^\s\\]+", known)))
        command = [os.environ.get("UV", "uv"), "pip", "compile", source, "-o", out, "-q", "--generate-hashes"]
        command += ["--python-version", "3.11", "--no-header", "--no-emit-index-url", *options]
        subprocess.run(command, cwd=HERE, check=True)
        entries = re.split(r"(?m)^(?=\S)", out.read_text())
    return {re.match(r"[\w.-]+", entry)[0]: entry for entry in entries if re.match(r"\w", entry)}


def needed_without_cuda(packages: dict[str, str]) -> set[str]:
    parents = {name: set(re.findall(r"(?m)^    #(?: via|  ) (.+)$", entry)) for name, entry in packages.items()}
    kept: set[str] = set()
    while True:
        more = {
            name
            for name, via in parents.items()
            for parent in via
            if parent.startswith("-r ") or (parent in kept and not (parent == "torch" and name.startswith(CUDA_ONLY)))
        }
        if more == kept:
            return kept
        kept = more


def write(name: str, entries: list[str], about: str) -> None:
    text = "".join(entry if entry.endswith("\n") else entry + "\n" for entry in entries)
    (HERE / name).write_text(f"# Made by requirements/lock.py for Python 3.11: {about}\n{text}")
    print(f"{name}: {len(entries)} packages")


def main() -> None:
    options = sys.argv[1:]
    ours = ("base.lock", "cuda.lock", "flashinfer.lock")
    packages = resolve("base.in", ours, *options)
    if not TORCH_CPU.startswith(packages["torch"].split()[0] + "+cpu "):
        sys.exit(f"base.in resolves to {packages['torch'].split()[0]}: put the hash of its CPU build into TORCH_CPU")
    kept = needed_without_cuda(packages)
    write("base.lock", [e for n, e in packages.items() if n in kept], "base.in.")
    write("cuda.lock", [e for n, e in packages.items() if n not in kept], "what the CUDA build of torch needs besides.")
    write("torch_cpu.lock", [TORCH_CPU], "tried before base.lock where there is no GPU.")
    bounds = ["-c", "base.lock", "-c", "cuda.lock"]
    extra = resolve("flashinfer.in", ours, *options, *bounds)
    write("flashinfer.lock", [e for n, e in extra.items() if n not in packages], "flashinfer.in, beside base.lock.")
    of_serving = ("serving.lock", "serving_cuda.lock")
    needed = resolve("serving.in", of_serving, *options)
    alone = resolve("serving_alone.in", of_serving, *options, "--no-deps")
    kept = needed_without_cuda(needed)
    write("serving.lock", [e for n, e in needed.items() if n in kept and n not in alone] + list(alone.values()), "serving.in, serving_alone.in.")
    write("serving_cuda.lock", [e for n, e in needed.items() if n not in kept], "what the CUDA build of torch needs beside serving.lock.")


if __name__ == "__main__":
    main()
