"""What this machine and this Python are, without failing where something is absent."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict, dataclass

from lowlat_gemm.arch import Arch, DeviceProperties, arch_of_capability, device_properties

#: Distributions whose versions say something about a result. The second word tells what each is for.
DISTRIBUTIONS = {
    "torch": "required",
    "nvidia-cutlass-dsl": "kernels",
    "nvidia-cutlass-dsl-libs-cu13": "kernels, CUDA 13",
    "apache-tvm-ffi": "kernels",
    "cuda-bindings": "kernels",
    "flashinfer-python": "optional backend",
    "vllm": "optional adapter",
    "sglang": "optional adapter",
}


@dataclass(frozen=True)
class Gpu:
    """One CUDA device of this machine. ``arch`` is None when its generation is not served."""

    ordinal: int
    properties: DeviceProperties
    arch: Arch | None

    def __str__(self) -> str:
        p = self.properties
        bandwidth = "unknown bandwidth" if p.bandwidth_gbs is None else f"{p.bandwidth_gbs:.0f} GB/s"
        return f"{p.name} (compute capability {p.capability[0]}.{p.capability[1]}, {p.sm_count} SMs, {bandwidth})"


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None where it has no metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: version(name) for name in DISTRIBUTIONS}}


def gpu_for_kernels(wanted: Arch | None = None) -> tuple[Gpu | None, str | None]:
    """The first GPU here of a served generation, or of the ``wanted`` one, and why kernels cannot run on it: (None, why)
    where there is none."""
    from lowlat_gemm.dispatch import missing_packages_refusal

    gpus, why = find_gpus()
    gpu = next((gpu for gpu in gpus if gpu.arch is not None and wanted in (None, gpu.arch)), None)
    if gpu is None:
        return None, why or f"no GPU of {wanted or 'a served generation'}: {', '.join(map(str, gpus))}"
    problem = missing_packages_refusal()
    return gpu, None if problem is None else str(problem)


def find_gpus() -> tuple[list[Gpu], str | None]:
    """This machine's CUDA devices as torch sees them, or an empty list and why there are none."""
    try:
        import torch
    except ImportError as error:
        return [], f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return [], "torch sees no CUDA GPU" + ("" if torch.version.cuda else " (a CPU build of torch)")
    gpus = []
    for ordinal in range(torch.cuda.device_count()):
        properties = device_properties(ordinal)
        gpus.append(Gpu(ordinal, properties, arch_of_capability(properties.capability)))
    return gpus, None


@functools.lru_cache(maxsize=None)
def driver_version() -> str | None:
    """The NVIDIA driver's version, or None."""
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@functools.lru_cache(maxsize=None)
def commit() -> str | None:
    """The commit of the tree in the current folder ("-dirty" with local changes), or None outside a checkout.

    A runner that gets files without a checkout names it in LOWLAT_COMMIT.
    """
    if named := os.environ.get("LOWLAT_COMMIT"):
        return named
    head = _first_line("git", "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("-dirty" if _first_line("git", "status", "--porcelain", "--untracked-files=no") else "")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def machine(gpu: Gpu | None) -> dict:
    """The machine part of a record; no host name, for that says nothing about a result."""
    return {
        "gpu": None if gpu is None else asdict(gpu.properties) | {"capability": list(gpu.properties.capability)},
        "driver": None if gpu is None else driver_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
