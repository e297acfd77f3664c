"""What the pipeline's steps are made of: sizes, mbarriers, steps that wait, arrive, or run beside their thread.

mbarriers count arrivals and transactions and turn to their next phase when both are out; a wait for parity p passes
when the phase of that parity is over (PTX ISA, mbarrier).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .explore import Step, Thread, View


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

    @property
    def barrier_ring(self) -> int:
        shorter = self.bug == "barriers_of_the_shorter_ring"
        return (min if shorter else max)(self.stages, self.token_ring)

    def owned(self, rank: int) -> int:
        return len(range(rank, self.groups, self.split))


def set_value(view: View, name: str, value) -> None:
    view[name] = value


def add(view: View, name: str, amount: int = 1) -> None:
    view.change(name, lambda value: value + amount)


def change_barrier(view: View, barrier: str, arrivals: int = 0, expected: int = 0, transactions: int = 0) -> None:
    """``arrivals`` at a barrier that expects as many more transactions, or transactions that are done."""

    def changed(state):
        if state is None:
            return view.fail(f"{barrier} is not initialised")
        phase, pending, outstanding, count = state
        pending, outstanding = pending - arrivals, outstanding + expected - transactions
        if pending < 0:
            view.fail(f"one arrival too many at {barrier}")
        return (
            (phase + 1, count, 0, count) if (pending, outstanding) == (0, 0) else (phase, pending, outstanding, count)
        )

    view.change(barrier, changed)


def while_alive(rank: int, run: Callable[[View], None]) -> Callable[[View], None]:
    def checked(view: View) -> None:
        if view[f"ended {rank}"]:
            view.fail(f"it touches a CTA that has ended: rank {rank}")
        else:
            run(view)

    return checked


class Parts:
    """Threads and first values, and how they are added to."""

    def __init__(self, size: Size):
        self.size = size
        self.values: dict = {}
        self.threads: list[Thread] = []

    def bug(self, name: str) -> bool:
        return self.size.bug == name

    def _thread(self, name: str) -> Thread:
        self.threads.append(Thread(name))
        return self.threads[-1]

    def _step(
        self,
        thread: Thread,
        what: str,
        code: str = "",
        source: str = "",
        *,
        waits: Sequence[str] = (),
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
        adds: Sequence[str] = (),
        joint: bool = False,
        ready: Callable[[View], bool] = lambda v: True,
        run: Callable[[View], None] = lambda v: None,
    ) -> None:
        variables = (frozenset(waits), frozenset(reads), frozenset(writes), frozenset(adds))
        thread.steps.append(Step(what, code, source, *variables, joint, ready, run))

    def _barrier(self, name: str) -> str:
        """A barrier: None, then (phase, arrivals pending, transactions pending, arrivals a phase)."""
        self.values[name] = None
        return name

    def _wait(
        self, thread: Thread, barrier: str, parity: int, code: str, source: str, unless: str | None = None
    ) -> None:
        """``unless``: a variable of this thread that spares it the wait."""

        def ready(view: View) -> bool:
            told = unless is not None and view[unless]
            return told or view[barrier] is None or view[barrier][0] % 2 != parity

        def run(view: View) -> None:
            if view[barrier] is None:
                view.fail(f"{barrier} is not initialised")

        waits = [barrier] if unless is None else [barrier, unless]
        self._step(thread, f"waits for {barrier}", code, source, waits=waits, ready=ready, run=run)

    def _arrive(self, thread: Thread, barrier: str, code: str, source: str, expect: int = 0) -> None:
        self._step(
            thread,
            f"arrives at {barrier}",
            code,
            source,
            adds=[barrier],
            run=lambda v: change_barrier(v, barrier, arrivals=1, expected=expect),
        )

    def _beside(
        self,
        name: str,
        what: str,
        issued: str,
        at_least: int,
        rank: int,
        writes: str,
        adds: str,
        run: Callable[[View], None],
    ) -> None:
        """Work beside its thread: may complete once the variable ``issued`` has reached ``at_least``."""
        self._step(
            self._thread(name),
            what,
            waits=[issued],
            reads=[f"ended {rank}"],
            writes=[writes],
            adds=[adds],
            ready=lambda v: v[issued] >= at_least,
            run=while_alive(rank, run),
        )
