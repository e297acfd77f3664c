"""The streaming floor: what it costs to pull cold weights through the SMs once, and do nothing with them.

One launch reads each byte once, launched back to back with programmatic dependent launch like the kernels that it is
compared with. Time over this floor is how far a GEMM is from what the memory allows.
"""

import functools

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_options

THREADS = 512
#: 16-byte loads that a thread has in flight.
UNROLL = 8
#: CTAs to choose the best from, as multiples of the SM count; small weights are read fastest by a few.
CTAS_PER_SM = (0.25, 0.5, 1, 2, 3, 4, 6, 8)
_NEVER = 0x9E3779B9


class StreamingRead:
    """XORs all words of a weight; stores nothing, unless the XOR is one value that it practically never is."""

    @cute.jit
    def __call__(self, mW: cute.Tensor, mOut: cute.Tensor, ctas: Int32, stream: CUstream):
        self.kernel(mW, mOut, ctas).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, mW: cute.Tensor, mOut: cute.Tensor, ctas: Int32):  # mW: (vectors of 16 bytes, 4 words); mOut: (1,)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        device.let_next_kernel_start()
        vectors = Int32(cute.size(mW, mode=[0]))
        share = (vectors + ctas - 1) // ctas
        begin = share * block
        end = cutlass.Int32(cutlass.select_(begin + share < vectors, begin + share, vectors))
        base = mW.iterator.toint()
        found = cute.make_rmem_tensor((1,), Uint32)
        found.fill(0)
        batches = (end - begin - thread + THREADS * UNROLL - 1) // (THREADS * UNROLL)
        for b in cutlass.range(batches, unroll=1):
            first = begin + thread + b * (THREADS * UNROLL)
            loaded = []
            for u in cutlass.range_constexpr(UNROLL):
                # The last batch reads its last vector again rather than branch.
                index = cutlass.Int32(cutlass.select_(first + u * THREADS < end, first + u * THREADS, end - 1))
                loaded += device.load_weight_words(base + Int64(index) * 16, 4)
            for word in loaded:
                found[0] = found[0] ^ word
        device.wait_for_previous_kernel()
        if found[0] == Uint32(_NEVER):
            mOut[0] = found[0].bitcast(Int32)


@functools.lru_cache(maxsize=None)
def compiled_streaming_read(target: str):
    """callable(words [V, 4] int32, out [1] int32, ctas, stream) for a compile target such as "sm_90a"."""
    words = make_fake_tensor(Int32, (cute.sym_int64(), 4), (4, 1), assumed_align=16)
    out = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
    return cute.compile(StreamingRead(), words, out, Int32(1), make_fake_stream(), options=compile_options(target))
