"""Makes, once, a Python environment that requirements/*.lock describe, in a cache folder that clones share.

    ${LOWLAT_BAZEL_CACHE:-${XDG_CACHE_HOME:-~/.cache}/lowlat_gemm}/env-<hash of the locks and the interpreter>

``--environment serving`` makes the one of //conformance:vllm and :sglang instead, beside it as serving-<hash>.

A virtual environment cannot be moved, so it is made in place, under a file lock, and counts only once its
versions.txt is there; what a killed run left behind is made anew. The repository rules in python_env.bzl run this
with the system's Python 3.11; bazelw does so before for the first one, since a failure inside of Bazel comes with pages of Bazel's own.
Standard library only.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
FORMAT = "1"  # part of the key: raise it when this file changes what it makes


#: Environment -> the lock that it is made from, the one that the CUDA build of torch needs besides, and the packages
#: that come without their requirements, by a file of ``requirements``.
ENVIRONMENTS = {"env": ("base", "cuda", None), "serving": ("serving", "serving_cuda", "serving_alone.in")}


class Failed(Exception):
    """What went wrong, in one line."""


def say(text: str) -> None:
    print(f"lowlat_gemm: {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    given = os.environ.get("LOWLAT_BAZEL_CACHE")
    if given:
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache").absolute() / "lowlat_gemm"
    except RuntimeError:
        raise Failed("no home folder is known: set LOWLAT_BAZEL_CACHE to a folder for the Python environment")


def has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia").exists()


def key_of(locks: list[Path]) -> str:
    key = hashlib.sha256("\n".join([FORMAT, sys.version, sys.base_prefix, str(has_gpu())]).encode())
    for lock in locks:
        key.update(lock.read_bytes())
    return key.hexdigest()[:16]


def names_in(lock: Path) -> list[str]:
    return re.findall(r"^[A-Za-z0-9][\w.-]*==[^\s\\;]+", lock.read_text(), re.MULTILINE)


def clean_environment() -> dict[str, str]:
    """The user's own, with its proxy and index settings, but nothing that would send packages elsewhere."""
    redirects = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONUSERBASE"}
    redirects |= {f"PIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER", "REQUIREMENT", "REQUIRE_VIRTUALENV", "NO_COMPILE")}
    kept = {name: value for name, value in os.environ.items() if name not in redirects}
    return kept | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}


def why(output: list[str]) -> str:
    """pip's many lines on a failed install, as one that names the package."""
    package = wanted = None
    for line in output:
        if found := re.match(r"\s+(\S+) from \S+.*:$", line):
            package = found[1]
        elif found := re.match(r"\s+Expected (?:sha256|or) (\w+)", line):
            wanted = found[1]
        elif (found := re.match(r"\s+Got\s+(\w+)", line)) and package:
            return f"wrong hash for {package}: the index gave sha256 {found[1]}, the lock allows {wanted} or others it lists"
    for line in output:
        if found := re.search(r"No matching distribution found for (\S+)", line):
            return f"no index that pip can reach has a wheel of {found[1]}"
        if found := re.search(r"THESE PACKAGES|In --require-hashes mode|No space left|Could not install", line):
            return line.removeprefix("ERROR: ").strip()
    errors = [line.removeprefix("ERROR: ").strip() for line in output if "rror" in line]
    return errors[-1] if errors else (output or ["pip said nothing"])[-1]


def install(python: Path, lock: Path, log: Path) -> None:
    packages = names_in(lock)
    count = f"{len(packages)} packages" if len(packages) > 1 else packages[0]
    say(f"installing {count} of {lock.name} (log: {log})")
    command = [python, "-m", "pip", "install", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--progress-bar=off", "-r", lock]
    output, fetched = [], 0
    with open(log, "a") as file, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environment()
    ) as process:
        for line in process.stdout:
            file.write(line)
            file.flush()
            output.append(line.rstrip("\n"))
            if found := re.match(r"Collecting ([^\s;]+)|Processing \S*/([^/\s]+?-[^-]+)-", line):
                fetched += 1
                say(f"  [{fetched:2}/{len(packages)}] {found[1] or found[2]}")
            elif line.startswith("Installing collected"):
                say("  unpacking and compiling to bytecode (a minute or so) ...")
    if process.returncode:
        raise Failed(f"{lock.name}: {why(output)} (log: {log})")


