"""What streams and events order: a stand-in that records operations and finds pairs that nothing puts in order.

Operations name the memory that they read and write. Each stream has a clock; an event keeps the clocks of its stream,
and a stream that waits for it is behind all that they say. Two operations that touch the same bytes, one of them
writing, with neither behind the other are a race.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field

import pytest
import torch

Clocks = dict[int, int]


def span(tensor) -> tuple[int, int]:
    """The bytes from the first to the last element."""
    length = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


@dataclass
class Operation:
    name: str
    stream: int
    at: int
    behind: Clocks
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]


def _meet(some, others) -> bool:
    return any(a < d and c < b for (a, b), (c, d) in itertools.product(some, others))


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self):
        self.clocks: Clocks | None = None

    def record(self, stream) -> None:
        self.clocks = dict(stream.clocks)


class Stream:
    """Stands for torch.cuda.Stream on cuda:``index``."""

    _numbers = itertools.count(1)

    def __init__(self, index: int = 0):
        self.cuda_stream, self.device = next(self._numbers), torch.device("cuda", index)
        self.clocks: Clocks = {self.cuda_stream: 0}

    def wait_event(self, event: Event) -> None:
        assert event.clocks is not None, "waits for an event that was never recorded"
        for stream, clock in event.clocks.items():
            self.clocks[stream] = max(clock, self.clocks.get(stream, 0))


@dataclass
class Ordering:
    """The streams of one process. ``current``: torch's current stream."""

    current: Stream = field(default_factory=Stream)
    operations: list[Operation] = field(default_factory=list)

    def note(self, name: str, reads=(), writes=()) -> None:
        """An operation on the current stream, of tensors."""
        stream = self.current
        stream.clocks[stream.cuda_stream] += 1
        at = stream.clocks[stream.cuda_stream]
        self.operations.append(
            Operation(name, stream.cuda_stream, at, dict(stream.clocks), [*map(span, reads)], [*map(span, writes)])
        )

    def races(self) -> list[tuple[str, str]]:
        """Names of the pairs that touch the same memory in no order, in the order in which they were given."""
        return [
            (first.name, second.name)
            for first, second in itertools.combinations(self.operations, 2)
            if second.behind.get(first.stream, 0) < first.at
            and (
                _meet(first.writes, second.writes + second.reads)
                or _meet(first.reads, second.writes)
            )
        ]

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextlib.contextmanager
def ordered(fake):
    """Inside, launches of a ``fakes.FakeCuda`` and torch.mm are operations of the ``Ordering`` that this gives."""
    found, compiler, mm = Ordering(), fake.compiler, torch.mm

    def compile_noting(unit):
        kernel = compiler(unit)

        def run(x, weight, residual, out, stream):
            assert stream == found.current.cuda_stream, "launched on another stream than torch's current one"
            found.note(unit.kernel, [x, weight], [out])
            kernel(x, weight, residual, out, stream)

        return run

    def noting_mm(a, b, *, out):
        found.note("mm", [a, b], [out])
        return mm(a, b, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "compiler", compile_noting)
        patch.setattr(torch, "mm", noting_mm)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
        patch.setattr(torch.cuda, "stream", found.stream)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current.cuda_stream, raising=False)
        yield found
