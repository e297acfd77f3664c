"""Device primitives that kernels share. Each is one instruction or a short, named sequence."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, const_expr

#: L2 cache policy "evict first", as ``createpolicy.fractional.L2::evict_first`` at fraction 1 encodes it. Weights are
#: read once a step, so they must not push activations out of L2.
EVICT_FIRST = 0x12F0000000000000
#: "Evict last": activations, which every row tile reads.
EVICT_LAST = 0x14F0000000000000

WARP = 32

# The PDL pair under the names that the rest of the code uses.
#   wait_for_previous_kernel: returns when every kernel before this one has finished and its writes are visible.
#   let_next_kernel_start:    allows the next kernel's CTAs to become resident; orders nothing.
wait_for_previous_kernel = cute.arch.griddepcontrol_wait
let_next_kernel_start = cute.arch.griddepcontrol_launch_dependents


def _vector_suffix(words: int) -> tuple[str, str]:
    """PTX vector suffix and the register list of a load of 1, 2 or 4 32-bit words."""
    if words == 1:
        return "", "{$w0}"
    return f".v{words}", "{" + ", ".join(f"{{$w{i}}}" for i in range(words)) + "}"


def _load_words(instruction: str, words: int, arguments: list) -> list[Uint32]:
    suffix, registers = _vector_suffix(words)
    policy = ", {$r1}" if len(arguments) == 2 else ""
    loaded = cute.arch.inline_ptx(
        f"{instruction}{suffix}.b32 {registers}, [{{$r0}}]{policy};",
        write_only_types=[Uint32] * words,
        read_only_args=arguments,
    )
    return [loaded] if words == 1 else list(loaded)


def load_weight_words(address: Int64, words: int) -> list[Uint32]:
    """Streaming load of 1, 2 or 4 words that nobody writes while any kernel of the chain runs (weights only).

    Past L1 and first to leave L2. Not ``.nc``: ptxas sinks non-coherent loads below the PDL wait and breaks up a
    batch of them to save registers; plain volatile ones stay where the program puts them (seen in SASS, CUDA 13).
    """
    return _load_words("ld.global.L1::no_allocate.L2::cache_hint", words, [address, Int64(EVICT_FIRST)])


def load_activation_words(address: Int64, words: int) -> list[Uint32]:
    """Load of 1, 2 or 4 words that the previous kernel may have written: only after the PDL wait."""
    return _load_words("ld.global", words, [address])


@cute.jit
def arrived_together(loads: list[list[Uint32]]):
    """Waits for all of ``loads`` at once, and so keeps the compiler from waiting for the first before the last is sent.

    ptxas sinks loads below their fellows' first use, where their latency is paid a second time. A branch backwards on
    a mix of all of them is in nobody's way, and nothing of what comes after is moved before it.
    """
    mixed = loads[0][0]
    for words in loads[1:]:
        mixed = mixed ^ words[0]
    cute.arch.inline_ptx(
        "{\n.reg .pred done;\n.reg .u32 mixed;\nmov.u32 mixed, {$r0};\nMIXED_${:uid}:\n"
        "setp.ne.u32 done, mixed, 0x9E3779B9;\n@done bra APART_${:uid};\nadd.u32 mixed, mixed, 1;\n"
        "nanosleep.u32 1;\nbra MIXED_${:uid};\nAPART_${:uid}:\n}",
        read_only_args=[mixed],
    )


def unpack_words(words: list[Uint32], dtype) -> list[Float32]:
    """The 2 * len(words) BF16 or FP16 elements in packed ``words``, as FP32, in memory order."""
    values = []
    for word in words:
        if const_expr(dtype is cutlass.BFloat16):
            # A BF16 number is the upper half of an FP32 one. SM90 has no BF16 FMA with an FP32 sum.
            values.append((word << 16).bitcast(Float32))
            values.append((word & Uint32(0xFFFF0000)).bitcast(Float32))
        else:
            low, high = cute.arch.inline_ptx(
                "{\n.reg .f16 lo, hi;\nmov.b32 {lo, hi}, {$r0};\ncvt.f32.f16 {$w0}, lo;\ncvt.f32.f16 {$w1}, hi;\n}",
                write_only_types=[Float32, Float32],
                read_only_args=[word],
            )
            values.extend((low, high))
    return values


def add_products(total: Float32, x_word: Uint32, w_word: Uint32, dtype) -> Float32:
    """``total`` plus the products of two packed BF16 or FP16 pairs, the lower first: SM100 and on (PTX ISA, fma)."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    return cute.arch.inline_ptx(
        "{\n.reg .b16 xl, xh, wl, wh;\n.reg .f32 lower;\nmov.b32 {xl, xh}, {$r0};\nmov.b32 {wl, wh}, {$r1};\n"
        f"fma.rn.f32.{kind} lower, xl, wl, {{$r2}};\nfma.rn.f32.{kind} {{$w0}}, xh, wh, lower;\n}}",
        write_only_types=[Float32],
        read_only_args=[x_word, w_word, total],
    )


