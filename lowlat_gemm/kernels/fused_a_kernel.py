"""The CuTe DSL code of ``fused_a``: the decomposition is described in ``fused_a.py``, its host side."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .fused_a import K_BLOCK, TOKEN_GROUP, FusedASpec

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
            grid=[
                cute.ceil_div(cute.size(mW, mode=[0]), self.config.rows),
                cute.ceil_div(cute.size(mX, mode=[0]), self.groups * TOKEN_GROUP),
                1,
            ],
            block=[self.config.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mR: cute.Tensor | None, mY: cute.Tensor):
        c, groups = self.config, self.groups
        thread, _, _ = cute.arch.thread_idx()
        block, token_tile, _ = cute.arch.block_idx()
        lane, warp = thread % device.WARP, thread // device.WARP
        k_warp, row_warp = warp % c.k_warps, warp // c.k_warps
        group_row, quad = lane // 4, lane % 4
        m_extent, n_extent = Int32(cute.size(mX, mode=[0])), Int32(cute.size(mW, mode=[0]))
        blocks = Int32(cute.size(mW, mode=[1])) // K_BLOCK
        mine = (blocks - k_warp + c.k_warps - 1) // c.k_warps
        first_row, first_token = block * c.rows, token_tile * (groups * TOKEN_GROUP)

        device.let_next_kernel_start()

        # Byte addresses of this lane's 16 bytes of its warp's first block. A lane's rows are neighbours: row 2t + h of its
        # own is row ``group_row`` + 8h of the t-th product. Rows past N and tokens past M repeat the last one: their
        # loads stay inside the operand, and their sums are dropped.
        begin = Int64(k_warp * _BLOCK_BYTES + quad * _LANE_BYTES)
        lane_rows = 2 * c.row_tiles
        own_row = first_row + (row_warp * 8 + group_row) * lane_rows
        w_rows = []
        for t in cutlass.range_constexpr(lane_rows):
            row = cutlass.Int32(cutlass.select_(own_row + t < n_extent, own_row + t, n_extent - 1))
            w_rows.append(mW.iterator.toint() + Int64(row) * (mW.stride[0] * 2) + begin)
        x_rows = []
        for g in cutlass.range_constexpr(groups):
            token = first_token + g * TOKEN_GROUP + group_row
            token = cutlass.Int32(cutlass.select_(token < m_extent, token, m_extent - 1))
            x_rows.append(mX.iterator.toint() + Int64(token) * (mX.stride[0] * 2) + begin)

        acc = cute.make_rmem_tensor((c.row_tiles * groups * 4,), Float32)
        acc.fill(0.0)

        # The weights of the first blocks leave before the PDL wait; every warp has so many, as the predicate sees to.
        first = self.load(w_rows, Int32(0), device.load_weight_words)
        device.wait_for_previous_kernel()
        self.multiply(acc, first, self.load_tokens(x_rows, Int32(0)))
        chunks = mine // c.unroll
        for i in cutlass.range(1, chunks, unroll=1):
            weights = self.load(w_rows, i * c.unroll, device.load_weight_words)
            self.multiply(acc, weights, self.load_tokens(x_rows, i * c.unroll))
        for i in cutlass.range(chunks * c.unroll, mine, unroll=1):
            offset = Int64(i) * (c.k_warps * _BLOCK_BYTES)
            weights = [device.load_weight_words(row + offset, 4) for row in w_rows]
            self.multiply_block(acc, weights, [device.load_activation_words(row + offset, 4) for row in x_rows])

        if const_expr(c.k_warps == 1):
            for g in cutlass.range_constexpr(groups):
                for e in cutlass.range_constexpr(2):
                    token = first_token + g * TOKEN_GROUP + quad * 2 + e
                    sums = [acc[(t // 2 * groups + g) * 4 + t % 2 * 2 + e] for t in range(lane_rows)]
                    self.store(sums, mR, mY, token, own_row)
        else:
            self.store_added(acc, mR, mY, thread, first_row, first_token, k_warp, row_warp * 8 + group_row, quad)

    @cute.jit
    def store_added(self, acc, mR, mY, thread, first_row, first_token, k_warp, lane_group, quad):
        """Adds the K warps' sums in their order through shared memory; a thread stores neighbours of a token."""
        c, groups = self.config, self.groups
        outputs = c.rows * groups * TOKEN_GROUP
        allocator = cutlass.memory.SmemAllocator()
        partials = allocator.allocate_tensor(Float32, cute.make_layout((c.k_warps, outputs), stride=(outputs, 1)), 16)
        for t in cutlass.range_constexpr(2 * c.row_tiles):
            for g in cutlass.range_constexpr(groups):
                for e in cutlass.range_constexpr(2):
                    token = g * TOKEN_GROUP + quad * 2 + e
                    row = lane_group * (2 * c.row_tiles) + t
                    partials[k_warp, token * c.rows + row] = acc[(t // 2 * groups + g) * 4 + t % 2 * 2 + e]
        cute.arch.sync_threads()
        # As wide as still gives a warp something to do: the fewer pieces y is written in, the sooner the kernel is over.
        count = next(width for width in (8, 4, 2) if outputs // width >= device.WARP or width == 2)
        for i in cutlass.range_constexpr(-(-outputs // count // c.threads)):
            index = count * (thread + i * c.threads)
            token, row = index // c.rows, index % c.rows
            if index < outputs:
                parts = []
                for w in cutlass.range_constexpr(c.k_warps):
                    source = (partials.iterator + w * outputs + index).toint()
                    pointer = cute.make_ptr(Float32, source, cute.AddressSpace.smem, assumed_align=min(4 * count, 16))
                    part = cute.make_rmem_tensor((count,), Float32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), part)
                    parts.append(part)
                sums = [parts[0][t] for t in range(count)]
                for w in cutlass.range_constexpr(1, c.k_warps):
                    sums = [sums[t] + parts[w][t] for t in range(count)]
                self.store(sums, mR, mY, first_token + token, first_row + row)

    @cute.jit
    def store(self, sums, mR, mY, token, n):
        """y[token, n...] = sums (+ residual), rounded once: as one word where y's rows allow it, else one by one."""
        count = const_expr(len(sums))
        m_extent, n_extent = Int32(cute.size(mY, mode=[0])), Int32(cute.size(mY, mode=[1]))
        if token < m_extent and n < n_extent:
            word = count * 2
            if (mY.iterator.toint() | Int64(mY.stride[0]) * 2) % word == 0 and n + count <= n_extent:
                rounded = cute.make_rmem_tensor((count,), mY.element_type)
                for t in cutlass.range_constexpr(count):
                    value = sums[t]
                    if const_expr(self.residual):
                        value += mR[token, n + t].to(Float32)
                    rounded[t] = value.to(mY.element_type)
                cute.autovec_copy(rounded, device.global_vector(mY, token, n, count, align=word))
            else:
                for t in cutlass.range_constexpr(count):
                    if n + t < n_extent:
                        value = sums[t]
                        if const_expr(self.residual):
                            value += mR[token, n + t].to(Float32)
                        mY[token, n + t] = value.to(mY.element_type)

    @cute.jit
    def load(self, rows, first, load_words):
        """16 bytes a lane of each row, for ``unroll`` of the warp's blocks from its ``first``-th on."""
        loaded = []
        for u in cutlass.range_constexpr(self.config.unroll):
            offset = (Int64(first) + u) * (self.config.k_warps * _BLOCK_BYTES)
            loaded += [load_words(row + offset, 4) for row in rows]
        return loaded

    @cute.jit
    def load_tokens(self, rows, first):
        """The same of each token row. All are requested before the first is waited for."""
        loaded = self.load(rows, first, device.load_activation_words)
        if const_expr(len(loaded) > 4):
            device.arrived_together(loaded)
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
