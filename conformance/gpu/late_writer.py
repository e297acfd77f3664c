"""The rudest predecessor that PDL allows: it lets its dependents start at once and writes its output late."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_options

THREADS = 256


class LateWriter:
    """dst[i] = src[i] for 32-bit words, ``delay`` nanoseconds after the dependents were let go."""

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, delay: Int64, stream: CUstream):
        grid = cute.ceil_div(cute.size(dst), THREADS)
        self.kernel(src, dst, delay).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, src: cute.Tensor, dst: cute.Tensor, delay: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        device.let_next_kernel_start()
        # Its own predecessor may still read dst.
        device.wait_for_previous_kernel()
        device.hold(delay)
        index = block * THREADS + thread
        if index < cute.size(dst):
            dst[index] = src[index]


@functools.lru_cache(maxsize=None)
def compiled_late_writer(target: str):
    """callable(src, dst, delay_ns, stream) over 1-D int32 tensors."""
    length = cute.sym_int64()
    src, dst = (make_fake_tensor(cutlass.Int32, (length,), (1,), assumed_align=4) for _ in range(2))
    return cute.compile(LateWriter(), src, dst, Int64(0), make_fake_stream(), options=compile_options(target))