def sum_over_warp(values: list[Float32], lane: Int32) -> list[tuple[Float32, Int32]]:
    """Sums each of ``values`` over the 32 lanes of a warp, in about one shuffle a value.

    Each round halves the list: of two neighbours a lane keeps one and gives the other to its partner, so that
    after five rounds a lane holds 1/32 of the sums. Returns (sum, index into ``values``) for those that this lane
    holds; some are held by several lanes, with equal bits. Every value is added in the same tree of lanes.
    """
    held = [(value, Int32(i)) for i, value in enumerate(values)]
    for offset in (16, 8, 4, 2, 1):
        upper = (lane & offset) != 0
        halved = []
        for first, second in zip(held[0::2], held[1::2]):
            keep = cutlass.select_(upper, second[0], first[0])
            give = cutlass.select_(upper, first[0], second[0])
            index = cutlass.select_(upper, second[1], first[1])
            halved.append((keep + cute.arch.shuffle_sync_bfly(give, offset), index))
        if len(held) % 2:
            value, index = held[-1]
            halved.append((value + cute.arch.shuffle_sync_bfly(value, offset), index))
        held = halved
    return held


@cute.jit
def hold(nanoseconds: Int64):
    """Spins for ``nanoseconds``: what tests hold a warp back with."""
    begin = Int64(cute.arch.globaltimer())
    while Int64(cute.arch.globaltimer()) - begin < nanoseconds:
        pass


def is_over(barrier, phase) -> Int32:
    """1 if ``phase`` of an mbarrier is over and what it stands for is visible, 0 if not (yet). Does not wait."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [{$r0}], {$r1};\n"
        "selp.s32 {$w0}, 1, 0, over;\n}",
        write_only_types=[Int32],
        read_only_args=[barrier.toint(), Int32(phase)],
    )


def wait_unless(over: Int32, barrier, phase) -> None:
    """Waits for ``phase`` of an mbarrier, unless ``is_over`` has said that it is."""
    cute.arch.inline_ptx(
        "{\n.reg .pred over;\nsetp.ne.s32 over, {$r0}, 0;\n@over bra OVER_${:uid};\nWAIT_${:uid}:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [{$r1}], {$r2};\n@!over bra WAIT_${:uid};\nOVER_${:uid}:\n}",
        read_only_args=[over, barrier.toint(), Int32(phase)],
    )


def wait_for_cluster_data(barrier, phase) -> None:
    """Waits for ``phase`` of an mbarrier on which peers' ``st.async`` complete, and makes their data visible.

    ``.acquire.cluster``: the default acquire is of this CTA's scope and orders nothing that another CTA wrote.
    """
    cute.arch.inline_ptx(
        "{\n.reg .pred done;\nWAIT_${:uid}:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@!done bra WAIT_${:uid};\n}",
        read_only_args=[barrier.toint(), Int32(phase)],
    )


def global_vector(matrix: cute.Tensor, row, column, count: int, align: int = 16) -> cute.Tensor:
    """``count`` elements of ``matrix`` from [row, column] on, which begin at a multiple of ``align`` bytes."""
    element = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    pointer = cute.make_ptr(matrix.element_type, element.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def mma_m16n8k16(kind: str, a, b, c) -> tuple[Float32, ...]:
    """a . b + c on tensor cores by one warp: a 16x16 and b 16x8 of ``kind`` ("bf16", "f16"), c and result 16x8 in FP32.

    Operands are a lane's words as the PTX ISA lays them out for mma.m16n8k16: four of a, two of b, four sums.
    """
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )
