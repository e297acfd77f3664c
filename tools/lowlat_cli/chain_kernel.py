"""The link of a realistic chain: what stands between two projections of a layer, a residual addition and an RMS norm.

A GEMM timed back to back with its own copies starts its loads while its twin still streams. In a model its input is
written by another kernel, which is short, and its output is read by the next one. ``bench`` times that chain as well.
"""

import functools

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_options

THREADS = 512
VECTOR = 8
#: Vectors of a row that one thread may hold: K up to 16384.
VECTORS = 4
EPSILON = 1e-6


class NormLink:
    """x[m, k] = rms_norm(h[m, k] + y[m, k mod N]), one CTA a token. It lets the next kernel start at once."""

    @cute.jit
    def __call__(self, mY: cute.Tensor, mH: cute.Tensor, mX: cute.Tensor, stream: CUstream):
        tokens = cute.size(mX, mode=[0])
        self.kernel(mY, mH, mX).launch(grid=[tokens, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mH: cute.Tensor, mX: cute.Tensor):  # (M, N), (M, K), (M, K)
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        lane, warp = thread % device.WARP, thread // device.WARP
        device.let_next_kernel_start()
        vectors, y_vectors = Int32(cute.size(mX, mode=[1])) // VECTOR, Int32(cute.size(mY, mode=[1])) // VECTOR
        values = cute.make_rmem_tensor((VECTORS * VECTOR,), Float32)
        values.fill(0.0)
        for u in cutlass.range_constexpr(VECTORS):
            index = thread + u * THREADS
            if index < vectors:
                self.add(values, u, mH, token, index)
        device.wait_for_previous_kernel()
        for u in cutlass.range_constexpr(VECTORS):
            index = thread + u * THREADS
            if index < vectors:
                self.add(values, u, mY, token, index % y_vectors)
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(VECTORS * VECTOR):
            squares += values[i] * values[i]
        for offset in (16, 8, 4, 2, 1):
            squares += cute.arch.shuffle_sync_bfly(squares, offset)
        allocator = cutlass.memory.SmemAllocator()
        sums = allocator.allocate_tensor(Float32, cute.make_layout(THREADS // device.WARP), 16)
        if lane == 0:
            sums[warp] = squares
        cute.arch.sync_threads()
        total = Float32(0.0)
        for w in cutlass.range_constexpr(THREADS // device.WARP):
            total += sums[w]
        scale = cute.math.rsqrt(total / Float32(cute.size(mX, mode=[1])) + EPSILON)
        for u in cutlass.range_constexpr(VECTORS):
            index = thread + u * THREADS
            if index < vectors:
                rounded = cute.make_rmem_tensor((VECTOR,), BFloat16)
                for v in cutlass.range_constexpr(VECTOR):
                    rounded[v] = (values[u * VECTOR + v] * scale).to(BFloat16)
                cute.autovec_copy(rounded, device.global_vector(mX, token, index * VECTOR, VECTOR))

    @cute.jit
    def add(self, values, u, matrix, token, index):
        loaded = cute.make_rmem_tensor((VECTOR,), BFloat16)
        cute.autovec_copy(device.global_vector(matrix, token, index * VECTOR, VECTOR), loaded)
        for v in cutlass.range_constexpr(VECTOR):
            values[u * VECTOR + v] += loaded[v].to(Float32)


def why_not(n: int, k: int) -> str | None:
    """Why the link cannot stand between GEMMs of this shape, or None."""
    if n % VECTOR or k % VECTOR or k > THREADS * VECTORS * VECTOR:
        return f"the norm takes N and K in multiples of {VECTOR} and K up to {THREADS * VECTORS * VECTOR}"
    return None


@functools.lru_cache(maxsize=None)
def compiled_norm_link(target: str):
    """callable(y [M, N], h [M, K], x [M, K], stream), BF16, N and K multiples of 8, K at most 16384."""
    m, n, k = cute.sym_int(), cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)

    def operand(columns):
        return make_fake_tensor(BFloat16, (m, columns), (cute.sym_int64(divisibility=VECTOR), 1), assumed_align=16)

    return cute.compile(NormLink(), operand(n), operand(k), operand(k), make_fake_stream(), options=compile_options(target))
