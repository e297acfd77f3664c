"""A cluster of CTAs that run a kernel's PTX (``split_k`` on tcgen05, ``kda``), thread by thread, in an order drawn by a seed.

What runs beside threads does so here: TMA loads, products, commits and messages complete at times that the seed draws; a
TMA load ruins its stage until then. Encodings are those of the PTX ISA (tcgen05: matrix and instruction descriptors, data
path layout F, 16x256b; cp.async.bulk.tensor with 128-byte swizzle; mbarrier). Fences do nothing here: their places are
for the contract and the model.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field

import numpy as np

from conformance.control_flow import parse_ptx

from .scalar import Registers, arithmetic, operands, registers, signed

WARP, PARAMETER, SHARED, RANK_SHIFT = 32, 1 << 50, 1024, 24
#: Share of what is under way that stays so until all else stands still.
LATE = 0.1
_NOTHING = (
    "prefetch",
    "fence",
    "griddepcontrol.launch_dependents",
    "tcgen05.fence",
    "tcgen05.wait",
    "tcgen05.relinquish_alloc_permit",
)


class Trap(AssertionError):
    """The kernel did what hardware would not forgive, or hangs."""


@dataclass
class TensorMap:
    """A [rows, columns] matrix of 16-bit words, read in boxes of ``box`` rows and 64 columns."""

    words: np.ndarray
    box: int


@dataclass
class Cta:
    rank: int
    block: tuple[int, int]
    shared: bytearray
    threads: list["Thread"] = field(default_factory=list)
    barriers: dict[int, list[int]] = field(default_factory=dict)
    tensor: np.ndarray | None = None
    queue: list = field(default_factory=list)
    named: dict[int, int] = field(default_factory=dict)
    in_warp: dict[tuple, int] = field(default_factory=dict)
    given: dict[tuple, dict[int, int]] = field(default_factory=dict)

    def arrive(self, address: int, arrivals: int, expected: int = 0, done: int = 0) -> None:
        if address not in self.barriers:
            raise Trap(f"rank {self.rank}: no mbarrier at {address}")
        barrier = self.barriers[address]
        barrier[1] -= arrivals
        barrier[2] += expected - done
        if barrier[1] < 0:
            raise Trap(f"rank {self.rank}: one arrival too many at {address}")
        if barrier[1] == barrier[2] == 0:
            barrier[0], barrier[1] = barrier[0] + 1, barrier[3]


class Thread(Registers):
    place = 0
    arrived_at: tuple | None = None

    def __init__(self, cta: Cta, index: int):
        super().__init__({"%tid.x": index, "%ctaid.x": cta.block[0], "%ctaid.y": cta.block[1]})
        self.cta, self.index = cta, index


@functools.lru_cache(maxsize=2)
def _read(ptx: str) -> tuple:
    """The program, what its simple instructions do, and where its branches go: to what may follow and is not the next."""
    program = parse_ptx(re.sub(r"\w+_param_(\d+)", r"PARAM_\1", ptx))
    targets = {}
    for i in program.all_of("bra"):
        others = program.following[i] - {i + 1}
        targets[i] = others.pop() if others else i + 1
    return program, [arithmetic(one) for one in program.instructions], targets


class Cluster:
    """``parameters``: index -> bytes, or a ``TensorMap``. ``memory``: address of a global array -> its bytes."""

    def __init__(
        self, ptx: str, blocks: list[tuple[int, int]], shared_bytes: int, parameters: dict, memory: dict, seed: int
    ):
        self.program, self.simple, self.labels = _read(ptx)
        self.random, self.parameters, self.memory = random.Random(seed), parameters, memory
        self.threads_per_cta = int(re.search(r"\.reqntid (\d+)", ptx)[1])
        self.previous_finished, self.arrived, self.pending = False, 0, []
        self.ctas = [
            Cta(rank, blocks[rank], bytearray(b"\xff" * (SHARED + shared_bytes))) for rank in range(len(blocks))
        ]
        for cta in self.ctas:
            cta.threads = [Thread(cta, index) for index in range(self.threads_per_cta)]

    def run(self) -> None:
        alive = [thread for cta in self.ctas for thread in cta.threads]
        warps: dict[tuple[int, int], list[Thread]] = {}
        for thread in alive:
            warps.setdefault((thread.cta.rank, thread.index // WARP), []).append(thread)
        while warps or self.pending or any(cta.queue for cta in self.ctas):
            moved = False
            keys = list(warps)
            self.random.shuffle(keys)
            for key in keys:
                moved |= any([self._advance(thread) for thread in warps[key]])
                warps[key] = [thread for thread in warps[key] if thread.place < len(self.program.instructions)]
                if not warps[key]:
                    del warps[key]
            moved |= self._beside(all_of=not moved)
            if not moved and not self.previous_finished:
                self.previous_finished = moved = True
                self.on_previous_finished()
            if not moved:
                raise Trap(
                    "nothing can go on: " + "; ".join(sorted({self._where(t) for ts in warps.values() for t in ts}))
                )

    def on_previous_finished(self) -> None:
        """The previous kernel has written x."""

    def _where(self, thread: Thread) -> str:
        return (
            f"rank {thread.cta.rank} warp {thread.index // WARP} at {self.program.instructions[thread.place].text[:60]}"
        )

    def _beside(self, all_of: bool) -> bool:
        """Completes some of what is under way, or ``all_of`` it; products of a CTA in their order."""
        some = [(run, late) for run, late in self.pending if all_of or not late and self.random.random() < 0.3]
        self.pending = [one for one in self.pending if one not in some]
        self.random.shuffle(some)
        for action, _ in some:
            action()
        for cta in self.ctas:
            while cta.queue and (all_of or self.random.random() < 0.5):
                cta.queue.pop(0)()
                some.append(cta)
        return bool(some)

    def _under_way(self, action) -> None:
        """``action`` completes beside the threads: soon, or, once in a while, only when nothing else can go on."""
        self.pending.append((action, self.random.random() < LATE))

    def _advance(self, thread: Thread) -> bool:
        """Runs a thread until it has to wait or ends; whether it got anywhere."""
        began = thread.place
        while thread.place < len(self.program.instructions):
            one, at = self.program.instructions[thread.place], thread.place
            guard = one.guard
            if (
                guard
                and guard.lstrip("@!").startswith("%")
                and bool(thread[guard.lstrip("@!")]) == guard.startswith("@!")
            ):
                thread.place += 1
                continue
            if one.is_a("bra"):
                thread.place = self.labels[at]
            elif one.is_a("ret"):
                thread.place = len(self.program.instructions)
            elif self.simple[at] is not None:
                if "PARAM_" in one.text:
                    name = operands(one.text.split(maxsplit=1)[1])
                    thread[name[0]] = PARAMETER + int(name[1].removeprefix("PARAM_"))
                elif "__dynamic_shmem__" in one.text:
                    thread[operands(one.text.split(maxsplit=1)[1])[0]] = SHARED
                else:
                    self.simple[at](thread)
                thread.place += 1
            elif self._other(thread, one):
                thread.place += 1
            else:
                break
        return thread.place != began

    def _other(self, thread: Thread, one) -> bool:
        """An instruction of more than registers; False: the thread has to wait here."""
        cta, parts = thread.cta, operands(one.text.split(maxsplit=1)[1]) if len(one.text.split(maxsplit=1)) > 1 else []
        first = thread.index % WARP == 0
        if one.opcode.startswith(_NOTHING):
            return True
        if one.is_a("ld.param"):
            return self._load_parameter(thread, one, parts)
        if one.is_a("cvta.param"):
            thread[parts[0]] = thread.value(parts[1])
        elif one.is_a("shfl.sync.idx"):  # of what the whole warp has
            thread[parts[0]] = thread.value(parts[1])
        elif one.is_a("shfl.sync.bfly"):
            return self._exchange(thread, parts)
        elif one.is_a("elect.sync"):
            thread[parts[0].split("|")[1]] = first
        elif one.is_a("bar.sync"):
            name = thread.value(parts[0])
            return self._together(
                thread, cta.named, name, thread.value(parts[1]) if len(parts) > 1 else self.threads_per_cta
            )
        elif one.is_a("bar.warp.sync"):
            return self._together(thread, cta.in_warp, (thread.index // WARP, thread.place), WARP)
        elif one.is_a("barrier.cluster.arrive"):
            self.arrived += 1
        elif one.is_a("barrier.cluster.wait"):
            return self.arrived == self.threads_per_cta * len(self.ctas)
        elif one.is_a("griddepcontrol.wait"):
            return self.previous_finished
        elif one.is_a("mbarrier.init"):
            cta.barriers[thread.address(parts[0])] = [0, thread.value(parts[1]), 0, thread.value(parts[1])]
        elif one.is_a("mbarrier.arrive.expect_tx"):
            cta.arrive(thread.address(parts[-2]), 1, thread.value(parts[-1]))
        elif one.is_a("mbarrier.arrive"):
            cta.arrive(thread.address(parts[1]), thread.value(parts[2]))
        elif one.is_a("mbarrier.try_wait.parity"):
            return cta.barriers[thread.address(parts[1])][0] % 2 != thread.value(parts[2])
        elif one.is_a("mapa"):
            thread[parts[0]] = (thread.value(parts[2]) + 1) << RANK_SHIFT | thread.value(parts[1])
        elif one.is_a("st.async"):
            self._send(thread, parts)
        elif one.is_a("cp.async.bulk.tensor.2d"):
            self._tma(thread, parts)
        elif one.opcode.startswith("tcgen05."):
            self._tcgen05(thread, one, parts, first)
        elif one.is_a("ld.shared", "st.shared", "ld.global", "st.global"):
            self._access(thread, one, parts)
        else:
            raise NotImplementedError(one.text)
        return True

    def _together(self, thread: Thread, counts: dict, name, needed: int) -> bool:
        """A barrier of ``needed`` threads, used again and again: each use has a number of its own."""
        if thread.arrived_at is None:
            counts[name] = counts.get(name, 0) + 1
            thread.arrived_at = -(-counts[name] // needed) * needed
        if counts[name] < thread.arrived_at:
            return False
        thread.arrived_at = None
        return True

    def _exchange(self, thread: Thread, parts: list[str]) -> bool:
        """A butterfly over a warp: every lane gives its value and waits for its partner's."""
        given = thread.cta.given.setdefault((thread.index // WARP, thread.place), {})
        given.setdefault(thread.index, thread.value(parts[1]))
        if len(given) < WARP:
            return False
        thread[parts[0]] = given[thread.index ^ thread.value(parts[2])]
        return True

    def _load_parameter(self, thread: Thread, one, parts: list[str]) -> bool:
        number, offset = re.fullmatch(r"\[PARAM_(\d+)\+?(\d*)\]", parts[1]).groups()
        names, size = registers(parts[0]), int(re.search(r"\.b(\d+)$", one.opcode)[1]) // 8
        data = self.parameters[int(number)]
        for i, name in enumerate(names):
            begin = int(offset or 0) + i * size
            thread[name] = int.from_bytes(data[begin : begin + size], "little")
        return True

    # Memory.

    def _bytes(self, thread: Thread, address: int, shared: bool, size: int) -> tuple[bytearray, int]:
        if shared:
            memory, begin = thread.cta.shared, address
        else:
            base = max((base for base in self.memory if base <= address), default=0)
            memory, begin = self.memory.get(base, bytearray()), address - base
        if begin % size or not 0 <= begin <= len(memory) - size:
            raise Trap(f"{self._where(thread)}: {size} bytes at {address}")
        return memory, begin

    def _access(self, thread: Thread, one, parts: list[str]) -> None:
        count = int(found[1]) if (found := re.search(r"\.v(\d)\.", one.opcode)) else 1
        size = int(re.search(r"\.b(\d+)$", one.opcode)[1]) // 8
        address, names = (parts[1], parts[0]) if one.is_a("ld.shared", "ld.global") else (parts[0], parts[1])
        memory, begin = self._bytes(thread, thread.address(address), "shared" in one.opcode, size * count)
        for i, name in enumerate(registers(names)):
            where = slice(begin + i * size, begin + (i + 1) * size)
            if one.is_a("ld.shared", "ld.global"):
                thread[name] = int.from_bytes(memory[where], "little")
            else:
                memory[where] = (thread.value(name) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def _must_run(self, cta: Cta) -> None:
        """What is under way to a CTA's shared memory when it ends is written to that of another."""
        if all(one.place >= len(self.program.instructions) for one in cta.threads):
            raise Trap(f"rank {cta.rank} has ended and is written to")

    def _send(self, thread: Thread, parts: list[str]) -> None:
        target, barrier = thread.address(parts[0]), thread.address(parts[2])
        receiver = self.ctas[(target >> RANK_SHIFT) - 1]
        words = b"".join(thread.value(name).to_bytes(4, "little") for name in registers(parts[1]))
        begin = target & ((1 << RANK_SHIFT) - 1)

        def land() -> None:
            self._must_run(receiver)
            receiver.shared[begin : begin + 16] = words
            receiver.arrive(barrier & ((1 << RANK_SHIFT) - 1), 0, done=16)

        self._under_way(land)

    def _tma(self, thread: Thread, parts: list[str]) -> None:
        cta, begin, barrier = thread.cta, thread.address(parts[0]), thread.address(parts[2])
        place, column, row = re.fullmatch(r"\[(%\w+), \{([^,]+), ([^}]+)\}\]", parts[1]).groups()
        tensor_map = self.parameters[thread.value(place) - PARAMETER]
        column, row = signed(thread.value(column), 32), signed(thread.value(row), 32)
        words = np.zeros((tensor_map.box, 64), dtype="<u2")
        source = tensor_map.words
        if begin % 128 or begin + 128 * tensor_map.box > len(cta.shared):
            raise Trap(f"{self._where(thread)}: a box at {begin}")
        cta.shared[begin : begin + 128 * tensor_map.box] = b"\xff" * (128 * tensor_map.box)

        def complete() -> None:
            self._must_run(cta)
            box = source[row : row + tensor_map.box, column : column + 64]
            words[: box.shape[0], : box.shape[1]] = box
            for r in range(tensor_map.box):
                for chunk in range(8):
                    at = swizzled(begin + 128 * r + 16 * chunk)
                    cta.shared[at : at + 16] = words[r, 8 * chunk : 8 * chunk + 8].tobytes()
            cta.arrive(barrier, 0, done=128 * tensor_map.box)

        self._under_way(complete)

    # Tensor cores.

    def _tcgen05(self, thread: Thread, one, parts: list[str], first: bool) -> None:
        cta = thread.cta
        if one.is_a("tcgen05.alloc"):
            if first:
                cta.tensor = np.full((128, thread.value(parts[1])), np.nan, dtype=np.float32)
                begin = thread.address(parts[0])
                cta.shared[begin : begin + 4] = (0).to_bytes(4, "little")
        elif one.is_a("tcgen05.dealloc"):
            if first:
                cta.tensor = None
        elif one.is_a("tcgen05.commit"):
            barrier = thread.address(parts[0])

            def arrive() -> None:
                self._must_run(cta)
                cta.arrive(barrier, 1)

            # Its turn is behind the products before it; when it arrives is nobody's promise, nor in what order.
            cta.queue.append(lambda: self._under_way(arrive))
        elif one.is_a("tcgen05.mma"):
            self._multiply(thread, one, parts)
        elif one.is_a("tcgen05.ld"):
            self._load_sums(thread, one, parts)
        else:
            raise NotImplementedError(one.text)

    def _multiply(self, thread: Thread, one, parts: list[str]) -> None:
        cta, kind = thread.cta, thread.value(parts[3])
        target, a, b = thread.address(parts[0]), thread.value(parts[1]), thread.value(parts[2])
        rows, columns = (kind >> 24 & 31) * 16, (kind >> 17 & 63) * 8
        if kind & ~(31 << 24 | 63 << 17) != 1 << 10 | 1 << 7 | 1 << 4 or rows != 64:
            raise Trap(f"instruction descriptor {kind:#x}: expected BF16, K-major, M = 64, FP32 sums")
        if any(thread.value(name) for name in registers(parts[4])) or ".kind::f16" not in one.opcode:
            raise Trap(f"{one.text}: lanes are left out, or not of 16 bits")
        adds = bool(thread[parts[5]])

        def run() -> None:
            if cta.tensor is None:
                raise Trap(f"rank {cta.rank}: a product without tensor memory")
            product = _operand(cta, a, rows) @ _operand(cta, b, columns).T
            lanes = [r // 16 * 32 + r % 16 for r in range(64)]
            where = np.ix_(lanes, range(target, target + columns))
            cta.tensor[where] = product + (cta.tensor[where] if adds else 0)

        cta.queue.append(run)

    def _load_sums(self, thread: Thread, one, parts: list[str]) -> None:
        address, lane = thread.address(parts[1]), thread.index % WARP
        if thread.cta.tensor is None or address >> 16 != thread.index // WARP % 4 * 32:
            raise Trap(f"{self._where(thread)}: tensor memory that is not this warp's")
        for i, name in enumerate(registers(parts[0])):
            row, column = lane // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
            value = thread.cta.tensor[(address >> 16) + row, (address & 0xFFFF) + column]
            thread[name] = int(np.float32(value).view(np.uint32))


def swizzled(address: int) -> int:
    """128-byte swizzle: the 16-byte word of a line is mixed with the line's number in its 1024 bytes."""
    return address ^ (address >> 7 & 7) << 4


def _operand(cta: Cta, descriptor: int, rows: int) -> np.ndarray:
    """[rows, 16] of a K-major matrix in shared memory, as its descriptor says."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 61 != 2 or descriptor >> 46 & 7 != 1 or descriptor >> 49 & 7:
        raise Trap(f"matrix descriptor {descriptor:#x}: expected 128-byte swizzle, no base offset")
    matrix = np.empty((rows, 16), dtype=np.uint16)
    for row in range(rows):
        for half in range(2):
            at = swizzled(start + row // 8 * stride + row % 8 * 128 + 16 * half)
            matrix[row, 8 * half : 8 * half + 8] = np.frombuffer(bytes(cta.shared[at : at + 16]), dtype="<u2")
    return (matrix.astype(np.uint32) << 16).view(np.float32)