# Run by the new environment's own Python: requirements of installed packages that are not installed.
_UNMET = """
from importlib.metadata import PackageNotFoundError, distributions, version
from packaging.requirements import Requirement
for dist in distributions():
    for text in dist.requires or ():
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            if need.specifier.contains(version(need.name), prereleases=True):
                continue
        except PackageNotFoundError:
            pass
        print(dist.metadata["Name"], need.name, need.specifier)
"""

_VERSIONS = """
import sys
from importlib.metadata import distributions
print("Python", sys.version.split()[0], sys.base_prefix)
print(*sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()}, key=str.lower), sep="\\n")
"""


def ask(python: Path, code: str) -> str:
    result = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise Failed(f"the new environment does not work: {(result.stderr.strip().splitlines() or ['no output'])[-1]}")
    return result.stdout


def install_torch_for_cpu(python: Path, lock: Path, log: Path) -> None:
    """A tenth of the size, where the index offers it; else base.lock brings the index's usual build."""
    try:
        install(python, lock, log)
    except Failed as error:
        if "no index that pip can reach" not in str(error):
            raise
        say("  the index has no CPU build of torch: taking its usual one")


def unmet(python: Path, alone: Path | None) -> list[str]:
    """What installed packages need and is not installed; of those that ``alone`` names nothing is asked."""
    without = {pin.split("==")[0] for pin in names_in(alone)} if alone else set()
    return [line for line in ask(python, _UNMET).splitlines() if line.split()[0] not in without]


def build(env: Path, locks: dict[str, Path], main: str, cuda: str, alone: Path | None = None) -> None:
    """``main``, ``cuda``: names among ``locks``, see ENVIRONMENTS; ``alone``: a file of requirements."""
    started = time.monotonic()
    say(f"making the Python environment {env}")
    shutil.rmtree(env, ignore_errors=True)
    if subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        raise Failed(f"{sys.executable} lacks its venv module: apt-get install python3-venv")
    made = subprocess.run([sys.executable, "-m", "venv", env], capture_output=True, text=True)
    if made.returncode:
        raise Failed(f"python -m venv: {' '.join((made.stdout + made.stderr).split())}")
    python, log = env / "bin" / "python3", Path(f"{env}.log")
    log.unlink(missing_ok=True)
    if not has_gpu():
        install_torch_for_cpu(python, locks["torch_cpu"], log)
    install(python, locks[main], log)
    # The usual torch needs CUDA's libraries as packages, a CPU build does not: what is installed says which it is.
    if any(line.startswith("torch ") for line in unmet(python, alone)):
        install(python, locks[cuda], log)
    if "flashinfer" in locks:
        install(python, locks["flashinfer"], log)
    if lacking := unmet(python, alone):
        raise Failed("the locks lack what some packages need: " + "; ".join(lacking))
    versions = ask(python, _VERSIONS)
    (env / "versions.tmp").write_text(versions)
    os.replace(env / "versions.tmp", env / "versions.txt")
    say(f"the Python environment is ready ({time.monotonic() - started:.0f} s)")


def build_alone(env: Path, locks: dict[str, Path], *kind: object) -> None:
    """Builds it unless another process does: then it waits for that one."""
    try:
        env.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(f"{env}.lock", "w")
    except OSError as error:
        raise Failed(f"cannot write to the cache folder {env.parent} ({error.strerror}): set LOWLAT_BAZEL_CACHE")
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is making {env}; waiting for it")
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (env / "versions.txt").exists():
            try:
                build(env, locks, *kind)
            except Failed:
                shutil.rmtree(env, ignore_errors=True)  # gigabytes, perhaps
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, help="folder for python.txt and versions.txt, which say what was made")
    parser.add_argument("--environment", choices=ENVIRONMENTS, default="env")
    arguments = parser.parse_args()
    into, environment = arguments.into, arguments.environment
    main_lock, cuda_lock, alone = ENVIRONMENTS[environment]
    names = [main_lock, "torch_cpu", cuda_lock]
    if environment == "env" and os.environ.get("LOWLAT_WITH_FLASHINFER", "0") not in ("", "0"):
        names.append("flashinfer")
    locks = {name: REQUIREMENTS / f"{name}.lock" for name in names}
    env = cache_folder() / f"{environment}-{key_of(list(locks.values()))}"
    if not (env / "versions.txt").exists():
        build_alone(env, locks, main_lock, cuda_lock, REQUIREMENTS / alone if alone else None)
    if into:
        shutil.copyfile(env / "versions.txt", into / "versions.txt")
        (into / "python.txt").write_text(f"{env}/bin/python3\n")


if __name__ == "__main__":
    try:
        main()
    except (Failed, OSError) as error:
        say(f"ERROR: {error}")
        sys.exit(1)
