"""The pipeline of ``split_k`` as threads and steps: barriers with their phases, ranks, tensor memory, other launches.

TMA loads, products, commits and messages complete in any order that the hardware allows: loads and messages in any, the
products of one thread in theirs. A TMA load ruins its stage when it is issued and fills it when it completes.

``bug`` names a mistake to put in (``BUGS``). What stands for a missing fence is the order that it would forbid.
"""

from __future__ import annotations

from collections.abc import Sequence

from .explore import Outcome, Thread, View, explore
from .parts import Size, add, change_barrier, set_value
from .producers import Producers
from .tcgen05 import Tcgen05
from .wgmma import Wgmma


class Pipeline(Producers, Wgmma, Tcgen05):
    """Threads and first values of a ``Size``."""

    def __init__(self, size: Size):
        super().__init__(size)
        self.values |= {"previous finished": False, "cluster arrived": 0, "triggered": 0}
        self.per_rank = 2 + size.warpgroups + (size.arch == "sm100")
        for rank in range(size.split):
            self._rank(rank)
        previous = self._thread("previous kernel")
        self._step(
            previous, "finishes", writes=["previous finished"], run=lambda v: set_value(v, "previous finished", True)
        )
        if size.arch == "sm100":
            for rank in range(size.split):
                self._next_kernel(rank)

    def _rank(self, r: int) -> None:
        s = self.size
        sm100 = s.arch == "sm100"
        self.values |= {
            f"alive {r}": self.per_rank,
            f"ended {r}": False,
            f"block arrived {r}": 0,
            f"tokens known {r}": False,
        }
        self.full = [self._barrier(f"full[{i}] {r}") for i in range(s.barrier_ring)]
        self.empty = [self._barrier(f"empty[{i}] {r}") for i in range(s.barrier_ring)]
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
        self._step(
            self._thread(f"CTA {r}"),
            "ends with its last thread",
            waits=[f"alive {r}"],
            writes=[f"ended {r}"],
            joint=True,
            ready=lambda v: v[f"alive {r}"] == 0,
            run=lambda v: set_value(v, f"ended {r}", True),
        )

    def _begin(self, thread: Thread, r: int, initialises: Sequence[tuple[str, int]] = ()) -> None:
        """The prologue of every warp; one of them initialises the barriers."""
        kernel, block, cluster = "split_k_pipeline.SplitKGemm.kernel", f"block arrived {r}", "cluster arrived"
        if initialises and not self.bug("barriers_unfenced"):
            self._initialise(thread, r, initialises)
        self._step(
            thread,
            "arrives at the block barrier",
            kernel,
            "sync_threads()",
            adds=[block],
            run=lambda v: add(v, block, 1),
        )
        if not self.bug("barriers_unfenced"):
            self._step(
                thread,
                "passes the block barrier",
                kernel,
                "sync_threads()",
                waits=[block],
                joint=True,
                ready=lambda v: v[block] == self.per_rank,
            )
        self._step(
            thread,
            "arrives at the cluster barrier",
            kernel,
            "cluster_arrive",
            adds=[cluster],
            run=lambda v: add(v, cluster, 1),
        )
        if self.bug("barriers_unfenced"):
            if initialises:
                self._initialise(thread, r, initialises)
            self._step(
                thread,
                "passes the block barrier",
                kernel,
                "sync_threads()",
                waits=[block],
                joint=True,
                ready=lambda v: v[block] == self.per_rank,
            )

    def _initialise(self, thread: Thread, r: int, barriers: Sequence[tuple[str, int]]) -> None:
        s = self.size
        messages = (s.split - 1) * s.owned(r) * s.warpgroups - self.bug("armed_for_too_few")

        def run(view: View) -> None:
            for name, count in barriers:
                view[name] = (0, count, 0, count)
            if s.split > 1 and s.owned(r):
                view[f"landed {r}"] = (0, 0, messages, 1)

        self._step(
            thread,
            "initialises the barriers",
            "split_k_pipeline.SplitKGemm.kernel",
            "mbarrier_init(landed, 1)",
            writes=[name for name, _ in barriers],
            run=run,
        )

    def _end(self, thread: Thread, r: int, waits_in: str | None = "split_k_pipeline.SplitKGemm.kernel") -> None:
        """``waits_in``: where the thread waits for the cluster before it ends; None: it has waited."""
        if waits_in is not None and self.size.split > 1:
            self._cluster_wait(thread, waits_in)
        self._step(thread, "ends", adds=[f"alive {r}"], run=lambda v: add(v, f"alive {r}", -1))

    def _cluster_wait(self, thread: Thread, code: str) -> None:
        everyone = self.per_rank * self.size.split
        self._step(
            thread,
            "waits for the cluster",
            code,
            "cluster_wait()",
            waits=["cluster arrived"],
            joint=True,
            ready=lambda v: v["cluster arrived"] == everyone,
        )

    def _check_stages(self, view: View, r: int, i: int) -> None:
        for kind, ring in (("weight", self.size.stages), ("token", self.size.token_ring)):
            found = view[f"{kind} stage {i % ring} {r}"]
            if found != i:
                view.fail(f"product {i} reads a {kind} stage that holds {'nothing whole' if found is None else found}")

    def _stages(self, r: int, i: int) -> list[str]:
        return [f"weight stage {i % self.size.stages} {r}", f"token stage {i % self.size.token_ring} {r}"]

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
                    self._step(
                        thread,
                        f"sends group {group}",
                        "split_k_epilogue.ClusterEpilogue.send_partials",
                        "store_async_dsmem(target, sums, landed, owner)",
                        adds=[sent],
                        run=lambda v, sent=sent: add(v, sent),
                    )
            if s.owned(r) and not self.bug("ends_before_sums"):
                self._receive(thread, r, w)
        if s.owned(r):
            if s.arch == "sm100":
                self._step(
                    thread,
                    "waits for the previous kernel",
                    "split_k_epilogue.ClusterEpilogue.store",
                    "wait_for_previous_kernel()",
                    waits=["previous finished"],
                    ready=lambda v: v["previous finished"],
                )
            self._step(
                thread,
                "stores y",
                "split_k_epilogue.ClusterEpilogue.store",
                "self.store_vector(values, mR, mY, token, n)",
                reads=["previous finished", f"tokens known {r}"],
                run=lambda v: self._check_store(v, r),
            )
        self._end(thread, r, waits_in=None)

    def _check_store(self, view: View, r: int) -> None:
        if not view["previous finished"] or not view[f"tokens known {r}"]:
            view.fail("y is written while the previous kernel may use it")

    def _receive(self, thread: Thread, r: int, w: int) -> None:
        s = self.size
        mail = [
            f"mail {g}.{w} {sender} to {r}"
            for g in range(r, s.groups, s.split)
            for sender in range(s.split)
            if sender != r
        ]

        def add(view: View) -> None:
            if missing := [name for name in mail if not view[name]]:
                view.fail(f"{missing[0]} has not come")

        def read() -> None:
            self._step(
                thread,
                "adds what came",
                "split_k_epilogue.ClusterEpilogue.add_partials",
                "total = total + part",
                reads=mail,
                run=add,
            )

        def wait() -> None:
            if not self.bug("no_wait_for_sums"):
                self._wait(
                    thread, f"landed {r}", 0, "split_k_pipeline.SplitKGemm.finish", "wait_for_cluster_data(landed, 0)"
                )

        for step in (read, wait) if self.bug("sums_not_acquired") else (wait, read):
            step()

    def _message(self, sender: int, r: int, group: int, w: int) -> None:
        mail, landed = f"mail {group}.{w} {sender} to {r}", f"landed {r}"

        def deliver(view: View) -> None:
            view[mail] = True
            change_barrier(view, landed, transactions=1)

        self._beside(f"message {mail}", "lands", f"sent {group}.{w} {sender}", 1, r, mail, landed, deliver)


def check(size: Size) -> Outcome:
    """Walks every order of one size."""
    pipeline = Pipeline(size)
    return explore(pipeline.threads, pipeline.values)
