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
    """Spins for ``duration`` nanoseconds in each of ``ctas`` CTAs, one an SM; ``spans`` gets when each began and ended."""

    @cute.jit
    def __call__(self, spans: cute.Tensor, ctas: Int32, duration: Int64, stream: CUstream):
        self.kernel(spans, duration).launch(grid=[ctas, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, spans: cute.Tensor, duration: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        words = cutlass.memory.SmemAllocator().allocate_array(Int64, _SHARED_WORDS, byte_alignment=8)
        taken = cute.make_tensor(words, cute.make_layout(_SHARED_WORDS))
        taken[thread] = duration
        begin = Int64(cute.arch.globaltimer())
        device.hold(taken[thread])
        if thread == 0:
            spans[block, 0] = begin
            spans[block, 1] = Int64(cute.arch.globaltimer())


@functools.lru_cache(maxsize=None)
def compiled_occupier(target: str):
    """callable(spans [ctas, 2] int64 in nanoseconds, ctas, duration_ns, stream)."""
    spans = make_fake_tensor(Int64, (cute.sym_int64(), 2), (2, 1), assumed_align=8)
    return cute.compile(Occupier(), spans, Int32(1), Int64(0), make_fake_stream(), options=compile_options(target))
