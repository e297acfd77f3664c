"""The CuTe DSL code of ``kda``: the decomposition is described in ``kda.py``, its host side."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .kda import KdaSpec

_DTYPES = {"bfloat16": BFloat16, "float16": Float16}


class KdaGemm:
    """One compiled specialisation."""

    def __init__(self, spec: KdaSpec):
        self.config, self.tokens, self.steps, self.mixed_fma = spec.config, spec.tokens, spec.steps, spec.mixed_fma
        self.dtype = _DTYPES[spec.input_dtype]

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (M, K), row stride dynamic
        mW: cute.Tensor,  # (N, K), row stride dynamic
        mR: cute.Tensor | None,  # None: there is no residual
        mY: cute.Tensor,  # (M, N), row stride dynamic
        stream: CUstream,
    ):
        self.kernel(mX, mW, mY).launch(
            grid=[cute.ceil_div(cute.size(mW, mode=[0]), self.config.rows), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mY: cute.Tensor):
        c, tokens, count = self.config, self.tokens, self.tokens * self.config.rows_per_warp
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % device.WARP, thread // device.WARP
        k_warp, row_warp = warp % c.k_warps, warp // c.k_warps
        n_extent = Int32(cute.size(mW, mode=[0]))
        first_row = block * c.rows + row_warp * c.rows_per_warp
        element_bytes = self.dtype.width // 8

        device.let_next_kernel_start()

        # Rows past N repeat the last one: their loads stay inside the weight and their sums are dropped.
        begin = Int64((k_warp * device.WARP + lane) * (c.vector_width * element_bytes))
        weights = []
        for r in cutlass.range_constexpr(c.rows_per_warp):
            row = cutlass.Int32(cutlass.select_(first_row + r < n_extent, first_row + r, n_extent - 1))
            address = mW.iterator.toint() + Int64(row) * (mW.stride[0] * element_bytes) + begin
            weights.append(self.load(address, device.load_weight_words))
        device.wait_for_previous_kernel()
        sums = []
        for m in cutlass.range_constexpr(tokens):
            address = mX.iterator.toint() + m * (Int64(mX.stride[0]) * element_bytes) + begin
            x = self.load(address, device.load_activation_words)
            sums += [self.dot(x, w) for w in weights]

        totals = device.sum_over_warp(sums, lane)
        if const_expr(c.k_warps == 1):
            for total, index in totals:
                m, row = index // c.rows_per_warp, first_row + index % c.rows_per_warp
                if row < n_extent:
                    mY[m, row] = total.to(mY.element_type)
        else:
            outputs = c.row_warps * count
            allocator = cutlass.memory.SmemAllocator()
            layout = cute.make_layout((c.k_warps, outputs), stride=(outputs, 1))
            partials = allocator.allocate_tensor(Float32, layout, 16)
            for total, index in totals:
                partials[k_warp, row_warp * count + index] = total
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(-(-outputs // c.threads)):
                at = thread + i * c.threads
                m, r = at % count // c.rows_per_warp, at % c.rows_per_warp
                row = block * c.rows + at // count * c.rows_per_warp + r
                if at < outputs and row < n_extent:
                    total = partials[0, at]
                    for w in cutlass.range_constexpr(1, c.k_warps):
                        total += partials[w, at]
                    mY[m, row] = total.to(mY.element_type)

    @cute.jit
    def load(self, address, load_words):
        """The packed words of this lane's part of a row, its steps in order."""
        words = []
        for s in cutlass.range_constexpr(self.steps):
            step = s * (self.config.step * (self.dtype.width // 8))
            words += load_words(address + step, self.config.vector_width // 2)
        return words

    @cute.jit
    def dot(self, x, w):
        """The sum of products of packed words, in their order."""
        total = Float32(0.0)
        for x_word, w_word in zip(x, w):
            if const_expr(self.mixed_fma):
                total = device.add_products(total, x_word, w_word, self.dtype)
            else:
                for a, b in zip(device.unpack_words([x_word], self.dtype), device.unpack_words([w_word], self.dtype)):
                    total = total + a * b
        return total


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit`` from extents and strides alone. ``compile_function``: ``cute.compile`` or a stand-in."""
    spec: KdaSpec = unit.spec
    dtype = _DTYPES[spec.input_dtype]
    n, k = cute.sym_int64(), spec.config.step * spec.steps
    # The row stride of a single row means nothing and may be any number.
    x_pitch = cute.sym_int64(divisibility=8 if spec.tokens > 1 else 1)
    x = make_fake_tensor(dtype, (spec.tokens, k), (x_pitch, 1), assumed_align=16)
    weight = make_fake_tensor(dtype, (n, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
    y = make_fake_tensor(dtype, (spec.tokens, n), (cute.sym_int64(), 1), assumed_align=2)
    return compile_function(KdaGemm(spec), x, weight, None, y, make_fake_stream(), options=options)
