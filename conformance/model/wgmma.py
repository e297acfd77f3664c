"""SM90: a row warpgroup multiplies and keeps its sums in registers."""

from __future__ import annotations

from .explore import Thread, View
from .parts import Parts, add, while_alive


class Wgmma(Parts):
    """Steps of ``split_k_sm90_kernel.py``."""

    def _ask(self, thread: Thread, i: int, told: str, code: str) -> None:
        """Whether stage i is there: asked without waiting, under the products of the stage before."""
        ring = self.size.barrier_ring
        turns = (i - 1 if self.bug("asked_before_the_phase_is_flipped") else i) // ring
        barrier = self.full[i % ring]

        def ask(view: View) -> None:
            view[told] = view[barrier][0] % 2 != turns % 2

        source = "is_over(full + barrier, phase)"
        self._step(thread, f"asks for stage {i}", code, source, reads=[barrier], writes=[told], run=ask)

    def _wgmma(self, thread: Thread, r: int, w: int) -> None:
        s, code = self.size, "split_k_sm90_kernel.SplitKSm90.multiply"
        issued, done = f"wgmmas issued {w} {r}", f"wgmmas done {w} {r}"
        told = f"told {w} {r}"
        self.values |= {issued: 0, done: 0, told: False}
        tensor_core = self._thread(f"tensor core {w} of {r}")

        def release(i: int) -> None:
            self._arrive(thread, self.empty[i % s.barrier_ring], code, "mbarrier_arrive(empty + former)")

        for i in range(s.tiles):
            barrier, phase = self.full[i % s.barrier_ring], i // s.barrier_ring % 2
            self._wait(thread, barrier, phase, code, "wait_unless(ready, full + barrier, phase)", unless=told)
            self._step(
                thread, f"issues product {i}", code, "commit_group()", adds=[issued], run=lambda v: add(v, issued)
            )

            self._ask(thread, i + 1, told, code)

            def multiply(view: View, i: int = i) -> None:
                self._check_stages(view, r, i)
                add(view, done)

            self._step(
                tensor_core,
                f"multiplies {i}",
                waits=[issued],
                reads=[f"ended {r}", *self._stages(r, i)],
                adds=[done],
                ready=lambda v, i=i: v[issued] > i,
                run=while_alive(r, multiply),
            )
            self._step(
                thread,
                f"waits for product {i - 1}",
                code,
                "wait_group(1)",
                waits=[done],
                ready=lambda v, i=i: v[done] >= i,
            )
            if self.bug("released_too_early"):
                release(i)
            elif i > 0:
                release(i - 1)
        self._step(
            thread, "waits for all products", code, "wait_group(0)", waits=[done], ready=lambda v: v[done] == s.tiles
        )
