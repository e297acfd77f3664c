"""The process's compiled kernels: each made once, one at a time, whether compiled here or loaded from disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_LOG = logging.getLogger("lowlat_gemm")


@dataclass(frozen=True)
class CompileUnit:
    """What one compilation produces: a kernel, a compile target ("sm_90a") and the kernel's own hashable spec.

    It holds no tensor, no pointer, and no extent or stride that the code does not depend on.
    """

    kernel: str
    target: str
    spec: Hashable


class CompileError(RuntimeError):
    """A unit that did not compile; the message names the unit, ``__cause__`` is what the compiler said."""


#: Most failures that are remembered.
LIMIT = 2048


@dataclass(frozen=True)
class Made:
    """A callable kernel. ``compiled``: made by the compiler just now, not loaded from disk."""

    kernel: Callable
    compiled: bool


class CompileCache:
    """Compiled kernels by unit. ``make`` turns a unit into a ``Made``; it may compile or load.

    The DSL's compiler is not thread-safe (two threads in it abort the process), so one lock covers every ``make``.
    A unit that failed fails again at once: a server must not try a broken kernel on every token.
    ``compiles`` and ``loads`` count what was made either way; a failed compile counts. ``late`` counts the launches that
    came before their kernel was made, in a CUDA graph capture or while serving: 0 where the warm-up missed nothing.
    A kernel stays until ``clear``: a captured graph holds no reference to the kernels in it, and would launch code that
    is gone. ``limit``: most failures that are remembered.
    """

    def __init__(self, make: Callable[[CompileUnit], Made], limit: int = LIMIT):
        self._make = make
        self._lock = threading.Lock()
        self._limit = limit
        self._kernels: dict[CompileUnit, Callable] = {}
        self._failed: dict[CompileUnit, str] = {}
        self.compiles = 0
        self.loads = 0
        self.late = 0

    def peek(self, unit: CompileUnit) -> Callable | None:
        """The unit's kernel if it is there; never makes it."""
        return self._kernels.get(unit)

    def failed(self, unit: CompileUnit) -> str | None:
        """What was said when the unit could not be made; None when it could, or has not been tried."""
        return self._failed.get(unit)

    def get(self, unit: CompileUnit) -> Callable:
        """The unit's kernel, made now if need be. Raises CompileError, the first time from the compiler's error."""
        kernel = self.peek(unit)
        if kernel is not None:
            return kernel
        with self._lock:
            kernel = self.peek(unit)
            if kernel is not None:
                return kernel
            if unit in self._failed:
                raise CompileError(self._failed[unit])
            try:
                made = self._make(unit)
            except Exception as error:  # the DSL raises many types; all of them mean: this kernel is not to be had
                self.compiles += 1
                if len(self._failed) >= self._limit:
                    del self._failed[next(iter(self._failed))]
                # Only the text is kept: an exception keeps its callers' frames, and the tensors in them, alive.
                self._failed[unit] = f"{unit.kernel} for {unit.target} did not compile ({unit.spec}): {error}"
                _LOG.warning("%s; its GEMMs fall back", self._failed[unit])
                raise CompileError(self._failed[unit]) from error
            if made.compiled:
                self.compiles += 1
            else:
                self.loads += 1
            self._kernels[unit] = made.kernel
            return made.kernel

    def clear(self) -> None:
        """Forgets every unit. Kernels that are in use stay alive with their users."""
        with self._lock:
            self._kernels.clear()
            self._failed.clear()
