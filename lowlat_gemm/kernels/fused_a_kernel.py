"""The CuTe DSL code of ``fused_a``: the decomposition is described in ``fused_a.py``, its host side."""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .fused_a import (
    AT_ONCE,
    K_BLOCK,
    PARTIAL_PAD,
    PREVIOUS_FINISHED,
    ROW_TILE,
    TOKEN_GROUP,
    WEIGHTS_REQUESTED,
    FusedASpec,
)

_DTYPES = {"bfloat16": BFloat16, "float16": Float16}
_PTX_TYPES = {BFloat16: "bf16", Float16: "f16"}
#: Bytes of a block in a row, and those of one lane.
_BLOCK_BYTES, _LANE_BYTES = 2 * K_BLOCK, 16


class FusedAGemm:
    """One compiled specialisation."""

    def __init__(self, spec: FusedASpec):
        self.config, self.groups, self.residual = spec.config, spec.token_groups, spec.residual
        self.dtype = _DTYPES[spec.input_dtype]
        self.tokens_are_rows, self.whole_k = spec.token_groups == 2, spec.whole_k

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

        self.trigger(AT_ONCE)

        # Byte addresses of this lane's 16 bytes of its warp's first block. Rows past N and tokens past M repeat the last
        # one: their loads stay inside the operand, and their sums are dropped.
        begin = Int64(k_warp * _BLOCK_BYTES + quad * _LANE_BYTES)
        lane_rows = 2 * c.row_tiles
        warp_row = row_warp * c.row_tiles * ROW_TILE
        w_rows = []
        for t in cutlass.range_constexpr(lane_rows):
            row = first_row + warp_row + self.loaded_row(group_row, t)
            row = cutlass.Int32(cutlass.select_(row < n_extent, row, n_extent - 1))
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
        self.trigger(WEIGHTS_REQUESTED)
        device.wait_for_previous_kernel()
        self.trigger(PREVIOUS_FINISHED)
        self.multiply(acc, first, self.load_tokens(x_rows, Int32(0)))
        if const_expr(not self.whole_k):
            chunks = mine // c.unroll
            for i in cutlass.range(1, chunks, unroll=1):
                weights = self.load(w_rows, i * c.unroll, device.load_weight_words)
                self.multiply(acc, weights, self.load_tokens(x_rows, i * c.unroll))
            for i in cutlass.range(chunks * c.unroll, mine, unroll=1):
                offset = Int64(i) * (c.k_warps * _BLOCK_BYTES)
                weights = [device.load_weight_words(row + offset, 4) for row in w_rows]
                self.multiply_block(acc, weights, [device.load_activation_words(row + offset, 4) for row in x_rows])

        row = warp_row + self.output_row(group_row, quad)
        if const_expr(c.k_warps == 1):
            self.store_own(self.lane_outputs(acc, group_row, quad), mR, mY, first_token, first_row + row)
        else:
            self.store_added(acc, mR, mY, thread, first_row, first_token, k_warp, row, group_row, quad)

    @cute.jit
    def trigger(self, point):
        """Lets the next kernel start if this is the point at which the config has it."""
        if const_expr(self.config.trigger == point):
            device.let_next_kernel_start()

    # Which rows a lane loads and which outputs it ends with. The product's result has 16 x 8 elements, of which a lane
    # has pairs of neighbouring columns. With one group of tokens the columns are tokens and the rows W's; with two they
    # are the other way round, so that a lane has neighbours in a row of y: 16 bytes of them from two row tiles.

    def loaded_row(self, group_row, t):
        """The row, counted from the warp's first, of the ``t``-th that a lane loads, of 2 * row_tiles."""
        if self.tokens_are_rows:
            return group_row // 2 * (4 * self.config.row_tiles) + 2 * t + group_row % 2
        return group_row * (2 * self.config.row_tiles) + t

    def output_row(self, group_row, quad):
        """The first of the neighbouring rows of W that a lane's sums are of, counted from the warp's first."""
        return quad * (4 * self.config.row_tiles) if self.tokens_are_rows else group_row * (2 * self.config.row_tiles)

    def lane_outputs(self, acc, group_row, quad):
        """(token of the CTA's, sums of neighbouring rows) of a lane."""
        tiles, found = self.config.row_tiles, []
        for e in range(2):
            if self.tokens_are_rows:
                sums = [acc[t // 2 * 4 + 2 * e + t % 2] for t in range(4 * tiles)]
                found.append((group_row + e * TOKEN_GROUP, sums))
            else:
                sums = [acc[t // 2 * 4 + t % 2 * 2 + e] for t in range(2 * tiles)]
                found.append((quad * 2 + e, sums))
        return found

    # One branch, the same for every thread, tells rows of y that take words from rows that do not: what a launch executes
    # is then one run of instructions, without jumps over the code of the other case.

    @cute.jit
    def store_own(self, outputs, mR, mY, first_token, n):
        """Stores what a lane ends with where its warp has all of K."""
        if takes_words(mY, len(outputs[0][1])):
            for token, sums in outputs:
                self.store_word(sums, mR, mY, first_token + token, n)
        else:
            for token, sums in outputs:
                for t in cutlass.range_constexpr(len(sums)):
                    self.store_one(sums[t], mR, mY, first_token + token, n + t)

    @cute.jit
    def store_added(self, acc, mR, mY, thread, first_row, first_token, k_warp, row, group_row, quad):
        """Adds the K warps' sums in their order through shared memory; a thread stores neighbours of a token."""
        c = self.config
        outputs, pitch = c.rows * self.groups * TOKEN_GROUP, c.rows + PARTIAL_PAD
        size = pitch * self.groups * TOKEN_GROUP
        allocator = cutlass.memory.SmemAllocator()
        partials = allocator.allocate_tensor(Float32, cute.make_layout((c.k_warps, size), stride=(size, 1)), 16)
        for token, sums in self.lane_outputs(acc, group_row, quad):
            for t in cutlass.range_constexpr(len(sums)):
                partials[k_warp, token * pitch + row + t] = sums[t]
        cute.arch.sync_threads()
        # As wide as still gives a warp something to do.
        count = next(width for width in (8, 4, 2) if outputs // width >= device.WARP or width == 2)
        if takes_words(mY, count):
            for i in cutlass.range_constexpr(-(-outputs // count // c.threads)):
                index = count * (thread + i * c.threads)
                token, row = index // c.rows, index % c.rows
                if index < outputs:
                    sums = self.added(partials.iterator + token * pitch + row, size, count)
                    self.store_word(sums, mR, mY, first_token + token, first_row + row)
        else:
            for index in cutlass.range(thread, outputs, c.threads, unroll=1):
                token, row = index // c.rows, index % c.rows
                sums = self.added(partials.iterator + token * pitch + row, size, 1)
                self.store_one(sums[0], mR, mY, first_token + token, first_row + row)

    @cute.jit
    def added(self, partial, size, count):
        """The sums over the K warps, in their order, of ``count`` neighbours from the first warp's ``partial`` on."""
        parts = []
        for w in cutlass.range_constexpr(self.config.k_warps):
            source = (partial + w * size).toint()
            pointer = cute.make_ptr(Float32, source, cute.AddressSpace.smem, assumed_align=min(4 * count, 16))
            part = cute.make_rmem_tensor((count,), Float32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), part)
            parts.append(part)
        sums = [parts[0][t] for t in range(count)]
        for w in cutlass.range_constexpr(1, self.config.k_warps):
            sums = [sums[t] + parts[w][t] for t in range(count)]
        return sums

    @cute.jit
    def store_word(self, sums, mR, mY, token, n):
        """y[token, n...] = sums (+ residual), rounded once, in words of up to 16 bytes; nothing outside of y."""
        count = const_expr(len(sums))
        if token < Int32(cute.size(mY, mode=[0])) and n < Int32(cute.size(mY, mode=[1])):
            rounded = cute.make_rmem_tensor((count,), mY.element_type)
            for t in cutlass.range_constexpr(count):
                value = sums[t]
                if const_expr(self.residual):
                    value += mR[token, n + t].to(Float32)
                rounded[t] = value.to(mY.element_type)
            cute.autovec_copy(rounded, device.global_vector(mY, token, n, count, align=min(2 * count, 16)))

    @cute.jit
    def store_one(self, value, mR, mY, token, n):
        """The same of one element."""
        if token < Int32(cute.size(mY, mode=[0])) and n < Int32(cute.size(mY, mode=[1])):
            if const_expr(self.residual):
                value += mR[token, n].to(Float32)
            mY[token, n] = value.to(mY.element_type)

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
        lane_rows = 2 * self.config.row_tiles
        for half in cutlass.range_constexpr(2):
            tokens = [group[2 * half : 2 * half + 2] for group in activations]
            if const_expr(self.tokens_are_rows):
                a = (tokens[0][0], tokens[1][0], tokens[0][1], tokens[1][1])
                for t in cutlass.range_constexpr(lane_rows):
                    self.add_product(acc, t, a, weights[t][2 * half : 2 * half + 2])
            else:
                for t in cutlass.range_constexpr(0, lane_rows, 2):
                    upper, lower = weights[t], weights[t + 1]
                    a = (upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1])
                    self.add_product(acc, t // 2, a, tokens[0])

    @cute.jit
    def add_product(self, acc, index, a, b):
        """The ``index``-th 16 x 8 sums of the lane += a x b."""
        sums = device.mma_m16n8k16(_PTX_TYPES[self.dtype], a, b, [acc[4 * index + q] for q in range(4)])
        for q in cutlass.range_constexpr(4):
            acc[4 * index + q] = sums[q]


@cute.jit
def takes_words(mY, count):
    """Whether ``count`` neighbours from a multiple of ``count`` on lie in a row of y and on a word of up to 16 bytes."""
    place = mY.iterator.toint() | Int64(mY.stride[0]) * 2
    return place % min(2 * count, 16) == 0 and Int32(cute.size(mY, mode=[1])) % count == 0


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit`` from extents and strides alone. ``compile_function``: ``cute.compile`` or a stand-in."""
    spec: FusedASpec = unit.spec
    dtype = _DTYPES[spec.input_dtype]
    m, n, k = cute.sym_int(), cute.sym_int64(), cute.sym_int64(divisibility=K_BLOCK)
    if spec.whole_k:
        k = spec.config.k_warps * spec.config.unroll * K_BLOCK

    def matrix(rows, columns, pitch, align):
        return make_fake_tensor(dtype, (rows, columns), (pitch, 1), assumed_align=align)

    # The row stride of a single token means nothing and may be any number.
    x = matrix(m, k, cute.sym_int64(), 16)
    weight = matrix(n, k, cute.sym_int64(divisibility=8), 16)
    residual = matrix(m, n, cute.sym_int64(), 2) if spec.residual else None
    y = matrix(m, n, cute.sym_int64(), 2)
    return compile_function(FusedAGemm(spec), x, weight, residual, y, make_fake_stream(), options=options)
