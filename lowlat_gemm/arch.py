"""GPU generations that this library has tables or kernels for, and what a device must be to use a table.

An exact allow-list: a capability that is not listed here falls back, whatever its number. "At least 9.0" is
how software of this kind has crashed on new parts, so capabilities are only ever compared for equality.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One GPU generation.

    ``shared_memory_bytes`` is the most dynamic shared memory that one CTA may have, by the CuTe DSL's own
    figures (``cutlass.utils.get_smem_capacity_in_bytes``); the compiler does not refuse more.
    """

    name: str
    capability: tuple[int, int]
    compile_target: str
    generation: str
    shared_memory_bytes: int

    def __str__(self) -> str:
        return self.name


SM90 = Arch("sm90", (9, 0), "sm_90a", "Hopper", 232_448)
SM100 = Arch("sm100", (10, 0), "sm_100a", "Blackwell (B200)", 232_448)
SM103 = Arch("sm103", (10, 3), "sm_103a", "Blackwell (B300)", 232_448)
SM107 = Arch("sm107", (10, 7), "sm_107a", "Rubin", 334_848)
ARCHES: tuple[Arch, ...] = (SM90, SM100, SM103, SM107)

#: What ``arch=None`` means on a machine without CUDA.
DEFAULT_ARCH = SM103

_BY_NAME = {arch.name: arch for arch in ARCHES}
_BY_CAPABILITY = {arch.capability: arch for arch in ARCHES}


def parse_arch(arch: str | Arch) -> Arch:
    """The ``Arch`` of a name such as "sm90". Raises ValueError, naming the known ones, for anything else."""
    if isinstance(arch, Arch):
        return arch
    found = _BY_NAME.get(arch) if isinstance(arch, str) else None
    if found is None:
        raise ValueError(f"unknown arch {arch!r}: known are {', '.join(_BY_NAME)}")
    return found


def arch_of_capability(capability: tuple[int, int]) -> Arch | None:
    """The ``Arch`` of an exact compute capability (major, minor), or None when it is not on the list."""
    return _BY_CAPABILITY.get(tuple(capability))


@dataclass(frozen=True)
class DeviceProperties:
    """What a CUDA device is. ``bandwidth_gbs`` (GB/s, peak, from memory clock and bus width) is None if unknown."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    bandwidth_gbs: float | None

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class DeviceClass:
    """What a table was measured on: SM count and memory bandwidth class decide; the name is evidence only."""

    name: str
    sm_count: int
    memory: str
    bandwidth_gbs: float

    #: Parts of one class differ by binning and memory clock by a few percent; HBM3 against HBM3e by 40 %.
    TOLERANCE = 0.15

    def mismatch(self, device: DeviceProperties) -> str | None:
        """Why ``device`` is not of this class, or None when it is."""
        wanted = f"{self.name}: {self.sm_count} SMs, {self.memory} at {self.bandwidth_gbs:.0f} GB/s"
        if device.sm_count != self.sm_count:
            return f"{device.name} has {device.sm_count} SMs; the table was measured on {wanted}"
        if device.bandwidth_gbs is None:
            return f"the memory bandwidth of {device.name} is not known; the table was measured on {wanted}"
        if abs(device.bandwidth_gbs - self.bandwidth_gbs) > self.TOLERANCE * self.bandwidth_gbs:
            return f"{device.name} has {device.bandwidth_gbs:.0f} GB/s; the table was measured on {wanted}"
        return None


# CUdevice_attribute values: CUDA Driver API, cuda.h. The runtime's cudaDeviceProp dropped the clock in CUDA 13,
# the driver's attribute still answers.
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37


def _peak_bandwidth_gbs(ordinal: int) -> float | None:
    """Peak memory bandwidth in GB/s of CUDA device ``ordinal``, or None where the driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, clock, bus = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    for value, attribute in ((clock, _MEMORY_CLOCK_KHZ), (bus, _MEMORY_BUS_BITS)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) or value.value <= 0:
            return None
    return 2 * clock.value * 1e3 * bus.value / 8 / 1e9


@functools.lru_cache(maxsize=None)
def device_properties(ordinal: int) -> DeviceProperties:
    """Properties of CUDA device ``ordinal`` as torch counts them. Raises what torch raises when there is none."""
    import torch

    properties = torch.cuda.get_device_properties(ordinal)
    return DeviceProperties(
        name=properties.name,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        bandwidth_gbs=_peak_bandwidth_gbs(ordinal),
    )


def arch_of_device(ordinal: int) -> Arch | None:
    """The ``Arch`` of CUDA device ``ordinal``, or None when it is not on the list."""
    return arch_of_capability(device_properties(ordinal).capability)


def resolve_arch(arch: str | Arch | None) -> Arch | None:
    """What an ``arch`` argument means: a name or Arch; None is the current CUDA device, without CUDA SM103.

    The answer is None on a CUDA device that is not on the list. Raises ValueError for an unknown name.
    """
    if arch is not None:
        return parse_arch(arch)
    try:
        import torch
    except ImportError:
        return DEFAULT_ARCH
    if not torch.cuda.is_available():
        return DEFAULT_ARCH
    return arch_of_device(torch.cuda.current_device())
