"""SM100 and on: one warp multiplies, the warpgroups take the sums from tensor memory."""

from __future__ import annotations

from .explore import Thread, View
from .parts import Parts, add, change_barrier, set_value, while_alive


class Tcgen05(Parts):
    """Steps of ``split_k_sm100_kernel.py`` and ``tensor_memory.py``."""

    @property
    def one_pointer_barrier(self) -> bool:
        return self.bug("one_pointer_barrier") or self.bug("one_pointer_barrier_repaired")

    def _multiplier(self, r: int) -> None:
        s, code = self.size, "split_k_sm100_kernel.SplitKSm100.multiply"
        thread, issued = self._thread(f"multiplying warp {r}"), f"work issued {r}"
        pointer = f"allocated {r}"
        self._begin(thread, r)

        def allocate(view: View) -> None:
            view[f"sums {r}"], view[f"address {r}"] = ("garbage",), True

        def allocation() -> None:
            self._step(
                thread,
                "allocates tensor memory",
                "tensor_memory.allocate",
                "alloc_tmem(columns, _address(words))",
                waits=[f"taken {r}"],
                writes=[f"sums {r}", f"address {r}"],
                ready=lambda v: not v[f"taken {r}"],
                run=allocate,
            )

        def publish() -> None:
            self._arrive(thread, pointer, "tensor_memory.allocate", "mbarrier_arrive(allocated(words))")

        for step in (publish, allocation) if self.bug("no_fence_before_allocated") else (allocation, publish):
            step()
        if not self.bug("one_pointer_barrier"):
            self._wait(thread, pointer, 0, "tensor_memory.allocate", "wait(allocated(words), 0)")
        for i in range(s.tiles):

            def wait(i: int = i) -> None:
                barrier, phase = self.full[i % s.barrier_ring], i // s.barrier_ring % 2
                self._wait(thread, barrier, phase, code, "tensor_memory.wait(full + barrier, phase)")

            def product(i: int = i) -> None:
                self._issue(
                    thread,
                    issued,
                    f"product {i}",
                    code,
                    "cute.gemm(tiled_mma, sums[w], tW[None, w, kb, slot], tokens, sums[w])",
                )

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

        self._step(
            thread,
            "frees tensor memory",
            "tensor_memory.release",
            "dealloc_tmem(address, columns)",
            writes=[f"sums {r}"],
            run=free,
        )
        self._end(thread, r, waits_in="split_k_sm100_kernel.SplitKSm100.multiply_and_finish")

    def _issue(self, thread: Thread, issued: str, what: str, code: str, source: str) -> None:
        self._step(thread, f"issues {what}", code, source, adds=[issued], run=lambda v: add(v, issued))

    def _commits(self, i: int, r: int) -> list[str]:
        """Barriers that a commit behind product i arrives at: of stages that a producer waits for."""
        s = self.size
        awaited = i + min(s.stages, s.token_ring) < s.tiles
        return [self.empty[i % s.barrier_ring]] if awaited or self.bug("idle_commits") else []

    def _release(self, thread: Thread, r: int, i: int, issued: str, code: str) -> None:
        for barrier in self._commits(i, r):
            source = "give_back_when_done(empty + barrier)"
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
            self._step(
                self._thread(f"commit {at_least} of {r}"),
                f"arrives at {barrier}",
                waits=[issued, done],
                reads=[f"ended {r}"],
                adds=[barrier],
                ready=lambda v: v[issued] >= at_least and v[done] >= products,
                run=while_alive(r, lambda v: change_barrier(v, barrier, arrivals=1)),
            )

        for i in range(s.tiles):

            def multiply(view: View, i: int = i) -> None:
                self._check_stages(view, r, i)
                if view[sums] is None:
                    return view.fail("a product into tensor memory that is not this CTA's")
                view[sums] = (i,) if i == 0 and not self.bug("sums_kept") else (*view[sums], i)
                add(view, done)

            count += 1
            self._step(
                thread,
                f"multiplies {i}",
                waits=[issued],
                reads=[f"ended {r}", *self._stages(r, i)],
                writes=[sums],
                adds=[done],
                ready=lambda v, at_least=count: v[issued] >= at_least,
                run=while_alive(r, multiply),
            )
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

        self._step(
            thread,
            "reads the address",
            "tensor_memory.wait_for_address",
            "retrieve_tmem_ptr(Float32, 16, _address(words))",
            reads=[f"address {r}"],
            run=address,
        )

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

    def _next_kernel(self, r: int) -> None:
        """Its CTA comes when every CTA of this kernel has let it, takes what tensor memory is left, ends after it."""
        thread, s = self._thread(f"next kernel beside {r}"), self.size
        ended = [f"ended {rank}" for rank in range(s.split)]
        self._step(
            thread,
            "takes all tensor memory that is left",
            waits=["triggered"],
            reads=[f"address {r}"],
            writes=[f"taken {r}"],
            joint=True,
            ready=lambda v: v["triggered"] == s.split,
            run=lambda v: set_value(v, f"taken {r}", not v[f"address {r}"]),
        )
        self._step(
            thread,
            "ends",
            waits=ended,
            writes=[f"taken {r}"],
            ready=lambda v: all(v[name] for name in ended),
            run=lambda v: set_value(v, f"taken {r}", False),
        )
