"""The weight producer and the token producer, and the loads that they issue."""

from __future__ import annotations

from .explore import Thread, View
from .parts import Parts, add, change_barrier, set_value


class Producers(Parts):
    """Steps of ``load_weights`` and ``load_tokens`` in ``split_k_pipeline.py``."""

    def _free(self, thread: Thread, kind: str, i: int, code: str) -> None:
        """Waits for the products of the stage that lay where the i-th will, by that stage's barrier."""
        s = self.size
        first = -(s.stages if kind == "weight" else s.token_ring) % s.barrier_ring  # ``first_freed``
        turns = 0 if kind == "weight" and self.bug("phase_not_flipped") else (first + i) // s.barrier_ring
        barrier = self.empty[(first + i) % s.barrier_ring]
        self._wait(thread, barrier, (1 + turns) % 2, code, "mbarrier_wait(empty + freed, freed_phase)")

    def _load(self, thread: Thread, kind: str, r: int, i: int, code: str) -> None:
        """Issues the i-th load of a ring: the barrier is armed, the stage is no longer what it was."""
        ring = self.size.stages if kind == "weight" else self.size.token_ring
        full = self.full[i % self.size.barrier_ring]
        stage, issued = f"{kind} stage {i % ring} {r}", f"{kind}s issued {r}"

        def issue(view: View) -> None:
            change_barrier(view, full, arrivals=1, expected=1)
            view[stage] = None
            add(view, issued)
            if kind == "weight" and not view[f"map {r}"]:
                view.fail("a weight tile is loaded through a tensor map that is not there yet")
            if kind == "token":
                if not view["previous finished"]:
                    view.fail("x is read while the previous kernel may write it")
                view[f"tokens known {r}"] = True

        def complete(view: View) -> None:
            view[stage] = i
            change_barrier(view, full, transactions=1)

        self._step(
            thread,
            f"loads {kind} tile {i}",
            code,
            "tma_bar_ptr=full + barrier",
            reads=["previous finished" if kind == "token" else f"map {r}"],
            writes=[stage, *([f"tokens known {r}"] if kind == "token" else [])],
            adds=[full, issued],
            run=issue,
        )
        self._beside(f"TMA {kind} {i} of {r}", "completes", issued, i + 1, r, stage, full, complete)

    def _weight_map(self, thread: Thread, r: int) -> None:
        """The map is a parameter of the launch: at hand from the first. The mistakes have it in memory, seen later."""
        seen, kernel = f"map {r}", "split_k_pipeline.SplitKGemm.kernel"
        in_memory = any(map(self.bug, ("map_on_another_stream", "map_not_acquired", "map_acquired")))
        self.values[seen] = not in_memory
        if in_memory:
            what = "upload of the map" if self.bug("map_on_another_stream") else "what was there leaves the map's cache"
            self._step(self._thread(f"{what}, {r}"), "is over", writes=[seen], run=lambda v: set_value(v, seen, True))
        if self.bug("map_acquired"):
            self._step(thread, "acquires the map", waits=[seen], ready=lambda v: v[seen])
        self._step(thread, "prefetches the map", kernel, "prefetch_descriptor(tma_w)", reads=[seen])

    def _weight_producer(self, r: int) -> None:
        s, code = self.size, "split_k_pipeline.SplitKGemm.load_weights"
        thread = self._thread(f"weight producer {r}")
        releases = s.warpgroups if s.arch == "sm90" else 1
        counts = [(name, 2) for name in self.full] + [(name, releases) for name in self.empty]
        counts += [(f"landed {r}", 1), (f"previous {r}", 1)]
        if s.arch == "sm100":
            shared = self.one_pointer_barrier
            counts += [
                (f"allocated {r}", 1 + s.warpgroups if shared else 1),
                (f"accumulated {r}", 1),
                (f"drained {r}", s.warpgroups),
            ]
        self._weight_map(thread, r)
        self._begin(thread, r, counts)
        for i in range(s.tiles):
            if i == s.prefetch:
                self._wait(thread, f"previous {r}", 0, code, "mbarrier_wait(previous, 0)")
            self._free(thread, "weight", i, code)
            self._load(thread, "weight", r, i, code)
            if i == max(0, s.tiles - 1 - s.trigger):
                if s.arch == "sm100" and not self.bug("next_kernel_before_allocation") and not self.one_pointer_barrier:
                    self._wait(
                        thread,
                        f"allocated {r}",
                        0,
                        "split_k_sm100_kernel.SplitKSm100.before_next_kernel",
                        "mbarrier_wait(tensor_memory.allocated(tensor), 0)",
                    )
                self._step(
                    thread,
                    "lets the next kernel start",
                    code,
                    "let_next_kernel_start()",
                    adds=["triggered"],
                    run=lambda v: add(v, "triggered", 1),
                )
        self._end(thread, r)

    def _token_producer(self, r: int) -> None:
        s, code = self.size, "split_k_pipeline.SplitKGemm.load_tokens"
        kernel, thread = "split_k_pipeline.SplitKGemm.kernel", self._thread(f"token producer {r}")
        self._begin(thread, r)
        if not self.bug("tokens_before_pdl_wait"):
            self._step(
                thread,
                "waits for the previous kernel",
                kernel,
                "wait_for_previous_kernel()",
                waits=["previous finished"],
                ready=lambda v: v["previous finished"],
            )
        self._arrive(thread, f"previous {r}", kernel, "mbarrier_arrive(previous)")
        for i in range(s.tiles):
            self._free(thread, "token", i, code)
            self._load(thread, "token", r, i, code)
        self._end(thread, r)
