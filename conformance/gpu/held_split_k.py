"""A test's build of ``split_k`` that is told at run time which rank to hold back, where, and for how long.

``SplitKSpec.hold`` compiles one point, one rank and a few microseconds in. Here one kernel has every point of
``HOLD_POINTS`` and reads what to do from device memory, so that a compile serves all points, ranks and lengths.
"""

from __future__ import annotations

import functools

import cutlass.cute as cute
import torch
from cutlass import Int64

from lowlat_gemm.arch import SM90, Arch
from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_options
from lowlat_gemm.kernels.split_k import HOLD_POINTS, SplitKConfig, compile_unit
from lowlat_gemm.kernels.split_k_pipeline import compile_unit_of
from lowlat_gemm.kernels.split_k_sm90_kernel import SplitKSm90
from lowlat_gemm.kernels.split_k_sm100_kernel import SplitKSm100


def compile_told(arch: Arch, n: int, k: int, config: SplitKConfig, address: int, options: str = ""):
    """The kernel whose hold points read [point, rank, nanoseconds] as int64 at a device's ``address``."""

    class Told(SplitKSm90 if arch == SM90 else SplitKSm100):
        @cute.jit
        def hold_back(self, point, rank):
            pointer = cute.make_ptr(Int64, Int64(address), cute.AddressSpace.gmem, assumed_align=8)
            told = cute.make_tensor(pointer, cute.make_layout(3))
            if told[0] == HOLD_POINTS.index(point):
                if told[1] == Int64(rank):
                    device.hold(told[2])

    unit = compile_unit(arch, n, k, 1, config)
    return compile_unit_of(Told(unit.spec), unit, cute.compile, f"{compile_options(unit.target)} {options}".rstrip())


@functools.lru_cache(maxsize=None)
def compiled_held(arch: Arch, n: int, k: int, config: SplitKConfig):
    """(kernel, hold) with hold(point, rank, nanoseconds) for the launches that follow in the stream; nobody is held at first.

    The kernel is no object of the store's: it has an address of this process in it.
    """
    told = torch.full((3,), -1, dtype=torch.int64, device="cuda")
    kernel = compile_told(arch, n, k, config, told.data_ptr())

    def hold(point: str, rank: int, nanoseconds: int) -> None:
        told.copy_(torch.tensor([HOLD_POINTS.index(point), rank, nanoseconds]))

    return kernel, hold
