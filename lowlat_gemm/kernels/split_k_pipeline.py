"""The CuTe DSL code of ``split_k`` that generations share: rings, PDL order, cluster. ``split_k.py`` says what it does.

Warps of a CTA: 4 a row warpgroup (sums, reduction, store), then the weight producer, the token producer, and those that
a generation adds for its tensor cores.

Barriers, all in shared memory:
    full[b]      weights and tokens of a stage have arrived                      producers -> tensor cores
    empty[b]     the products of a stage are done                                tensor cores -> producers
    landed       all partial sums of the other ranks have arrived                peers' st.async -> warpgroups
    previous     the previous kernel has finished                                token producer -> weight producer
    tensor       those of tensor memory, where there is one                      (``tensor_memory.py``)

Stage i lies in slot i mod ``stages`` of the weight ring and i mod ``token_ring`` of the token ring, and has the barriers
b = i mod ``barrier_ring``, the longer of the two: whoever multiplies waits once a stage and gives back once, however
deep the rings are. That a producer of the shorter ring waits for a stage before the barriers have gone round is safe: it
has waited for that barrier's phase before, and the next one needs what it is about to load.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .split_k import (
    HOLD_NS,
    K_UNIT,
    TENSOR_MEMORY_WORDS,
    WARPGROUP_ROWS,
    SplitKSpec,
    barriers,
    landing_words,
    staging_pitch,
)
from .split_k_epilogue import ClusterEpilogue

_DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


class SplitKGemm(ClusterEpilogue):
    """One compiled specialisation. A generation's class brings what multiplies:

    ``tiled_mma()``: the tensor-core instruction; ``extra_warps``: warps beyond warpgroups and producers; ``releases``:
    arrivals that give a stage back; ``waits_before_store``: whether every thread that stores waits for the previous
    kernel itself (without: the tokens that its sums are made of were loaded after that wait); ``init_tensor_barriers``
    and ``before_next_kernel``: hooks of tensor memory; ``multiply_and_finish``: what all warps but the producers do, by
    way of ``finish``.
    """

    extra_warps = 0
    waits_before_store = False

    def __init__(self, spec: SplitKSpec):
        self.config, self.residual, self.held = spec.config, spec.residual, spec.hold
        self.dtype, self.out_dtype = _DTYPES[spec.input_dtype], _DTYPES[spec.output_dtype]
        #: Staged in FP32 where a residual is still to be added, so that the sum is rounded once.
        self.staged_dtype = Float32 if spec.residual else self.out_dtype

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (M, K), row stride dynamic
        mW: cute.Tensor,  # (N, K), row stride dynamic
        mR: cute.Tensor | None,  # (M, N), row stride dynamic; None without residual
        mY: cute.Tensor,  # (M, N), row stride dynamic
        stream: CUstream,
    ):
        c = self.config
        tiled_mma = self.tiled_mma()
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        sW_layout = cute.tile_to_shape(atom, (c.rows, c.stage_k, c.stages), order=(0, 1, 2))
        # Tensor cores always multiply 64 rows. The same memory seen as whole warpgroups of rows: what lies behind the
        # tile's last row is read as well, and the products of those rows are dropped at the store.
        mma_rows = ((8, 8 * c.warpgroups), (64, c.k_blocks), c.stages)
        mma_strides = ((64, 512), (1, c.rows * 64), c.rows * c.stage_k)
        sW_mma_layout = cute.make_composed_layout(atom.inner, 0, cute.make_layout(mma_rows, stride=mma_strides))
        sX_layout = cute.tile_to_shape(atom, (c.token_columns, c.stage_k, c.token_ring), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        weight_tile, token_tile = (c.rows, c.stage_k), (c.token_columns, c.stage_k)
        tma_w, gW = cpasync.make_tiled_tma_atom(
            load, mW, cute.tile_to_shape(atom, weight_tile, order=(0, 1)), weight_tile
        )
        tma_x, gX = cpasync.make_tiled_tma_atom(
            load, mX, cute.tile_to_shape(atom, token_tile, order=(0, 1)), token_tile
        )
        row_tiles = cute.ceil_div(cute.size(mW, mode=[0]), c.rows)
        token_tiles = cute.ceil_div(cute.size(mX, mode=[0]), c.token_columns)
        self.kernel(tma_w, gW, tma_x, gX, mR, mY, tiled_mma, sW_layout, sW_mma_layout, sX_layout).launch(
            grid=[row_tiles * c.split, token_tiles, 1],
            block=[128 * c.warpgroups + 64 + 32 * self.extra_warps, 1, 1],
            cluster=[c.split, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma_w: cute.CopyAtom,
        gW: cute.Tensor,  # (N, K) as TMA coordinates
        tma_x: cute.CopyAtom,
        gX: cute.Tensor,  # (M, K) as TMA coordinates
        mR: cute.Tensor | None,
        mY: cute.Tensor,
        tiled_mma: cute.TiledMma,
        sW_layout: cute.ComposedLayout,
        sW_mma_layout: cute.ComposedLayout,
        sX_layout: cute.ComposedLayout,
    ):
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, token_tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, row_tile = block % c.split, block // c.split
        weight_warp, token_warp = 4 * c.warpgroups, 4 * c.warpgroups + 1

        smem = cutlass.memory.SmemAllocator()
        bars = smem.allocate_array(Int64, barriers(c) + TENSOR_MEMORY_WORDS, byte_alignment=8)
        sW = smem.allocate_tensor(self.dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)
        sX = smem.allocate_tensor(self.dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        landing = smem.allocate_array(Float32, landing_words(c), byte_alignment=16)
        pitch = staging_pitch(c, self.staged_dtype.width // 8)
        staged = smem.allocate_array(self.staged_dtype, c.warpgroups * c.groups_per_rank * 8 * pitch, byte_alignment=16)
        full, empty = bars, bars + c.barrier_ring
        landed, previous, tensor = bars + barriers(c) - 2, bars + barriers(c) - 1, bars + barriers(c)

        # This rank's slice of K: cut in units of K_UNIT by the split alone; in stages, the tail's stage included.
        k_extent = Int32(cute.size(gW, mode=[1]))
        units = (k_extent + K_UNIT - 1) // K_UNIT
        first_stage = (units * rank // c.split) * K_UNIT // c.stage_k
        end_stage = (units * (rank + 1) // c.split) * K_UNIT // c.stage_k
        whole = (k_extent + c.stage_k - 1) // c.stage_k
        end_stage = cutlass.Int32(cutlass.select_(end_stage < whole, end_stage, whole))
        stage_count = end_stage - first_stage
        # Groups of 8 tokens go round the ranks: rank r owns groups r, r + split, ...
        groups = c.token_columns // 8
        owned = (groups - rank + c.split - 1) // c.split

        tWg = cute.local_tile(gW, (c.rows, c.stage_k), (row_tile, None))
        tXg = cute.local_tile(gX, (c.token_columns, c.stage_k), (token_tile, None))
        one_cta = cute.make_layout(1)
        tWs, tWg = cpasync.tma_partition(tma_w, 0, one_cta, cute.group_modes(sW, 0, 2), cute.group_modes(tWg, 0, 2))
        tXs, tXg = cpasync.tma_partition(tma_x, 0, one_cta, cute.group_modes(sX, 0, 2), cute.group_modes(tXg, 0, 2))

        self.hold_back("before_barriers", rank)
        if warp == weight_warp:
            cpasync.prefetch_descriptor(tma_w)
            cpasync.prefetch_descriptor(tma_x)
            with cute.arch.elect_one():
                for b in cutlass.range_constexpr(c.barrier_ring):
                    cute.arch.mbarrier_init(full + b, 2)
                    cute.arch.mbarrier_init(empty + b, self.releases)
                cute.arch.mbarrier_init(landed, 1)
                cute.arch.mbarrier_init(previous, 1)
                self.init_tensor_barriers(tensor)
                # By the thread that initialised it: nothing else orders the two.
                if const_expr(c.split > 1):
                    if owned > 0:
                        arriving = (c.split - 1) * owned * c.warpgroups * 128 * 16
                        cute.arch.mbarrier_arrive_and_expect_tx(landed, arriving)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # No partial sum may be sent before its receiver's barriers are there: every warp waits for the whole cluster
        # before it sends, or before it ends. Relaxed: mbarrier_init_fence has released the barriers to the cluster, and
        # the release of a plain arrival is a fence over the GPU that would delay the first weights.
        if const_expr(c.split > 1):
            cute.arch.cluster_arrive_relaxed()

        if warp == weight_warp:
            self.hold_back("weights", rank)
            self.load_weights(tma_w, tWg, tWs, full, empty, previous, tensor, first_stage, stage_count)
            if const_expr(c.split > 1):
                cute.arch.cluster_wait()
        elif warp == token_warp:
            device.wait_for_previous_kernel()
            self.hold_back("tokens", rank)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(previous)
            self.load_tokens(tma_x, tXg, tXs, full, empty, first_stage, stage_count)
            if const_expr(c.split > 1):
                cute.arch.cluster_wait()
        else:
            operands = (tiled_mma, cute.make_tensor(sW.iterator, sW_mma_layout.outer), sX)
            rings = (full, empty, stage_count)
            mailbox = (landing, landed, owned)
            self.multiply_and_finish(
                operands, rings, mailbox, tensor, staged, mR, mY, rank, row_tile, token_tile, warp, thread
            )
        self.hold_back("exit", rank)

    @cute.jit
    def hold_back(self, point, rank):
        """Nothing, but in a test's build: there, one rank's warps spin at one point."""
        if const_expr(self.held is not None and self.held[0] == point):
            if rank == self.held[1]:
                device.hold(Int64(HOLD_NS))

    @cute.jit
    def following(self, index, ring):
        """The place behind ``index`` in a ring of so many."""
        index += 1
        if index == ring:
            index = Int32(0)
        return index

    def first_freed(self, ring):
        """Barrier and phase that a producer waits for before the first load of its ring, as if the stages before had been
        there: its first waits pass. They are not left out, for they keep a producer from requesting its whole ring in one
        burst, which holds up the last loads of the previous kernel."""
        return Int32((self.config.barrier_ring - ring) % self.config.barrier_ring), Int32(1)

    @cute.jit
    def load_weights(self, tma_w, tWg, tWs, full, empty, previous, tensor, first_stage, stage_count):
        """Weight producer: a part of the ring at once, the rest when the previous kernel no longer needs the memory."""
        c = self.config
        slot, barrier, freed, freed_phase = Int32(0), Int32(0), *self.first_freed(c.stages)
        trigger_at = stage_count - 1 - c.trigger
        if trigger_at < 0:
            trigger_at = Int32(0)
        for i in cutlass.range(stage_count, unroll=1):
            if i == c.prefetch:
                cute.arch.mbarrier_wait(previous, 0)
            cute.arch.mbarrier_wait(empty + freed, freed_phase)
            freed = self.following(freed, c.barrier_ring)
            if freed == 0:
                freed_phase ^= 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + barrier, c.rows * c.stage_k * 2)
            cute.copy(
                tma_w, tWg[None, first_stage + i], tWs[None, slot],
                tma_bar_ptr=full + barrier, cache_policy=Int64(device.EVICT_FIRST),
            )  # fmt: skip
            if i == trigger_at:
                self.before_next_kernel(tensor)
                device.let_next_kernel_start()
            slot, barrier = self.following(slot, c.stages), self.following(barrier, c.barrier_ring)

    @cute.jit
    def load_tokens(self, tma_x, tXg, tXs, full, empty, first_stage, stage_count):
        """Token producer; the caller has waited for the previous kernel."""
        c = self.config
        slot, barrier, freed, freed_phase = Int32(0), Int32(0), *self.first_freed(c.token_ring)
        for i in cutlass.range(stage_count, unroll=1):
            cute.arch.mbarrier_wait(empty + freed, freed_phase)
            freed = self.following(freed, c.barrier_ring)
            if freed == 0:
                freed_phase ^= 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + barrier, c.token_columns * c.stage_k * 2)
            cute.copy(
                tma_x, tXg[None, first_stage + i], tXs[None, slot],
                tma_bar_ptr=full + barrier, cache_policy=Int64(device.EVICT_LAST),
            )  # fmt: skip
            slot, barrier = self.following(slot, c.token_ring), self.following(barrier, c.barrier_ring)

    @cute.jit
    def finish(self, acc, mailbox, staged, mR, mY, rank, row_tile, token_tile, warpgroup_index, thread_in_group):
        """What a row warpgroup does with its sums: sends those that others own, adds what comes, stores."""
        c = self.config
        landing, landed, owned = mailbox
        if const_expr(c.split > 1):
            cute.arch.cluster_wait()
            self.hold_back("send", rank)
            self.send_partials(acc, landing, landed, rank, warpgroup_index, thread_in_group)
            self.hold_back("add", rank)
            if owned > 0:
                device.wait_for_cluster_data(landed, 0)
                self.add_partials(acc, landing, rank, warpgroup_index, thread_in_group)
        # A branch on run-time values before the accumulators are read: without one (split 1) ptxas moves the
        # conversions up between the wgmmas and waits after each.
        first_row = row_tile * c.rows + warpgroup_index * WARPGROUP_ROWS
        self.hold_back("store", rank)
        if owned > 0 and first_row < cute.size(mY, mode=[1]):
            self.store(acc, staged, mR, mY, rank, owned, token_tile, first_row, warpgroup_index, thread_in_group)

    @cute.jit
    def init_tensor_barriers(self, tensor):
        """Nothing where there is no tensor memory."""

    @cute.jit
    def before_next_kernel(self, tensor):
        """Nothing where there is no tensor memory."""


def compile_unit_of(gemm: SplitKGemm, unit: CompileUnit, compile_function, options: str):
    """Compiles ``gemm`` for ``unit`` from extents and strides alone, by ``cute.compile`` or a stand-in."""
    spec: SplitKSpec = unit.spec
    dtype, out_dtype = _DTYPES[spec.input_dtype], _DTYPES[spec.output_dtype]
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    def operand(rows, columns):
        return make_fake_tensor(dtype, (rows, columns), (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    def output():
        width = out_dtype.width // 8
        return make_fake_tensor(out_dtype, (m, n), (cute.sym_int64(), 1), assumed_align=width)

    residual = output() if spec.residual else None
    return compile_function(gemm, operand(m, k), operand(n, k), residual, output(), make_fake_stream(), options=options)
