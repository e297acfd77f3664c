"""The CuTe DSL code of ``skinny``: the decomposition is described in ``skinny.py``, its host side."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .skinny import SkinnySpec

_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class SkinnyGemm:
    """One compiled specialisation; see the module's docstring for the decomposition."""

    def __init__(self, spec: SkinnySpec):
        self.config, self.tokens, self.residual = spec.config, spec.tokens, spec.residual
        self.dtype = _DTYPES[spec.input_dtype]

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (M, K), row stride dynamic
        mW: cute.Tensor,  # (N, K), row stride dynamic
        mR: cute.Tensor | None,  # (M, N), row stride dynamic; None without residual
        mY: cute.Tensor,  # (M, N), row stride dynamic
        stream: CUstream,
    ):
        n = cute.size(mW, mode=[0])
        self.kernel(mX, mW, mR, mY).launch(
            grid=[cute.ceil_div(n, self.config.outputs_per_block), 1, 1],
            block=[self.config.block_size, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mR: cute.Tensor | None, mY: cute.Tensor):
        config, tokens, outputs = self.config, self.tokens, self.config.outputs_per_block
        count = tokens * outputs
        warps = config.block_size // device.WARP
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % device.WARP, thread // device.WARP
        n_extent = Int32(cute.size(mW, mode=[0]))
        k_extent = config.static_k if const_expr(config.static_k is not None) else Int32(cute.size(mW, mode=[1]))
        first_output = block * outputs
        element_bytes = self.dtype.width // 8

        device.let_next_kernel_start()

        # Byte addresses of this thread's first element in each row. Rows past N repeat the last one: their loads
        # stay inside the weight and their sums are dropped at the store.
        thread_offset = Int64(thread * (config.vector_width * element_bytes))
        w_rows = []
        for o in cutlass.range_constexpr(outputs):
            row = cutlass.Int32(cutlass.select_(first_output + o < n_extent, first_output + o, n_extent - 1))
            w_rows.append(mW.iterator.toint() + Int64(row) * (mW.stride[0] * element_bytes) + thread_offset)
        x_rows = []
        for m in cutlass.range_constexpr(tokens):
            x_rows.append(mX.iterator.toint() + m * (Int64(mX.stride[0]) * element_bytes) + thread_offset)

        acc = cute.make_rmem_tensor((count,), Float32)
        acc.fill(0.0)

        # Whole chunks: all weights of a chunk are in flight before its first product. Those of the first chunk leave
        # before the PDL wait, since no kernel of the chain writes a weight; the wait is in straight-line code behind
        # them, for ptxas moves loads past a conditional one. There is a first chunk: the config is clamped to K's steps.
        first_chunk = self.load_chunk(w_rows, Int64(0))
        device.wait_for_previous_kernel()
        self.add_chunk(acc, first_chunk, x_rows, Int64(0))
        chunks = k_extent // config.chunk
        for c in cutlass.range(1, chunks, unroll=1):
            offset = Int64(c) * (config.chunk * element_bytes)
            self.add_chunk(acc, self.load_chunk(w_rows, offset), x_rows, offset)

        # The rest of K, a step at a time. K is a whole number of vectors, so a thread has a whole vector or none.
        first = chunks * config.chunk
        for s in cutlass.range_constexpr(config.k_unroll):
            k = first + s * config.step
            if k + thread * config.vector_width < k_extent:
                offset = Int64(k) * element_bytes
                self.add_step(acc, self.load_step(w_rows, offset), x_rows, offset)

        # Over the warp, then over the warps in their order.
        allocator = cutlass.memory.SmemAllocator()
        partials = allocator.allocate_tensor(Float32, cute.make_layout((warps, count), stride=(count, 1)), 16)
        for total, index in device.sum_over_warp([acc[i] for i in range(count)], lane):
            partials[warp, index] = total
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(math.ceil(count / config.block_size)):
            index = thread + i * config.block_size
            m, o = index // outputs, index % outputs
            if index < count and first_output + o < n_extent:
                total = partials[0, index]
                for w in cutlass.range_constexpr(1, warps):
                    total += partials[w, index]
                if const_expr(self.residual):
                    total += mR[m, first_output + o].to(Float32)
                mY[m, first_output + o] = total.to(mY.element_type)

    @cute.jit
    def load_chunk(self, w_rows, offset):
        """The packed weight words of one chunk at byte ``offset`` of each row: one list a step and row."""
        step_bytes = self.config.step * (self.dtype.width // 8)
        chunk = []
        for u in cutlass.range_constexpr(self.config.k_unroll):
            chunk += self.load_step(w_rows, offset + u * step_bytes)
        return chunk

    @cute.jit
    def load_step(self, w_rows, offset):
        """The packed weight words of one step at byte ``offset`` of each row."""
        return [device.load_weight_words(row + offset, self.config.vector_width // 2) for row in w_rows]

    @cute.jit
    def add_chunk(self, acc, weights, x_rows, offset):
        """acc[m, o] += x[m] . w[o] over one chunk."""
        outputs, step_bytes = self.config.outputs_per_block, self.config.step * (self.dtype.width // 8)
        for u in cutlass.range_constexpr(self.config.k_unroll):
            self.add_step(acc, weights[u * outputs : (u + 1) * outputs], x_rows, offset + u * step_bytes)

    @cute.jit
    def add_step(self, acc, weights, x_rows, offset):
        """acc[m, o] += x[m] . w[o] over one vector of K a thread."""
        tokens, outputs, width = self.tokens, self.config.outputs_per_block, self.config.vector_width
        x_words = [device.load_activation_words(row + offset, width // 2) for row in x_rows]
        w = [device.unpack_words(words, self.dtype) for words in weights]
        # Tokens outside, one unpacked at a time: at M = 16 all of them unpacked would not fit into registers.
        for m in cutlass.range_constexpr(tokens):
            x = device.unpack_words(x_words[m], self.dtype)
            for o in cutlass.range_constexpr(outputs):
                total = acc[m * outputs + o]
                for v in cutlass.range_constexpr(width):
                    total = total + x[v] * w[o][v]
                acc[m * outputs + o] = total


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit`` from extents and strides alone. ``compile_function``: ``cute.compile`` or a stand-in."""
    spec: SkinnySpec = unit.spec
    dtype = _DTYPES[spec.input_dtype]
    n = cute.sym_int64()
    k = spec.config.static_k or cute.sym_int64(divisibility=8)
    # The row stride of a single row means nothing and may be any number.
    x_pitch = cute.sym_int64(divisibility=8 if spec.tokens > 1 else 1)

    def matrix(rows, columns, pitch, align):
        return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=align)

    x = matrix(spec.tokens, k, x_pitch, 16)
    weight = matrix(n, k, cute.sym_int64(divisibility=8), 16)
    residual = matrix(spec.tokens, n, cute.sym_int64(), 2) if spec.residual else None
    y = matrix(spec.tokens, n, cute.sym_int64(), 2)
    return compile_function(SkinnyGemm(spec), x, weight, residual, y, make_fake_stream(), options=options)
