"""Tensor memory (SM100 and on): who may have it, and how tcgen05 work of one thread is handed to another.

tcgen05 instructions run beside the thread that issues them. An mbarrier orders threads, not those instructions: every
hand-over is ``tcgen05.fence::before_thread_sync``, the barrier, ``tcgen05.fence::after_thread_sync``, unless the
arrival is ``tcgen05.commit``, which waits for the products before it (PTX ISA, tcgen05 memory consistency model).

Four words behind the barriers of a CTA, each barrier good for one phase, so that no wait can be for a later one:

    allocated    the address is in shared memory                  multiplying warp -> warpgroups, weight producer
    accumulated  the last product is in tensor memory             tcgen05.commit -> warpgroups
    drained      every warp has its sums in registers             warpgroups -> multiplying warp
    address      where the CTA's columns begin
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05


def allocated(words):
    return words


def accumulated(words):
    return words + 1


def drained(words):
    return words + 2


def _address(words):
    return cute.recast_ptr(words + 3, dtype=Int32)


def init_barriers(words, warps: int) -> None:
    """By one thread. ``warps``: how many read their sums."""
    cute.arch.mbarrier_init(allocated(words), 1)
    cute.arch.mbarrier_init(accumulated(words), 1)
    cute.arch.mbarrier_init(drained(words), warps)


def fence_before_hand_over() -> None:
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_hand_over() -> None:
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def wait(barrier, phase) -> None:
    """Waits for ``phase``, after which tcgen05 work that depends on it may be issued."""
    cute.arch.mbarrier_wait(barrier, phase)
    fence_after_hand_over()


@cute.jit
def allocate(words, columns: cutlass.Constexpr):
    """By one whole warp: takes ``columns`` columns, publishes their address, and lets other CTAs of the SM allocate.

    Returns the address. Blocks while other CTAs of the SM hold too many.
    """
    cute.arch.alloc_tmem(columns, _address(words))
    cute.arch.relinquish_tmem_alloc_permit()
    fence_before_hand_over()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(allocated(words))
    wait(allocated(words), 0)
    return cute.arch.retrieve_tmem_ptr(Float32, 16, _address(words))


@cute.jit
def wait_for_address(words):
    """The address, once ``allocate`` has published it."""
    wait(allocated(words), 0)
    return cute.arch.retrieve_tmem_ptr(Float32, 16, _address(words))


@cute.jit
def release(words, address, columns: cutlass.Constexpr):
    """By the warp that allocated: gives the columns back once every reader has its sums."""
    wait(drained(words), 0)
    cute.arch.dealloc_tmem(address, columns)


@cute.jit
def give_back_when_done(barrier):
    """Arrives at ``barrier`` when every product issued so far is done: shared memory is read, sums are written."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


@cute.jit
def read_sums(words, address, warp, column, count: cutlass.Constexpr):
    """The FP32 sums of one warp: 16 rows and ``2 * count`` columns from ``column`` on, when all products are in.

    A product of 64 rows lies in 16 lanes of each warp's quarter. 16x256b loads give a thread, for each 8 columns, row
    lane / 4 and columns 2 (lane % 4), + 1, then the same of row + 8. Load and wait are one statement: between them the
    registers hold nothing yet, and the compiler does not know.
    """
    wait(accumulated(words), 0)
    lanes = Int32(warp % 4) * (32 << 16)
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    load = f"tcgen05.ld.sync.aligned.16x256b.x{count // 4}.b32 {{{names}}}, [{{$r0}}];"
    sums = cute.arch.inline_ptx(
        f"{{\n{load}\ntcgen05.wait::ld.sync.aligned;\n}}",
        write_only_types=[Float32] * count,
        read_only_args=[address.toint() + lanes + column],
    )
    fence_before_hand_over()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(drained(words))
    return sums
