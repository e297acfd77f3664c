"""What ``split_k`` does with its sums on every generation: the exchange over the cluster and the store of y.

A thread of warp w of a row warpgroup holds four sums of each group of 8 tokens, as the accumulators of wgmma lie and
as 16x256b loads of tensor memory give them: acc[4 * group + q] is row 16 w + lane / 4 + 8 (q / 2) and token
2 (lane % 4) + q % 2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import device
from .split_k import WARPGROUP_ROWS, staging_pitch


class ClusterEpilogue:
    """Methods of a class that has ``config``, ``residual``, ``out_dtype``, ``staged_dtype``, ``waits_before_store``."""

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
        if const_expr(self.residual or self.waits_before_store):
            # The wait of the token producer is not this thread's: its own makes the residual visible to it.
            device.wait_for_previous_kernel()
        # One branch, the same for every thread: no word is stored behind a jump over the code of the other case.
        words = (mY.iterator.toint() | Int64(mY.stride[0]) * out_bytes) % 16 == 0 and n_extent % vector == 0
        if const_expr(self.residual):
            words = words and (mR.iterator.toint() | Int64(mR.stride[0]) * out_bytes) % 16 == 0
        first_token = token_tile * c.token_columns + rank * 8
        if words:
            vectors_per_row = rows // vector
            total = owned * 8 * vectors_per_row
            for step in cutlass.range_constexpr(-(-group_rows * (min(c.rows, WARPGROUP_ROWS) // vector) // 128)):
                index = thread_in_group + step * 128
                local = index // vectors_per_row
                column = (index - local * vectors_per_row) * vector
                token, n = first_token + local // 8 * (8 * c.split) + local % 8, first_row + column
                if index < total and n < n_extent and token < m_extent:
                    values = cute.make_rmem_tensor((vector,), self.staged_dtype)
                    source = (mine + (local * pitch + column)).toint()
                    pointer = cute.make_ptr(self.staged_dtype, source, cute.AddressSpace.smem, assumed_align=16)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(vector)), values)
                    self.store_vector(values, mR, mY, token, n)
        else:
            for index in cutlass.range(thread_in_group, owned * 8 * rows, 128, unroll=1):
                local = index // rows
                column = index - local * rows
                token, n = first_token + local // 8 * (8 * c.split) + local % 8, first_row + column
                if n < n_extent and token < m_extent:
                    value = sY[local, column].to(Float32)
                    if const_expr(self.residual):
                        value += mR[token, n].to(Float32)
                    mY[token, n] = value.to(self.out_dtype)

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
