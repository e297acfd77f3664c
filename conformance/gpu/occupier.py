"""A kernel that keeps SMs busy: each CTA takes nearly all shared memory of one and spins."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_options

_SHARED_WORDS = 200 * 1024 // 8


class Occupier:
    """Spins for ``duration`` nanoseconds in each of ``ctas`` CTAs, one an SM, and counts them in ``done``."""

    @cute.jit
    def __call__(self, done: cute.Tensor, ctas: Int32, duration: Int64, stream: CUstream):
        self.kernel(done, duration).launch(grid=[ctas, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, done: cute.Tensor, duration: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        words = cutlass.memory.SmemAllocator().allocate_array(Int64, _SHARED_WORDS, byte_alignment=8)
        taken = cute.make_tensor(words, cute.make_layout(_SHARED_WORDS))
        taken[thread] = duration
        device.hold(taken[thread])
        if thread == 0:
            done[block] = Int32(1)


@functools.lru_cache(maxsize=None)
def compiled_occupier(target: str):
    """callable(done [ctas] int32, ctas, duration_ns, stream)."""
    done = make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)
    return cute.compile(Occupier(), done, Int32(1), Int64(0), make_fake_stream(), options=compile_options(target))
