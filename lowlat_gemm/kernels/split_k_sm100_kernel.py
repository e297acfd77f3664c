"""``split_k`` on SM100, SM103 and SM107: tcgen05 by a warp of its own, sums in tensor memory.

``split_k_pipeline.py`` has the rest. Each 64 rows are a product of their own (M = 64), with columns of their own in
tensor memory, so that a row warpgroup finds its sums as wgmma leaves them on SM90.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from . import tensor_memory
from .compile_cache import CompileUnit
from .split_k import WARPGROUP_ROWS, tensor_columns
from .split_k_pipeline import SplitKGemm, compile_unit_of


class SplitKSm100(SplitKGemm):
    #: The multiplying warp, behind the producers.
    extra_warps = 1
    #: tcgen05.commit arrives once.
    releases = 1
    waits_before_store = True

    def tiled_mma(self) -> cute.TiledMma:
        return blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            tcgen05.CtaGroup.ONE, (WARPGROUP_ROWS, self.config.token_columns),
        )  # fmt: skip

    @cute.jit
    def init_tensor_barriers(self, tensor):
        tensor_memory.init_barriers(tensor, 4 * self.config.warpgroups)

    @cute.jit
    def before_next_kernel(self, tensor):
        """The next kernel's CTAs may take all tensor memory that is left: this one must have its own by then."""
        cute.arch.mbarrier_wait(tensor_memory.allocated(tensor), 0)

    @cute.jit
    def multiply_and_finish(
        self, operands, rings, mailbox, tensor, staged, mR, mY, rank, row_tile, token_tile, warp, thread
    ):
        """The multiplying warp's work, or a row warpgroup's from the last product to the store."""
        c = self.config
        if warp == 4 * c.warpgroups + 2:
            self.hold_back("multiply", rank)
            self.multiply(operands, rings, tensor)
            if const_expr(c.split > 1):
                cute.arch.cluster_wait()
        else:
            warpgroup_index, thread_in_group = warp // 4, thread % 128
            address = tensor_memory.wait_for_address(tensor)
            count = c.token_columns // 2
            sums = tensor_memory.read_sums(tensor, address, warp, warpgroup_index * c.token_columns, count)
            acc = cute.make_rmem_tensor((count,), Float32)
            for i in cutlass.range_constexpr(count):
                acc[i] = sums[i]
            self.finish(acc, mailbox, staged, mR, mY, rank, row_tile, token_tile, warpgroup_index, thread_in_group)

    @cute.jit
    def multiply(self, operands, rings, tensor):
        """Tensor memory += weight stage x token stage, a stage given back when its products are done."""
        c = self.config
        _, sW, sX = operands
        # Made here, not passed from the host: its flags are constants of the code.
        tiled_mma = self.tiled_mma()
        full, empty, stage_count = rings
        whole = tiled_mma.get_slice(0)
        tW = tiled_mma.make_fragment_A(whole.partition_A(sW))
        tX = tiled_mma.make_fragment_B(whole.partition_B(sX))
        address = tensor_memory.allocate(tensor, tensor_columns(c))
        layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((WARPGROUP_ROWS, c.token_columns))).layout
        sums = [cute.make_tensor(address + w * c.token_columns, layout)[None, 0, 0] for w in range(c.warpgroups)]
        slot, token_slot, barrier, phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(stage_count, unroll=1):
            tensor_memory.wait(full + barrier, phase)
            for kb in cutlass.range_constexpr(c.k_blocks * 4):
                # The first product overwrites what others left in these columns.
                tiled_mma.set(tcgen05.Field.ACCUMULATE, i > 0 if const_expr(kb == 0) else True)
                tokens = tX[None, 0, kb, token_slot]
                for w in cutlass.range_constexpr(c.warpgroups):
                    cute.gemm(tiled_mma, sums[w], tW[None, w, kb, slot], tokens, sums[w])
            # Only a stage that a producer waits for: no arrival is under way when the CTA ends.
            if i + min(c.stages, c.token_ring) < stage_count:
                tensor_memory.give_back_when_done(empty + barrier)
            slot, token_slot = self.following(slot, c.stages), self.following(token_slot, c.token_ring)
            barrier = self.following(barrier, c.barrier_ring)
            if barrier == 0:
                phase ^= 1
        tensor_memory.give_back_when_done(tensor_memory.accumulated(tensor))
        tensor_memory.release(tensor, address, tensor_columns(c))


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit``. ``compile_function``: ``cute.compile`` or a stand-in."""
    return compile_unit_of(SplitKSm100(unit.spec), unit, compile_function, options)
