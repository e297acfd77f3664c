"""The pipeline of ``split_k`` as threads and steps: barriers with their phases, ranks, tensor memory, the launches around.

mbarriers count arrivals and transactions and turn to their next phase when both are out; a wait for parity p passes when
the phase of that parity is over (PTX ISA, mbarrier). TMA loads, products, commits and messages complete in any order
that the hardware allows: loads and messages in any, the products of one thread in theirs. A TMA load ruins
its stage when it is issued and fills it when it completes.

``bug`` names a mistake to put in (``BUGS``). What stands for a missing fence is the order that it would forbid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .explore import Outcome, Step, Thread, View, explore

#: The mistake and what it is in the code.
BUGS = {
    "sm90 sm100": {
        "sums_not_acquired": "the owner's wait is of this CTA's scope: reads of peers' sums may go before it",
        "no_wait_for_sums": "the owner does not wait for peers' sums",
        "ends_before_sums": "the owner ends without having waited for what peers send",
        "no_cluster_wait": "a rank sends before it knows that its peers have begun",
        "tokens_before_pdl_wait": "the token producer does not wait for the previous kernel",
        "phase_not_flipped": "the weight producer's phase stays as it was when its ring begins anew",
        "armed_for_too_few": "the barrier for peers' sums expects fewer bytes than they send",
        "barriers_unfenced": "the cluster barrier comes before the barriers are there",
    },
    "sm90": {"released_too_early": "a stage is given back while its own wgmma reads it"},
    "sm100": {
        "released_by_arrival": "a stage is given back by a plain arrival, not by tcgen05.commit",
        "one_pointer_barrier": "one barrier for address and release; the multiplying warp does not wait for its phase 0",
        "no_fence_behind_accumulated": "no tcgen05.fence::after_thread_sync: the load may go before the wait",
        "no_fence_behind_drained": "the same of the deallocation",
        "no_fence_before_drained": "no tcgen05.fence::before_thread_sync: the load may go behind the arrival",
        "no_fence_before_allocated": "the same of the allocation",
        "no_fence_behind_full": "a product may go before the wait for its stage",
        "freed_before_read": "the multiplying warp does not wait for the readers",
        "next_kernel_before_allocation": "dependents are let go before this CTA has its tensor memory",
        "idle_commits": "a commit that nobody waits for arrives when the CTA may have ended",
        "address_not_waited_for": "a warpgroup reads the address before it is there",
        "sums_kept": "the first product adds to what is in tensor memory",
    },
}  # fmt: skip


#: What the code could be and is not, and is right all the same: the first is how the public kernel is repaired.
HARMLESS = {"sm100": {"one_pointer_barrier_repaired": "one barrier for address and release, and a wait for its phase 0"}}


@dataclass(frozen=True)
class Size:
    """One instance: ``tiles`` stages' worth of K a rank, ``groups`` of 8 tokens; the rest as in ``SplitKConfig``."""

    arch: str
    stages: int
    tiles: int
    split: int = 1
    groups: int = 1
    warpgroups: int = 1
    token_stages: int = 0
    prefetch: int = 1
    trigger: int = 0
    bug: str | None = None

    @property
    def token_ring(self) -> int:
        return self.token_stages or self.stages

    def owned(self, rank: int) -> int:
        return len(range(rank, self.groups, self.split))


