"""The CuTe DSL code of ``split_k`` on SM90; the decomposition is described in ``split_k.py``, its host side.

Warps of a CTA: 4 a row warpgroup (wgmma, reduction, store), then the weight producer, then the token producer.

Barriers, all in shared memory:
    full[s]      weight stage s has arrived (with one ring: its tokens too)      producer(s) -> warpgroups
    empty[s]     every warpgroup is done with stage s                            warpgroups -> producer(s)
    token_full / token_empty  the same for a token ring of its own
    landed       all partial sums of the other ranks have arrived                peers' st.async -> warpgroups
    previous     the previous kernel has finished                                token producer -> weight producer
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import device
from .compile_cache import CompileUnit
from .split_k import HOLD_NS, K_UNIT, WARPGROUP_ROWS, SplitKSpec, barriers, landing_words, staging_pitch

_DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


class SplitKGemm:
    """One compiled specialisation."""

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
        tiled_mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            (c.warpgroups, 1, 1), tiler_mn=(WARPGROUP_ROWS, c.token_columns),
        )  # fmt: skip
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        sW_layout = cute.tile_to_shape(atom, (c.rows, c.stage_k, c.stages), order=(0, 1, 2))
        # wgmma always multiplies 64 rows. The same memory seen as whole warpgroups of rows: what lies behind the
        # tile's last row is read as well, and the products of those rows are dropped at the store.
        mma_rows = ((8, 8 * c.warpgroups), (64, c.k_blocks), c.stages)
        mma_strides = ((64, 512), (1, c.rows * 64), c.rows * c.stage_k)
        sW_mma_layout = cute.make_composed_layout(atom.inner, 0, cute.make_layout(mma_rows, stride=mma_strides))
        sX_layout = cute.tile_to_shape(atom, (c.token_columns, c.stage_k, c.token_ring), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        weight_tile, token_tile = (c.rows, c.stage_k), (c.token_columns, c.stage_k)
        tma_w, gW = cpasync.make_tiled_tma_atom(load, mW, cute.tile_to_shape(atom, weight_tile, order=(0, 1)), weight_tile)
        tma_x, gX = cpasync.make_tiled_tma_atom(load, mX, cute.tile_to_shape(atom, token_tile, order=(0, 1)), token_tile)
        row_tiles = cute.ceil_div(cute.size(mW, mode=[0]), c.rows)
        token_tiles = cute.ceil_div(cute.size(mX, mode=[0]), c.token_columns)
        self.kernel(tma_w, gW, tma_x, gX, mR, mY, tiled_mma, sW_layout, sW_mma_layout, sX_layout).launch(
            grid=[row_tiles * c.split, token_tiles, 1],
            block=[128 * c.warpgroups + 64, 1, 1],
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
        bars = smem.allocate_array(Int64, barriers(c), byte_alignment=8)
        sW = smem.allocate_tensor(self.dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)
        sX = smem.allocate_tensor(self.dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        landing = smem.allocate_array(Float32, landing_words(c), byte_alignment=16)
        pitch = staging_pitch(c, self.staged_dtype.width // 8)
        staged = smem.allocate_array(self.staged_dtype, c.warpgroups * c.groups_per_rank * 8 * pitch, byte_alignment=16)
        full, empty = bars, bars + c.stages
        token_full, token_empty = full, empty
        if const_expr(not c.shared_ring):
            token_full, token_empty = bars + 2 * c.stages, bars + 2 * c.stages + c.token_ring
        landed, previous = bars + barriers(c) - 2, bars + barriers(c) - 1

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
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + s, 2 if c.shared_ring else 1)
                    cute.arch.mbarrier_init(empty + s, c.warpgroups)
                for s in cutlass.range_constexpr(0 if c.shared_ring else c.token_ring):
                    cute.arch.mbarrier_init(token_full + s, 1)
                    cute.arch.mbarrier_init(token_empty + s, c.warpgroups)
                cute.arch.mbarrier_init(landed, 1)
                cute.arch.mbarrier_init(previous, 1)
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
            self.load_weights(tma_w, tWg, tWs, full, empty, previous, first_stage, stage_count)
            if const_expr(c.split > 1):
                cute.arch.cluster_wait()
        elif warp == token_warp:
            device.wait_for_previous_kernel()
            self.hold_back("tokens", rank)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(previous)
            self.load_tokens(tma_x, tXg, tXs, token_full, token_empty, first_stage, stage_count)
            if const_expr(c.split > 1):
                cute.arch.cluster_wait()
        else:
            sW_mma = cute.make_tensor(sW.iterator, sW_mma_layout.outer)
            warpgroup_index, thread_in_group = warp // 4, thread % 128
            fragments = tiled_mma.get_slice(warpgroup_index * 128)
            tW = tiled_mma.make_fragment_A(fragments.partition_A(sW_mma))
            tX = tiled_mma.make_fragment_B(fragments.partition_B(sX))
            acc = cute.make_rmem_tensor(
                tiled_mma.partition_shape_C((WARPGROUP_ROWS * c.warpgroups, c.token_columns)), Float32
            )
            acc.fill(0.0)
            self.hold_back("multiply", rank)
            self.multiply(tiled_mma, acc, tW, tX, full, empty, token_full, token_empty, warp, stage_count)
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
        self.hold_back("exit", rank)

    @cute.jit
    def hold_back(self, point, rank):
        """Nothing, but in a test's build: there, one rank's warps spin at one point."""
        if const_expr(self.held is not None and self.held[0] == point):
            if rank == self.held[1]:
                device.hold(Int64(HOLD_NS))

    @cute.jit
    def load_weights(self, tma_w, tWg, tWs, full, empty, previous, first_stage, stage_count):
        """Weight producer: a part of the ring at once, the rest when the previous kernel no longer needs the memory."""
        c = self.config
        slot, phase = Int32(0), Int32(1)
        trigger_at = stage_count - 1 - c.trigger
        if trigger_at < 0:
            trigger_at = Int32(0)
        for i in cutlass.range(stage_count, unroll=1):
            if i == c.prefetch:
                cute.arch.mbarrier_wait(previous, 0)
            cute.arch.mbarrier_wait(empty + slot, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, c.rows * c.stage_k * 2)
            cute.copy(
                tma_w, tWg[None, first_stage + i], tWs[None, slot],
                tma_bar_ptr=full + slot, cache_policy=Int64(device.EVICT_FIRST),
            )  # fmt: skip
            if i == trigger_at:
                device.let_next_kernel_start()
            slot += 1
            if slot == c.stages:
                slot = Int32(0)
                phase ^= 1

    @cute.jit
    def load_tokens(self, tma_x, tXg, tXs, token_full, token_empty, first_stage, stage_count):
        """Token producer; the caller has waited for the previous kernel."""
        c = self.config
        slot, phase = Int32(0), Int32(1)
        for i in cutlass.range(stage_count, unroll=1):
            cute.arch.mbarrier_wait(token_empty + slot, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(token_full + slot, c.token_columns * c.stage_k * 2)
            cute.copy(
                tma_x, tXg[None, first_stage + i], tXs[None, slot],
                tma_bar_ptr=token_full + slot, cache_policy=Int64(device.EVICT_LAST),
            )  # fmt: skip
            slot += 1
            if slot == c.token_ring:
                slot = Int32(0)
                phase ^= 1

    @cute.jit
    def multiply(self, tiled_mma, acc, tW, tX, full, empty, token_full, token_empty, warp, stage_count):
        """acc += weight stage x token stage; a stage is given back when the next one's wgmmas are under way."""
        c = self.config
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        slot, phase, former = Int32(0), Int32(0), Int32(0)
        token_slot, token_phase, token_former = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(stage_count, unroll=1):
            if const_expr(not c.shared_ring):
                cute.arch.mbarrier_wait(token_full + token_slot, token_phase)
            cute.arch.mbarrier_wait(full + slot, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(c.k_blocks * 4):
                tokens = tX[None, None, kb, slot if const_expr(c.shared_ring) else token_slot]
                cute.gemm(tiled_mma, acc, tW[None, None, kb, slot], tokens, acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if i > 0:
                if warp % 4 == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + former)
                        if const_expr(not c.shared_ring):
                            cute.arch.mbarrier_arrive(token_empty + token_former)
            former, token_former = slot, token_slot
            slot += 1
            if slot == c.stages:
                slot = Int32(0)
                phase ^= 1
            if const_expr(not c.shared_ring):
                token_slot += 1
                if token_slot == c.token_ring:
                    token_slot = Int32(0)
                    token_phase ^= 1
        warpgroup.wait_group(0)

    @cute.jit
    def landing_slot(self, landing, sender, warpgroup_index, group, thread_in_group):
        """Where the ``sender``-th other rank's four sums of a thread and an owned group lie: 16 bytes."""
        c = self.config
        slot = (sender * c.warpgroups + warpgroup_index) * c.groups_per_rank + group // c.split
        words = landing + (slot * 128 + thread_in_group) * 4
        return cute.make_ptr(Float32, words.toint(), cute.AddressSpace.smem, assumed_align=16)

    @cute.jit
    def send_partials(self, acc, landing, landed, rank, warpgroup_index, thread_in_group):
        """Sends the sums of every group that another rank owns into that rank's landing zone."""
        for group in cutlass.range_constexpr(self.config.token_columns // 8):
            owner = group % self.config.split
            if rank != owner:
                sender = rank
                if rank > owner:
                    sender = rank - 1
                target = self.landing_slot(landing, sender, warpgroup_index, group, thread_in_group)
                sums = tuple(acc[4 * group + q].bitcast(Int32) for q in range(4))
                cute.arch.store_async_dsmem(target, sums, landed, owner)

    @cute.jit
    def add_partials(self, acc, landing, rank, warpgroup_index, thread_in_group):
        """Adds the partial sums of owned groups in rank order 0, 1, ..., whoever adds: the bits depend on nothing else."""
        split = self.config.split
        for group in cutlass.range_constexpr(self.config.token_columns // 8):
            owner = group % split
            if rank == owner:
                theirs = []
                for sender in cutlass.range_constexpr(split - 1):
                    slot = self.landing_slot(landing, sender, warpgroup_index, group, thread_in_group)
                    theirs.append(cute.make_tensor(slot, cute.make_layout(4)))
                for q in cutlass.range_constexpr(4):
                    parts = [part[q] for part in theirs]
                    parts.insert(owner, acc[4 * group + q])
                    total = parts[0]
                    for part in parts[1:]:
                        total = total + part
                    acc[4 * group + q] = total

    @cute.jit
    def store(self, acc, staged, mR, mY, rank, owned, token_tile, first_row, warpgroup_index, thread_in_group):
        """Transposes the owned groups through shared memory and stores them as 16-byte words where y's rows allow it."""
        c = self.config
        out_bytes = self.out_dtype.width // 8
        vector = 16 // out_bytes
        pitch = staging_pitch(c, self.staged_dtype.width // 8)
        group_rows = c.groups_per_rank * 8
        m_extent, n_extent = Int32(cute.size(mY, mode=[0])), Int32(cute.size(mY, mode=[1]))
        rows = Int32(min(c.rows, WARPGROUP_ROWS))
        if const_expr(c.warpgroups == 2):
            if warpgroup_index == 1:
                rows = Int32(c.rows - WARPGROUP_ROWS)
        mine = staged + warpgroup_index * (group_rows * pitch)
        sY = cute.make_tensor(mine, cute.make_layout((group_rows, pitch), stride=(pitch, 1)))
        # A thread's accumulators: rows lane / 4 and + 8 of its warp's 16, two neighbouring tokens of each group.
        lane, warp = thread_in_group % 32, thread_in_group // 32
        acc_row, acc_token = warp * 16 + lane // 4, (lane % 4) * 2
        for group in cutlass.range_constexpr(c.token_columns // 8):
            if rank == group % c.split:
                for q in cutlass.range_constexpr(4):
                    row = acc_row + (q // 2) * 8
                    if row < rows:
                        sY[acc_token + q % 2 + (group // c.split) * 8, row] = acc[4 * group + q].to(self.staged_dtype)
        cute.arch.barrier(barrier_id=1 + warpgroup_index, number_of_threads=128)
        if const_expr(self.residual):
            # The wait of the token producer is not this thread's: its own makes the residual visible to it.
            device.wait_for_previous_kernel()
        aligned = (mY.iterator.toint() | Int64(mY.stride[0]) * out_bytes) % 16 == 0
        if const_expr(self.residual):
            aligned = aligned and (mR.iterator.toint() | Int64(mR.stride[0]) * out_bytes) % 16 == 0
        vectors_per_row = rows // vector
        total = owned * 8 * vectors_per_row
        for step in cutlass.range_constexpr(-(-group_rows * (min(c.rows, WARPGROUP_ROWS) // vector) // 128)):
            index = thread_in_group + step * 128
            local = index // vectors_per_row
            column = (index - local * vectors_per_row) * vector
            token = token_tile * c.token_columns + ((local // 8) * c.split + rank) * 8 + local % 8
            n = first_row + column
            if index < total and n < n_extent and token < m_extent:
                values = cute.make_rmem_tensor((vector,), self.staged_dtype)
                source = cute.make_ptr(
                    self.staged_dtype, (mine + (local * pitch + column)).toint(), cute.AddressSpace.smem, assumed_align=16
                )
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(vector)), values)
                if aligned and n + vector <= n_extent:
                    self.store_vector(values, mR, mY, token, n)
                else:
                    for v in cutlass.range_constexpr(vector):
                        if n + v < n_extent:
                            value = values[v].to(Float32)
                            if const_expr(self.residual):
                                value += mR[token, n + v].to(Float32)
                            mY[token, n + v] = value.to(self.out_dtype)

    @cute.jit
    def store_vector(self, values, mR, mY, token, n):
        """Stores one 16-byte word of a row of y, the residual added in FP32 first."""
        vector = 128 // self.out_dtype.width
        target = device.global_vector(mY, token, n, vector)
        if const_expr(self.residual):
            added = cute.make_rmem_tensor((vector,), mR.element_type)
            cute.autovec_copy(device.global_vector(mR, token, n, vector), added)
            rounded = cute.make_rmem_tensor((vector,), self.out_dtype)
            for v in cutlass.range_constexpr(vector):
                rounded[v] = (values[v] + added[v].to(Float32)).to(self.out_dtype)
            cute.autovec_copy(rounded, target)
        else:
            cute.autovec_copy(values, target)


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit`` from extents and strides alone. ``compile_function``: ``cute.compile`` or a stand-in."""
    spec: SplitKSpec = unit.spec
    dtype, out_dtype = _DTYPES[spec.input_dtype], _DTYPES[spec.output_dtype]
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    def operand(rows, columns):
        return make_fake_tensor(dtype, (rows, columns), (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    def output():
        width = out_dtype.width // 8
        return make_fake_tensor(out_dtype, (m, n), (cute.sym_int64(), 1), assumed_align=width)

    residual = output() if spec.residual else None
    stream = make_fake_stream()
    return compile_function(SplitKGemm(spec), operand(m, k), operand(n, k), residual, output(), stream, options=options)
