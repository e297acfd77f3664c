"""Every order in which the steps of some threads can run: no deadlock, no broken promise, or the tale of one.

A thread is a straight line of steps; what branches or loops in code is written out for one size. A step waits until it
is ready, then changes shared variables at once. Work that runs beside its thread (a TMA load, a product, a message)
is a thread of its own, ready once it has been issued.

Not every order is walked, but every outcome is reached: of steps that do not touch each other's variables one order is
enough (stubborn sets; Valmari, "Stubborn sets for reduced state space generation", 1991). Programs end, so that what
goes wrong on the way is still there at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class View:
    """The variables as a step sees them: those that it declares. ``fail`` notes a broken promise."""

    def __init__(self, values: dict[str, Any], step: "Step"):
        self.values, self.step = values, step
        self.problem: str | None = None

    def __getitem__(self, name: str) -> Any:
        step = self.step
        assert name in step.waits or name in step.reads or name in step.writes, f"{step.what} reads {name}, undeclared"
        return self.values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        assert name in self.step.writes, f"{self.step.what} writes {name}, undeclared"
        self.values[name] = value

    def change(self, name: str, change: Callable[[Any], Any]) -> None:
        """A change whose order among its like does not matter."""
        assert name in self.step.adds, f"{self.step.what} changes {name}, undeclared"
        self.values[name] = change(self.values[name])

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem


@dataclass(frozen=True)
class Step:
    """``code``: the function that it stands for, "module.Class.function" in lowlat_gemm/kernels; ``source``: what is
    written there. Variables: ``waits``, what ``ready`` looks at; ``reads`` and ``writes``, what ``run`` does (a written
    one may be read); ``adds``, what it changes in a way that commutes. A variable that begins as an int is a counter: a
    wait for one that is over stays over. ``joint``: every thread that adds to what it waits for has
    to, before it is ready.
    """

    what: str
    code: str = ""
    source: str = ""
    waits: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    adds: frozenset[str] = frozenset()
    joint: bool = False
    ready: Callable[[View], bool] = lambda view: True
    run: Callable[[View], None] = lambda view: None


@dataclass
class Thread:
    name: str
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """``problem`` None: every order ends well. ``tale``: the steps that lead to it."""

    states: int
    problem: str | None = None
    tale: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Touch:
    """Variables as bits: what a step, or all steps from a place on, wait for, read, write and add to."""

    waits: int = 0
    reads: int = 0
    writes: int = 0
    adds: int = 0
    joint: bool = False

    def __or__(self, other: "_Touch") -> "_Touch":
        return _Touch(
            self.waits | other.waits, self.reads | other.reads, self.writes | other.writes, self.adds | other.adds
        )

    def depends(self, later: "_Touch", counters: int) -> bool:
        """Whether the order of this step, which is ready, and of any in ``later`` may matter."""
        seen, changed = later.waits & ~counters | later.reads, later.writes | later.adds
        mine = self.waits & ~counters | self.reads
        return bool(self.writes & (seen | changed) or mine & changed or self.adds & (seen | later.writes))

    def waits_for(self, later: "_Touch") -> bool:
        return bool(self.waits & (later.writes | later.adds))


def _touches(threads: list[Thread], names: list[str]) -> tuple[list, list]:
    """For each thread and place: what the step there touches, and what all from there on do."""
    bit = {name: 1 << i for i, name in enumerate(names)}

    def bits(of: Iterable[str]) -> int:
        return sum(bit[name] for name in of)

    here, onward = [], []
    for thread in threads:
        steps = [_Touch(bits(s.waits), bits(s.reads), bits(s.writes), bits(s.adds), s.joint) for s in thread.steps]
        rest = [_Touch()]
        for step in reversed(steps):
            rest.append(rest[-1] | step)
        here.append(steps)
        onward.append(rest[::-1])
    return here, onward


def explore(threads: list[Thread], start: Mapping[str, Any], *, reduced: bool = True, limit: int = 500_000) -> Outcome:
    """Walks every order from ``start``, or with ``reduced`` enough of them. RuntimeError beyond ``limit`` states."""
    names = sorted(start)
    here, onward = _touches(threads, names)
    counters = sum(1 << i for i, name in enumerate(names) if type(start[name]) is int)
    lengths = [len(thread.steps) for thread in threads]
    first = (tuple(0 for _ in threads), tuple(start[name] for name in names))
    seen, todo, came_from = {first}, [first], {first: None}

    def tale(state, last: str | None) -> tuple[str, ...]:
        lines = [last] if last else []
        while came_from[state] is not None:
            state, line = came_from[state]
            lines.append(line)
        return tuple(reversed(lines))

    while todo:
        state = todo.pop()
        places, values = state
        now = dict(zip(names, values))
        alive = [t for t, place in enumerate(places) if place < lengths[t]]
        ready = {t for t in alive if (step := threads[t].steps[places[t]]).ready(View(now, step))}
        if not ready and alive:
            stuck = "; ".join(f"{threads[t].name} at: {threads[t].steps[places[t]].what}" for t in alive)
            return Outcome(len(seen), f"deadlock: {stuck}", tale(state, None))
        for t in _enough(places, alive, ready, here, onward, counters) if reduced else ready:
            step = threads[t].steps[places[t]]
            view = View(dict(now), step)
            step.run(view)
            line = f"{threads[t].name}: {step.what}"
            if view.problem:
                return Outcome(len(seen), f"{line}: {view.problem}", tale(state, line))
            following = (places[:t] + (places[t] + 1,) + places[t + 1 :], tuple(view.values[name] for name in names))
            if following not in seen:
                seen.add(following)
                came_from[following] = (state, line)
                todo.append(following)
                if len(seen) > limit:
                    raise RuntimeError(f"more than {limit} states")
    return Outcome(len(seen))


def _enough(places, alive, ready, here, onward, counters) -> list[int]:
    """The ready threads of the smallest stubborn set: whatever the others do, these may go first."""
    best: list[int] | None = None
    for start in ready:
        chosen, todo = {start}, [start]
        while todo:
            t = todo.pop()
            step = here[t][places[t]]
            if t in ready:
                more = [u for u in alive if u not in chosen and step.depends(onward[u][places[u]], counters)]
            else:
                more = [u for u in alive if step.waits_for(onward[u][places[u]])]
                # Of those that must all have come, one that has not is reason enough.
                if step.joint and more:
                    more = [] if chosen & set(more) - {t} else [min(set(more) - {t})]
                more = [u for u in more if u not in chosen]
            chosen.update(more)
            todo.extend(more)
            if best is not None and len(chosen & ready) >= len(best):
                break
        else:
            best = [t for t in chosen if t in ready]
            if len(best) == 1:
                break
    return best or []
