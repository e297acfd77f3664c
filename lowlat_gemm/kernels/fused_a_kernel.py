"""The CuTe DSL code of ``fused_a``: the decomposition is described in ``fused_a.py``, its host side."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .fused_a import K_BLOCK, ROW_TILE, TOKEN_GROUP, FusedASpec

_DTYPES = {"bfloat16": BFloat16, "float16": Float16}
_PTX_TYPES = {BFloat16: "bf16", Float16: "f16"}
#: Bytes of a block in a row, and those of one lane.
_BLOCK_BYTES, _LANE_BYTES = 2 * K_BLOCK, 16


class FusedAGemm:
    """One compiled specialisation."""

    def __init__(self, spec: FusedASpec):
        self.config, self.groups, self.residual = spec.config, spec.token_groups, spec.residual
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
        self.kernel(mX, mW, mR, mY).launch(
            grid=[cute.ceil_div(cute.size(mW, mode=[0]), self.config.rows), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mR: cute.Tensor | None, mY: cute.Tensor):
        c, groups = self.config, self.groups
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % device.WARP, thread // device.WARP
        k_warp, row_warp = warp % c.k_warps, warp // c.k_warps
        group_row, quad = lane // 4, lane % 4
        m_extent, n_extent = Int32(cute.size(mX, mode=[0])), Int32(cute.size(mW, mode=[0]))
        blocks = Int32(cute.size(mW, mode=[1])) // K_BLOCK
        mine = (blocks - k_warp + c.k_warps - 1) // c.k_warps
        first_row = block * c.rows

        device.let_next_kernel_start()

        # Byte addresses of this lane's 16 bytes of its warp's first block. Rows past N and tokens past M repeat the last
        # one: their loads stay inside the operand, and their sums are dropped.
        begin = Int64(k_warp * _BLOCK_BYTES + quad * _LANE_BYTES)
        w_rows = []
        for t in cutlass.range_constexpr(2 * c.row_tiles):
            row = first_row + (row_warp * c.row_tiles + t // 2) * ROW_TILE + (t % 2) * 8 + group_row
            row = cutlass.Int32(cutlass.select_(row < n_extent, row, n_extent - 1))
            w_rows.append(mW.iterator.toint() + Int64(row) * (mW.stride[0] * 2) + begin)
        x_rows = []
        for g in cutlass.range_constexpr(groups):
            token = group_row + g * TOKEN_GROUP
            token = cutlass.Int32(cutlass.select_(token < m_extent, token, m_extent - 1))
            x_rows.append(mX.iterator.toint() + Int64(token) * (mX.stride[0] * 2) + begin)

        acc = cute.make_rmem_tensor((c.row_tiles * groups * 4,), Float32)
        acc.fill(0.0)

        # The weights of the first blocks leave before the PDL wait; every warp has so many, as the predicate sees to.
        first = self.load(w_rows, Int32(0), device.load_weight_words)
        device.wait_for_previous_kernel()
        self.multiply(acc, first, self.load(x_rows, Int32(0), device.load_activation_words))
        chunks = mine // c.unroll
        for i in cutlass.range(1, chunks, unroll=1):
            weights = self.load(w_rows, i * c.unroll, device.load_weight_words)
            self.multiply(acc, weights, self.load(x_rows, i * c.unroll, device.load_activation_words))
        for i in cutlass.range(chunks * c.unroll, mine, unroll=1):
            offset = Int64(i) * (c.k_warps * _BLOCK_BYTES)
            weights = [device.load_weight_words(row + offset, 4) for row in w_rows]
            self.multiply_block(acc, weights, [device.load_activation_words(row + offset, 4) for row in x_rows])

        # Partial sums of the K warps, token by token, so that neighbouring threads store neighbouring outputs.
        outputs = c.rows * groups * TOKEN_GROUP
        allocator = cutlass.memory.SmemAllocator()
        partials = allocator.allocate_tensor(Float32, cute.make_layout((c.k_warps, outputs), stride=(outputs, 1)), 16)
        for t in cutlass.range_constexpr(c.row_tiles):
            for g in cutlass.range_constexpr(groups):
                for q in cutlass.range_constexpr(4):
                    row = (row_warp * c.row_tiles + t) * ROW_TILE + (q // 2) * 8 + group_row
                    token = g * TOKEN_GROUP + quad * 2 + q % 2
                    partials[k_warp, token * c.rows + row] = acc[(t * groups + g) * 4 + q]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(-(-outputs // c.threads)):
            index = thread + i * c.threads
            token, row = index // c.rows, index % c.rows
            n = first_row + row
            if index < outputs and token < m_extent and n < n_extent:
                total = partials[0, index]
                for w in cutlass.range_constexpr(1, c.k_warps):
                    total += partials[w, index]
                if const_expr(self.residual):
                    total += mR[token, n].to(Float32)
                mY[token, n] = total.to(mY.element_type)

    @cute.jit
    def load(self, rows, first, load_words):
        """16 bytes a lane of each row, for ``unroll`` of the warp's blocks from its ``first``-th on."""
        loaded = []
        for u in cutlass.range_constexpr(self.config.unroll):
            offset = (Int64(first) + u) * (self.config.k_warps * _BLOCK_BYTES)
            loaded += [load_words(row + offset, 4) for row in rows]
        return loaded

    @cute.jit
    def multiply(self, acc, weights, activations):
        """acc += the products of ``unroll`` blocks."""
        per_block = 2 * self.config.row_tiles
        for u in cutlass.range_constexpr(self.config.unroll):
            block_weights = weights[u * per_block : (u + 1) * per_block]
            self.multiply_block(acc, block_weights, activations[u * self.groups : (u + 1) * self.groups])

    @cute.jit
    def multiply_block(self, acc, weights, activations):
        """acc += the products of one block of 32 K: words 0 and 1 of a lane are one product's operands, 2 and 3 the next's."""
        for half in cutlass.range_constexpr(2):
            for t in cutlass.range_constexpr(self.config.row_tiles):
                upper, lower = weights[2 * t], weights[2 * t + 1]
                a = (upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1])
                for g in cutlass.range_constexpr(self.groups):
                    at = (t * self.groups + g) * 4
                    b = activations[g][2 * half : 2 * half + 2]
                    sums = device.mma_m16n8k16(_PTX_TYPES[self.dtype], a, b, [acc[at + q] for q in range(4)])
                    for q in cutlass.range_constexpr(4):
                        acc[at + q] = sums[q]


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit`` from extents and strides alone. ``compile_function``: ``cute.compile`` or a stand-in."""
    spec: FusedASpec = unit.spec
    dtype = _DTYPES[spec.input_dtype]
    m, n, k = cute.sym_int(), cute.sym_int64(), cute.sym_int64(divisibility=K_BLOCK)

    def matrix(rows, columns, pitch, align):
        return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=align)

    # The row stride of a single token means nothing and may be any number.
    x = matrix(m, k, cute.sym_int64(), 16)
    weight = matrix(n, k, cute.sym_int64(divisibility=8), 16)
    residual = matrix(m, n, cute.sym_int64(), 2) if spec.residual else None
    y = matrix(m, n, cute.sym_int64(), 2)
    return compile_function(FusedAGemm(spec), x, weight, residual, y, make_fake_stream(), options=options)
