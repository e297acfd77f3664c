"""``split_k`` on SM90: wgmma by the row warpgroups themselves, sums in registers; the rest is shared."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from . import device
from .compile_cache import CompileUnit
from .split_k import WARPGROUP_ROWS
from .split_k_pipeline import SplitKGemm, compile_unit_of


class SplitKSm90(SplitKGemm):
    @property
    def releases(self) -> int:
        """Every warpgroup gives a stage back."""
        return self.config.warpgroups

    def tiled_mma(self) -> cute.TiledMma:
        c = self.config
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            (c.warpgroups, 1, 1), tiler_mn=(WARPGROUP_ROWS, c.token_columns),
        )  # fmt: skip

    @cute.jit
    def multiply_and_finish(
        self, operands, rings, mailbox, tensor, staged, mR, mY, rank, row_tile, token_tile, warp, thread
    ):
        """A row warpgroup's work from the first stage to the store."""
        c = self.config
        tiled_mma, sW, sX = operands
        warpgroup_index, thread_in_group = warp // 4, thread % 128
        fragments = tiled_mma.get_slice(warpgroup_index * 128)
        tW = tiled_mma.make_fragment_A(fragments.partition_A(sW))
        tX = tiled_mma.make_fragment_B(fragments.partition_B(sX))
        acc = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((WARPGROUP_ROWS * c.warpgroups, c.token_columns)), Float32
        )
        acc.fill(0.0)
        self.hold_back("multiply", rank)
        self.multiply(tiled_mma, acc, tW, tX, *rings, warp)
        self.finish(acc, mailbox, staged, mR, mY, rank, row_tile, token_tile, warpgroup_index, thread_in_group)

    @cute.jit
    def multiply(self, tiled_mma, acc, tW, tX, full, empty, stage_count, warp):
        """acc += weight stage x token stage; a stage is given back when the next one's wgmmas are under way.

        What a stage costs beside its products is on the critical path: after the wait for the previous kernel the whole
        ring is there to be multiplied before the first free slot is loaded again. So there is one barrier to wait for
        and one to arrive at, and whether the next stage is there is asked while this one is multiplied.
        """
        c = self.config
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        slot, token_slot, barrier, phase = Int32(0), Int32(0), Int32(0), Int32(0)
        former, ready = Int32(0), Int32(0)
        for i in cutlass.range(stage_count, unroll=1):
            device.wait_unless(ready, full + barrier, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(c.k_blocks * 4):
                cute.gemm(tiled_mma, acc, tW[None, None, kb, slot], tX[None, None, kb, token_slot], acc)
            warpgroup.commit_group()
            current = barrier
            slot, token_slot = self.following(slot, c.stages), self.following(token_slot, c.token_ring)
            barrier = self.following(barrier, c.barrier_ring)
            if barrier == 0:
                phase ^= 1
            ready = device.is_over(full + barrier, phase)
            warpgroup.wait_group(1)
            if i > 0:
                if warp % 4 == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + former)
            former = current
        warpgroup.wait_group(0)


def compile_kernel(unit: CompileUnit, compile_function, options: str):
    """Compiles ``unit``. ``compile_function``: ``cute.compile`` or a stand-in."""
    return compile_unit_of(SplitKSm90(unit.spec), unit, compile_function, options)