class Pipeline:
    """Threads and first values of a ``Size``."""

    def __init__(self, size: Size):
        self.size = size
        self.values: dict = {"previous finished": False, "cluster arrived": 0, "triggered": 0}
        self.threads: list[Thread] = []
        self.per_rank = 2 + size.warpgroups + (size.arch == "sm100")
        for rank in range(size.split):
            self._rank(rank)
        previous = self._thread("previous kernel")
        self._step(previous, "finishes", writes=["previous finished"], run=lambda v: _set(v, "previous finished", True))
        if size.arch == "sm100":
            for rank in range(size.split):
                self._next_kernel(rank)

    def bug(self, name: str) -> bool:
        return self.size.bug == name

    @property
    def one_pointer_barrier(self) -> bool:
        return self.bug("one_pointer_barrier") or self.bug("one_pointer_barrier_repaired")

    # What every step is made of.

    def _thread(self, name: str) -> Thread:
        self.threads.append(Thread(name))
        return self.threads[-1]

    def _step(self, thread: Thread, what: str, code: str = "", source: str = "", *, waits: Sequence[str] = (),
              reads: Sequence[str] = (), writes: Sequence[str] = (), adds: Sequence[str] = (), joint: bool = False,
              ready: Callable[[View], bool] = lambda v: True, run: Callable[[View], None] = lambda v: None) -> None:  # fmt: skip
        variables = (frozenset(waits), frozenset(reads), frozenset(writes), frozenset(adds))
        thread.steps.append(Step(what, code, source, *variables, joint, ready, run))

    def _barrier(self, name: str) -> str:
        """A barrier: None before it is initialised, then (phase, arrivals pending, transactions pending, arrivals a phase)."""
        self.values[name] = None
        return name

    def _wait(self, thread: Thread, barrier: str, parity: int, code: str, source: str) -> None:
        def ready(view: View) -> bool:
            return view[barrier] is None or view[barrier][0] % 2 != parity

        def run(view: View) -> None:
            if view[barrier] is None:
                view.fail(f"{barrier} is not initialised")

        self._step(thread, f"waits for {barrier}", code, source, waits=[barrier], ready=ready, run=run)

    def _arrive(self, thread: Thread, barrier: str, code: str, source: str, expect: int = 0) -> None:
        self._step(thread, f"arrives at {barrier}", code, source, adds=[barrier],
                   run=lambda v: _change(v, barrier, arrivals=1, expected=expect))  # fmt: skip

    def _beside(self, name: str, what: str, issued: str, at_least: int, rank: int, writes: str, adds: str,
                run: Callable[[View], None]) -> None:  # fmt: skip
        """Work beside its thread: may complete once the variable ``issued`` has reached ``at_least``."""
        self._step(self._thread(name), what, waits=[issued], reads=[f"ended {rank}"], writes=[writes], adds=[adds],
                   ready=lambda v: v[issued] >= at_least, run=_while_alive(rank, run))  # fmt: skip

    # One rank.

    def _rank(self, r: int) -> None:
        s = self.size
        sm100 = s.arch == "sm100"
        self.values |= {f"alive {r}": self.per_rank, f"ended {r}": False, f"block arrived {r}": 0, f"tokens known {r}": False}
        self.full = [self._barrier(f"full[{i}] {r}") for i in range(s.stages)]
        self.empty = [self._barrier(f"empty[{i}] {r}") for i in range(s.stages)]
        self.token_full, self.token_empty = self.full, self.empty
        if s.token_stages:
            self.token_full = [self._barrier(f"token_full[{i}] {r}") for i in range(s.token_stages)]
            self.token_empty = [self._barrier(f"token_empty[{i}] {r}") for i in range(s.token_stages)]
        self._barrier(f"landed {r}"), self._barrier(f"previous {r}")
        for kind, ring in (("weight", s.stages), ("token", s.token_ring)):
            self.values |= {f"{kind} stage {i} {r}": None for i in range(ring)} | {f"{kind}s issued {r}": 0}
        if sm100:
            for name in ("allocated", "accumulated", "drained"):
                self._barrier(f"{name} {r}")
            self.values |= {f"sums {r}": None, f"address {r}": False, f"work issued {r}": 0, f"taken {r}": False}
        for sender in range(s.split):
            for group in range(r, s.groups, s.split):
                for w in range(s.warpgroups) if sender != r else ():
                    self.values |= {f"mail {group}.{w} {sender} to {r}": False, f"sent {group}.{w} {sender}": 0}
                    self._message(sender, r, group, w)
        self._weight_producer(r)
        self._token_producer(r)
        if sm100:
            self._multiplier(r)
            self._tensor_core(r)
        for w in range(s.warpgroups):
            self._warpgroup(r, w)
        self._step(self._thread(f"CTA {r}"), "ends with its last thread", waits=[f"alive {r}"], writes=[f"ended {r}"], joint=True,
                   ready=lambda v: v[f"alive {r}"] == 0, run=lambda v: _set(v, f"ended {r}", True))  # fmt: skip

    def _begin(self, thread: Thread, r: int, initialises: Sequence[tuple[str, int]] = ()) -> None:
        """The prologue of every warp; one of them initialises the barriers."""
        kernel, block, cluster = "split_k_pipeline.SplitKGemm.kernel", f"block arrived {r}", "cluster arrived"
        if initialises and not self.bug("barriers_unfenced"):
            self._initialise(thread, r, initialises)
        self._step(thread, "arrives at the block barrier", kernel, "sync_threads()", adds=[block], run=lambda v: _add(v, block, 1))
        if not self.bug("barriers_unfenced"):
            self._step(thread, "passes the block barrier", kernel, "sync_threads()", waits=[block],
                       joint=True, ready=lambda v: v[block] == self.per_rank)  # fmt: skip
        self._step(thread, "arrives at the cluster barrier", kernel, "cluster_arrive", adds=[cluster], run=lambda v: _add(v, cluster, 1))
        if self.bug("barriers_unfenced"):
            if initialises:
                self._initialise(thread, r, initialises)
            self._step(thread, "passes the block barrier", kernel, "sync_threads()", waits=[block],
                       joint=True, ready=lambda v: v[block] == self.per_rank)  # fmt: skip

    def _initialise(self, thread: Thread, r: int, barriers: Sequence[tuple[str, int]]) -> None:
        s = self.size
        messages = (s.split - 1) * s.owned(r) * s.warpgroups - self.bug("armed_for_too_few")

        def run(view: View) -> None:
            for name, count in barriers:
                view[name] = (0, count, 0, count)
            if s.split > 1 and s.owned(r):
                view[f"landed {r}"] = (0, 0, messages, 1)

        self._step(thread, "initialises the barriers", "split_k_pipeline.SplitKGemm.kernel", "mbarrier_init(landed, 1)",
                   writes=[name for name, _ in barriers], run=run)  # fmt: skip

    def _end(self, thread: Thread, r: int, *, waits: bool = True) -> None:
        if waits and self.size.split > 1:
            self._cluster_wait(thread, "split_k_pipeline.SplitKGemm.kernel")
        self._step(thread, "ends", adds=[f"alive {r}"], run=lambda v: _add(v, f"alive {r}", -1))

    def _cluster_wait(self, thread: Thread, code: str) -> None:
        everyone = self.per_rank * self.size.split
        self._step(thread, "waits for the cluster", code, "cluster_wait()", waits=["cluster arrived"],
                   joint=True, ready=lambda v: v["cluster arrived"] == everyone)  # fmt: skip

    def _load(self, thread: Thread, kind: str, r: int, i: int, full: str, code: str) -> None:
        """Issues the i-th load of a ring: the barrier is armed, the stage is no longer what it was."""
        ring = self.size.stages if kind == "weight" else self.size.token_ring
        stage, issued = f"{kind} stage {i % ring} {r}", f"{kind}s issued {r}"

        def issue(view: View) -> None:
            _change(view, full, arrivals=1, expected=1)
            view[stage] = None
            _add(view, issued)
            if kind == "token":
                if not view["previous finished"]:
                    view.fail("x is read while the previous kernel may write it")
                view[f"tokens known {r}"] = True

        def complete(view: View) -> None:
            view[stage] = i
            _change(view, full, transactions=1)

        self._step(thread, f"loads {kind} tile {i}", code, f"tma_bar_ptr={'full' if kind == 'weight' else 'token_full'} + slot",
                   reads=["previous finished"] if kind == "token" else [],
                   writes=[stage, *([f"tokens known {r}"] if kind == "token" else [])], adds=[full, issued], run=issue)  # fmt: skip
        self._beside(f"TMA {kind} {i} of {r}", "completes", issued, i + 1, r, stage, full, complete)

    def _weight_producer(self, r: int) -> None:
        s, code = self.size, "split_k_pipeline.SplitKGemm.load_weights"
        thread = self._thread(f"weight producer {r}")
        releases = s.warpgroups if s.arch == "sm90" else 1
        counts = [(name, 1 if s.token_stages else 2) for name in self.full] + [(name, releases) for name in self.empty]
        if s.token_stages:
            counts += [(name, 1) for name in self.token_full] + [(name, releases) for name in self.token_empty]
        counts += [(f"landed {r}", 1), (f"previous {r}", 1)]
        if s.arch == "sm100":
            shared = self.one_pointer_barrier
            counts += [(f"allocated {r}", 1 + s.warpgroups if shared else 1), (f"accumulated {r}", 1), (f"drained {r}", s.warpgroups)]
        self._begin(thread, r, counts)
        for i in range(s.tiles):
            if i == s.prefetch:
                self._wait(thread, f"previous {r}", 0, code, "mbarrier_wait(previous, 0)")
            turns = 0 if self.bug("phase_not_flipped") else i // s.stages
            self._wait(thread, self.empty[i % s.stages], (1 + turns) % 2, code, "mbarrier_wait(empty + slot, phase)")
            self._load(thread, "weight", r, i, self.full[i % s.stages], code)
            if i == max(0, s.tiles - 1 - s.trigger):
                if s.arch == "sm100" and not self.bug("next_kernel_before_allocation") and not self.one_pointer_barrier:
                    self._wait(thread, f"allocated {r}", 0, "split_k_sm100_kernel.SplitKSm100.before_next_kernel",
                               "mbarrier_wait(tensor_memory.allocated(tensor), 0)")  # fmt: skip
                self._step(thread, "lets the next kernel start", code, "let_next_kernel_start()", adds=["triggered"],
                           run=lambda v: _add(v, "triggered", 1))  # fmt: skip
        self._end(thread, r)

    def _token_producer(self, r: int) -> None:
        s, code = self.size, "split_k_pipeline.SplitKGemm.load_tokens"
        kernel, thread = "split_k_pipeline.SplitKGemm.kernel", self._thread(f"token producer {r}")
        self._begin(thread, r)
        if not self.bug("tokens_before_pdl_wait"):
            self._step(thread, "waits for the previous kernel", kernel, "wait_for_previous_kernel()", waits=["previous finished"],
                       ready=lambda v: v["previous finished"])  # fmt: skip
        self._arrive(thread, f"previous {r}", kernel, "mbarrier_arrive(previous)")
        for i in range(s.tiles):
            slot = i % s.token_ring
            self._wait(thread, self.token_empty[slot], (1 + i // s.token_ring) % 2, code, "mbarrier_wait(token_empty + slot, phase)")
            self._load(thread, "token", r, i, self.token_full[slot], code)
        self._end(thread, r)

    def _check_stages(self, view: View, r: int, i: int) -> None:
        for kind, ring in (("weight", self.size.stages), ("token", self.size.token_ring)):
            found = view[f"{kind} stage {i % ring} {r}"]
            if found != i:
                view.fail(f"product {i} reads a {kind} stage that holds {'nothing whole' if found is None else found}")

    def _stages(self, r: int, i: int) -> list[str]:
        return [f"weight stage {i % self.size.stages} {r}", f"token stage {i % self.size.token_ring} {r}"]

    # SM90: a row warpgroup multiplies and finishes.

    def _wgmma(self, thread: Thread, r: int, w: int) -> None:
        s, code = self.size, "split_k_sm90_kernel.SplitKSm90.multiply"
        issued, done = f"wgmmas issued {w} {r}", f"wgmmas done {w} {r}"
        self.values |= {issued: 0, done: 0}
        tensor_core = self._thread(f"tensor core {w} of {r}")

        def release(i: int) -> None:
            self._arrive(thread, self.empty[i % s.stages], code, "mbarrier_arrive(empty + former)")
            if s.token_stages:
                self._arrive(thread, self.token_empty[i % s.token_ring], code, "mbarrier_arrive(token_empty + token_former)")

        for i in range(s.tiles):
            if s.token_stages:
                self._wait(thread, self.token_full[i % s.token_ring], i // s.token_ring % 2, code,
                           "mbarrier_wait(token_full + token_slot, token_phase)")  # fmt: skip
            self._wait(thread, self.full[i % s.stages], i // s.stages % 2, code, "mbarrier_wait(full + slot, phase)")
            self._step(thread, f"issues product {i}", code, "commit_group()", adds=[issued], run=lambda v: _add(v, issued))

            def multiply(view: View, i: int = i) -> None:
                self._check_stages(view, r, i)
                _add(view, done)

            self._step(tensor_core, f"multiplies {i}", waits=[issued], reads=[f"ended {r}", *self._stages(r, i)], adds=[done],
                       ready=lambda v, i=i: v[issued] > i, run=_while_alive(r, multiply))  # fmt: skip
            self._step(thread, f"waits for product {i - 1}", code, "wait_group(1)", waits=[done], ready=lambda v, i=i: v[done] >= i)
            if self.bug("released_too_early"):
                release(i)
            elif i > 0:
                release(i - 1)
        self._step(thread, "waits for all products", code, "wait_group(0)", waits=[done], ready=lambda v: v[done] == s.tiles)

    # SM100: one warp multiplies, the warpgroups take the sums from tensor memory.

    def _multiplier(self, r: int) -> None:
        s, code = self.size, "split_k_sm100_kernel.SplitKSm100.multiply"
        thread, issued = self._thread(f"multiplying warp {r}"), f"work issued {r}"
        pointer = f"allocated {r}"
        self._begin(thread, r)

        def allocate(view: View) -> None:
            view[f"sums {r}"], view[f"address {r}"] = ("garbage",), True

        def allocation() -> None:
            self._step(thread, "allocates tensor memory", "tensor_memory.allocate", "alloc_tmem(columns, _address(words))",
                       waits=[f"taken {r}"], writes=[f"sums {r}", f"address {r}"], ready=lambda v: not v[f"taken {r}"],
                       run=allocate)  # fmt: skip

        def publish() -> None:
            self._arrive(thread, pointer, "tensor_memory.allocate", "mbarrier_arrive(allocated(words))")

        for step in (publish, allocation) if self.bug("no_fence_before_allocated") else (allocation, publish):
            step()
        if not self.bug("one_pointer_barrier"):
            self._wait(thread, pointer, 0, "tensor_memory.allocate", "wait(allocated(words), 0)")
        for i in range(s.tiles):
            def wait(i: int = i) -> None:
                if s.token_stages:
                    self._wait(thread, self.token_full[i % s.token_ring], i // s.token_ring % 2, code,
                               "tensor_memory.wait(token_full + token_slot, token_phase)")  # fmt: skip
                self._wait(thread, self.full[i % s.stages], i // s.stages % 2, code, "tensor_memory.wait(full + slot, phase)")

            def product(i: int = i) -> None:
                self._issue(thread, issued, f"product {i}", code, "cute.gemm(tiled_mma, sums[w], tW[None, w, kb, slot], tokens, sums[w])")

            for step in (product, wait) if self.bug("no_fence_behind_full") else (wait, product):
                step()
            self._release(thread, r, i, issued, code)
        self._issue(thread, issued, "the last commit", code, "give_back_when_done(tensor_memory.accumulated(tensor))")
        if self.one_pointer_barrier:
            self._arrive(thread, pointer, "tensor_memory.release", "wait(drained(words), 0)")
            self._wait(thread, pointer, 1, "tensor_memory.release", "wait(drained(words), 0)")
        freed_early = self.bug("freed_before_read") or self.bug("no_fence_behind_drained")
        if not freed_early and not self.one_pointer_barrier:
            self._wait(thread, f"drained {r}", 0, "tensor_memory.release", "wait(drained(words), 0)")

        def free(view: View) -> None:
            view[f"sums {r}"] = None

        self._step(thread, "frees tensor memory", "tensor_memory.release", "dealloc_tmem(address, columns)", writes=[f"sums {r}"], run=free)
        self._end(thread, r)

    def _issue(self, thread: Thread, issued: str, what: str, code: str, source: str) -> None:
        self._step(thread, f"issues {what}", code, source, adds=[issued], run=lambda v: _add(v, issued))

    def _commits(self, i: int, r: int) -> list[str]:
        """Barriers that a commit behind product i arrives at: of stages that are loaded once more."""
        s = self.size
        always = self.bug("idle_commits")
        found = [self.empty[i % s.stages]] if always or i + s.stages < s.tiles else []
        if s.token_stages and (always or i + s.token_ring < s.tiles):
            found.append(self.token_empty[i % s.token_ring])
        return found

    def _release(self, thread: Thread, r: int, i: int, issued: str, code: str) -> None:
        for barrier in self._commits(i, r):
            source = "give_back_when_done(empty + slot)" if barrier in self.empty else "give_back_when_done(token_empty + token_slot)"
            if self.bug("released_by_arrival"):
                self._arrive(thread, barrier, code, source)
            else:
                self._issue(thread, issued, f"the commit to {barrier}", code, source)

    def _tensor_core(self, r: int) -> None:
        """Products in order; a commit any time after it has been issued and the products before it are done."""
        s, issued, sums, done = self.size, f"work issued {r}", f"sums {r}", f"products done {r}"
        self.values[done] = 0
        thread, count = self._thread(f"tensor core of {r}"), 0

        def commit(barrier: str, products: int, at_least: int) -> None:
            self._step(self._thread(f"commit {at_least} of {r}"), f"arrives at {barrier}", waits=[issued, done], reads=[f"ended {r}"],
                       adds=[barrier], ready=lambda v: v[issued] >= at_least and v[done] >= products,
                       run=_while_alive(r, lambda v: _change(v, barrier, arrivals=1)))  # fmt: skip

        for i in range(s.tiles):

            def multiply(view: View, i: int = i) -> None:
                self._check_stages(view, r, i)
                if view[sums] is None:
                    return view.fail("a product into tensor memory that is not this CTA's")
                view[sums] = (i,) if i == 0 and not self.bug("sums_kept") else (*view[sums], i)
                _add(view, done)

            count += 1
            self._step(thread, f"multiplies {i}", waits=[issued], reads=[f"ended {r}", *self._stages(r, i)], writes=[sums], adds=[done],
                       ready=lambda v, at_least=count: v[issued] >= at_least, run=_while_alive(r, multiply))  # fmt: skip
            for barrier in [] if self.bug("released_by_arrival") else self._commits(i, r):
                count += 1
                commit(barrier, i + 1, count)
        commit(f"accumulated {r}", s.tiles, count + 1)

    def _read_sums(self, thread: Thread, r: int, w: int) -> None:
        code = "tensor_memory.read_sums"
        pointer = f"allocated {r}"
        if self.one_pointer_barrier:
            self._arrive(thread, pointer, "tensor_memory.wait_for_address", "wait(allocated(words), 0)")
        if not self.bug("address_not_waited_for"):
            self._wait(thread, pointer, 0, "tensor_memory.wait_for_address", "wait(allocated(words), 0)")

        def address(view: View) -> None:
            if not view[f"address {r}"]:
                view.fail("the address of tensor memory is not there yet")

        def read(view: View) -> None:
            if view[f"sums {r}"] != tuple(range(self.size.tiles)):
                view.fail(f"tensor memory holds {view[f'sums {r}']}")

        self._step(thread, "reads the address", "tensor_memory.wait_for_address", "retrieve_tmem_ptr(Float32, 16, _address(words))",
                   reads=[f"address {r}"], run=address)  # fmt: skip

        def wait() -> None:
            self._wait(thread, f"accumulated {r}", 0, code, "wait(accumulated(words), 0)")

        def load() -> None:
            self._step(thread, "reads its sums", code, "tcgen05.wait::ld.sync.aligned", reads=[f"sums {r}"], run=read)

        def drained() -> None:
            target = pointer if self.one_pointer_barrier else f"drained {r}"
            self._arrive(thread, target, code, "mbarrier_arrive(drained(words))")

        order = [wait, load, drained]
        if self.bug("no_fence_behind_accumulated"):
            order = [load, wait, drained]
        if self.bug("no_fence_before_drained"):
            order = [wait, drained, load]
        for step in order:
            step()

    # The rest is the same on every generation.

    def _warpgroup(self, r: int, w: int) -> None:
        s, code = self.size, "split_k_pipeline.SplitKGemm.finish"
        thread = self._thread(f"warpgroup {w} of {r}")
        self._begin(thread, r)
        if s.arch == "sm90":
            self._wgmma(thread, r, w)
        else:
            self._read_sums(thread, r, w)
        if s.split > 1:
            if not self.bug("no_cluster_wait"):
                self._cluster_wait(thread, code)
            for group in range(s.groups):
                if group % s.split != r:
                    sent = f"sent {group}.{w} {r}"
                    self._step(thread, f"sends group {group}", "split_k_epilogue.ClusterEpilogue.send_partials",
                               "store_async_dsmem(target, sums, landed, owner)", adds=[sent], run=lambda v, sent=sent: _add(v, sent))  # fmt: skip
            if s.owned(r) and not self.bug("ends_before_sums"):
                self._receive(thread, r, w)
        if s.owned(r):
            self._step(thread, "stores y", "split_k_epilogue.ClusterEpilogue.store", "self.store_vector(values, mR, mY, token, n)",
                       reads=["previous finished", f"tokens known {r}"], run=lambda v: self._check_store(v, r))  # fmt: skip
        self._end(thread, r, waits=False)

    def _check_store(self, view: View, r: int) -> None:
        if not view["previous finished"] or not view[f"tokens known {r}"]:
            view.fail("y is written while the previous kernel may use it")

    def _receive(self, thread: Thread, r: int, w: int) -> None:
        s = self.size
        mail = [f"mail {g}.{w} {sender} to {r}" for g in range(r, s.groups, s.split) for sender in range(s.split) if sender != r]

        def add(view: View) -> None:
            if missing := [name for name in mail if not view[name]]:
                view.fail(f"{missing[0]} has not come")

        def read() -> None:
            self._step(thread, "adds what came", "split_k_epilogue.ClusterEpilogue.add_partials", "total = total + part",
                       reads=mail, run=add)  # fmt: skip

        def wait() -> None:
            if not self.bug("no_wait_for_sums"):
                self._wait(thread, f"landed {r}", 0, "split_k_pipeline.SplitKGemm.finish", "wait_for_cluster_data(landed, 0)")

        for step in (read, wait) if self.bug("sums_not_acquired") else (wait, read):
            step()

    def _message(self, sender: int, r: int, group: int, w: int) -> None:
        mail, landed = f"mail {group}.{w} {sender} to {r}", f"landed {r}"

        def deliver(view: View) -> None:
            view[mail] = True
            _change(view, landed, transactions=1)

        self._beside(f"message {mail}", "lands", f"sent {group}.{w} {sender}", 1, r, mail, landed, deliver)

    def _next_kernel(self, r: int) -> None:
        """Its CTA comes when every CTA of this kernel has let it, takes what tensor memory is left, and ends after it."""
        thread, s = self._thread(f"next kernel beside {r}"), self.size
        ended = [f"ended {rank}" for rank in range(s.split)]
        self._step(thread, "takes all tensor memory that is left", waits=["triggered"], reads=[f"address {r}"], writes=[f"taken {r}"],
                   joint=True, ready=lambda v: v["triggered"] == s.split, run=lambda v: _set(v, f"taken {r}", not v[f"address {r}"]))  # fmt: skip
        self._step(thread, "ends", waits=ended, writes=[f"taken {r}"], ready=lambda v: all(v[name] for name in ended),
                   run=lambda v: _set(v, f"taken {r}", False))  # fmt: skip


def _set(view: View, name: str, value) -> None:
    view[name] = value


def _add(view: View, name: str, amount: int = 1) -> None:
    view.change(name, lambda value: value + amount)


def _change(view: View, barrier: str, arrivals: int = 0, expected: int = 0, transactions: int = 0) -> None:
    """``arrivals`` at a barrier that expects as many more transactions, or transactions that are done."""

    def changed(state):
        if state is None:
            return view.fail(f"{barrier} is not initialised")
        phase, pending, outstanding, count = state
        pending, outstanding = pending - arrivals, outstanding + expected - transactions
        if pending < 0:
            view.fail(f"one arrival too many at {barrier}")
        return (phase + 1, count, 0, count) if (pending, outstanding) == (0, 0) else (phase, pending, outstanding, count)

    view.change(barrier, changed)


def _while_alive(rank: int, run: Callable[[View], None]) -> Callable[[View], None]:
    def checked(view: View) -> None:
        if view[f"ended {rank}"]:
            view.fail(f"it touches a CTA that has ended: rank {rank}")
        else:
            run(view)

    return checked


def check(size: Size) -> Outcome:
    """Walks every order of one size."""
    pipeline = Pipeline(size)
    return explore(pipeline.threads, pipeline.values)
