"""Running a decision: the checks that depend on one call's tensors, the compile, the launch. Needs torch.

The plan of a shape is made once; a call then checks its own tensors, looks the token count up and launches. Whatever
is not servable comes back as a ``Refusal`` and the caller runs its own GEMM.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable

import torch

from . import settings as settings_module
from .arch import arch_of_capability, device_properties
from .dispatch import (
    TABLE_DTYPE,
    Plan,
    PlanEntry,
    device_refusal,
    disabled_refusal,
    entry_refusal,
    missing_packages_refusal,
    plan_for,
    shape_refusal,
)
from .kernels.compile_cache import CompileCache, CompileError, CompileUnit, Made
from .kernels.compiling import make, make_all, store_in
from .kernels.registry import is_foreign, layout_refusal
from .operands import Reason, Refusal, aliasing_problem, check_operands
from .ready import READY, run_ready
from .tables import TableError

_LOG = logging.getLogger("lowlat_gemm")

#: Seconds between two lines of the log while kernels are made.
TELL_EVERY_S = 5.0
#: Subclasses (fake, distributed, quantized tensors) mean something else by their storage.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_TABLE_DTYPE = getattr(torch, TABLE_DTYPE)


def _make(unit: CompileUnit) -> Made:
    return make(unit, store_in(settings_module.current().cache_dir))


#: The process's kernels.
COMPILE_CACHE = CompileCache(_make)


class LoggedProgress:
    """Tells the log now and then how many kernels are made, where it takes long: a server's start says what it waits for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._said = clock, clock()

    def __call__(self, done: int, total: int) -> None:
        if done < total and self._clock() - self._said >= TELL_EVERY_S:
            self._said = self._clock()
            _LOG.info("%d of %d kernels are made", done, total)


def compile_ahead(
    units: Iterable[CompileUnit], progress: Callable[[int, int], None] | None = None
) -> dict[CompileUnit, str]:
    """Makes ``units`` before anything is served, in several processes where that pays; returns what failed, and why.

    ``progress(done, total)``: by default the log is told. While the current stream is captured, another package's kernels
    are among what failed, and can be made later.
    """
    units, refused = list(units), {}
    if any(map(is_foreign, units)) and torch.cuda.is_current_stream_capturing():
        refused = {unit: f"{unit.kernel} cannot be prepared in a CUDA graph capture" for unit in filter(is_foreign, units)}
    made = [unit for unit in units if unit not in refused]
    store = store_in(settings_module.current().cache_dir)
    return refused | make_all(made, COMPILE_CACHE, store, progress=progress or LoggedProgress())


class NotCompiledError(RuntimeError):
    """A launch would have to compile: in strict mode at any time, for what cannot fall back in a CUDA graph capture."""


def compiled_for(entry: PlanEntry, ordinal: int):
    """The compiled kernel of a plan entry for a launch on CUDA device ``ordinal``, or the Refusal that it cannot be had.

    A kernel that is not made yet counts in ``COMPILE_CACHE.late``. Outside of capture it is made now; raises
    NotCompiledError if strict.
    """
    compiled = COMPILE_CACHE.peek(entry.unit)
    if compiled is not None:
        return compiled
    refusal = missing_packages_refusal()
    if refusal is not None:
        return refusal
    failed = COMPILE_CACHE.failed(entry.unit)
    if failed is not None:
        return Refusal(Reason.BACKEND_UNAVAILABLE, failed.splitlines()[0])
    COMPILE_CACHE.late += 1
    detail = f"{entry.unit.kernel} at M = {entry.m} was not compiled before"
    if settings_module.current().strict:
        raise NotCompiledError(f"{detail} its launch: warm it up (request_low_latency_warmup) first")
    with torch.cuda.device(ordinal):
        if torch.cuda.is_current_stream_capturing():
            return Refusal(Reason.CAPTURE, detail)
    try:
        return COMPILE_CACHE.get(entry.unit)
    except CompileError as error:
        return Refusal(Reason.BACKEND_UNAVAILABLE, str(error).splitlines()[0])


def _row_refusal(plan: Plan, ordinal: int, residual: bool) -> Refusal | None:
    """Why a plan's kernels, with or without residual, cannot all be had: in batch-invariant mode none serves then.

    One that is missing would leave its M to another GEMM. So the first call asks for all of them (``compiled_for``).
    """
    for entry in plan.distinct[residual]:
        compiled = compiled_for(entry, ordinal)
        if isinstance(compiled, Refusal):
            return compiled
    return None


def kernels_of(units: Iterable[CompileUnit]) -> list[Callable]:
    """The compiled kernels of ``units``, for a caller that asked for them and has nothing to fall back to.

    Raises ImportError naming missing packages, NotCompiledError where one would have to be compiled while the current
    stream is captured (it counts in ``COMPILE_CACHE.late``), CompileError where one does not compile.
    """
    units = list(units)
    missing = [unit for unit in units if COMPILE_CACHE.peek(unit) is None]
    if missing:
        refusal = missing_packages_refusal()
        if refusal is not None:
            raise ImportError(str(refusal))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            COMPILE_CACHE.late += len(missing)
            raise NotCompiledError(f"{missing[0].kernel} is not compiled: prepare it before graph capture begins")
        problems = compile_ahead(missing)
        if problems:
            raise CompileError("; ".join(problems.values()))
    return [COMPILE_CACHE.get(unit) for unit in units]


def launch(compiled, x, weight, residual=None, y=None):
    """Launches on x's device and torch's current stream there; returns ``y`` [M, N], a new one of x's dtype by default.

    The operands must have passed ``check_operands``; rows of a given ``y`` have unit stride and any pitch. It may be
    the residual itself; ValueError where it shares memory with an operand otherwise.
    """
    if y is None:
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    else:
        problem = aliasing_problem(y, x, weight, residual)
        if problem is not None:
            raise ValueError(problem)
    if x.shape[0] == 1 and x.stride(0) != x.shape[1]:
        # The stride of a single row means nothing, but a tensor map has rules for it.
        x = x.as_strided(x.shape, (x.shape[1], 1))
    index = x.device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch.cuda.current_device():
        compiled(x, weight, residual, y, stream)
    else:
        with torch.cuda.device(index):
            compiled(x, weight, residual, y, stream)
    return y


@functools.lru_cache(maxsize=4096)
def _device_plan(ordinal: int, n: int, k: int, names: tuple[str, ...] | None, settings) -> Plan | Refusal:
    """The plan for a shape on one CUDA device, or why that device has none. ``settings`` is part of the key."""
    device = device_properties(ordinal)
    arch = arch_of_capability(device.capability)
    if arch is None:
        return Refusal(Reason.CAPABILITY, str(device))
    try:
        plan = plan_for(arch, n, k, names)
    except TableError as error:  # a damaged installation must not take a server down
        _LOG.error("%s; shapes that it may have fall back", error)
        return Refusal(Reason.TABLE, str(error))
    if plan is None:
        return shape_refusal(arch, n, k)
    return device_refusal(plan, device) or plan.on(ordinal)


def device_plan(ordinal: int, n: int, k: int, names: tuple[str, ...] | None = None) -> Plan | Refusal:
    """The plan for a shape on CUDA device ``ordinal`` under the current settings, or the Refusal."""
    return disabled_refusal() or _device_plan(ordinal, n, k, names, settings_module.current())


def context_refusal() -> Refusal | None:
    """Why nothing can be launched from here, whatever the tensors: somebody is watching or rewriting operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return Refusal(Reason.TRACING)
    if torch._C._len_torch_dispatch_stack():
        return Refusal(Reason.TRACING, "a dispatch mode is active")
    if torch._C._are_functorch_transforms_active():
        return Refusal(Reason.TRACING, "inside a function transform")
    if torch.autograd.forward_ad._current_level >= 0:
        return Refusal(Reason.AUTOGRAD, "inside forward-mode differentiation")
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != _TABLE_DTYPE:
        return Refusal(Reason.DTYPE, f"autocast to {torch.get_autocast_dtype('cuda')}")
    return None


def tensor_refusal(tensor) -> Refusal | None:
    """Why this is not a plain strided tensor, or None."""
    if type(tensor) not in _PLAIN_TYPES:
        return Refusal(Reason.TENSOR_TYPE, type(tensor).__name__)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return Refusal(Reason.TENSOR_TYPE, "nested" if tensor.is_nested else str(tensor.layout))
    return None


def operand_refusal(x, weight, residual=None) -> Refusal | None:
    """What of one call's tensors, which are plain ones, is not servable by any plan, or None."""
    if x.device.type != "cuda":
        return Refusal(Reason.CAPABILITY, f"x is on {x.device}")
    refusal = check_operands(x, weight, residual)
    if refusal is not None:
        return refusal
    if x.dtype != _TABLE_DTYPE:
        return Refusal(Reason.DTYPE, f"{x.dtype}; the table is for {_TABLE_DTYPE}")
    tensors = (x, weight) if residual is None else (x, weight, residual)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return Refusal(Reason.AUTOGRAD, "call under torch.inference_mode() or torch.no_grad()")
    return None


def run_or_refuse(x, weight, residual=None, names: tuple[str, ...] | None = None):
    """y [M, N] from the selected kernel, or the Refusal. Raises NotCompiledError in strict mode alone.

    ``names``: families to look in, None for all.
    """
    settings = settings_module.current()
    refusal = context_refusal() or tensor_refusal(x) or tensor_refusal(weight)
    if refusal is None and residual is not None:
        refusal = tensor_refusal(residual)
    refusal = refusal or operand_refusal(x, weight, residual)
    if refusal is not None:
        return refusal
    m, (n, k) = x.shape[0], weight.shape
    plan = device_plan(x.device.index, n, k, names)
    if isinstance(plan, Refusal):
        return plan
    refusal = entry_refusal(plan, m, residual is not None)
    if refusal is not None:
        return refusal
    refusal = _row_refusal(plan, x.device.index, residual is not None) if plan.every_m else None
    if refusal is not None:
        return refusal
    entry = plan.entry(m, residual is not None)
    compiled = _kernel_for(entry, x, weight)
    if isinstance(compiled, Refusal) and entry.otherwise is not None and entry.otherwise.refusal is None:
        log_refusal(x, weight, compiled, f"goes to {entry.otherwise.cell.backend}, not {entry.cell.backend}")
        compiled = _kernel_for(entry.otherwise, x, weight)
    if isinstance(compiled, Refusal):
        return compiled
    # The short way asks for nothing that a backend asks for besides.
    if residual is None and not is_foreign(entry.unit):
        READY.add(settings, names, x.device, n, k, m, compiled)
    return launch(compiled, x, weight, residual)


def _kernel_for(entry: PlanEntry, x, weight):
    """The compiled kernel of an entry that can run for one call's operands, or the Refusal."""
    return layout_refusal(entry.unit, x, weight) or compiled_for(entry, x.device.index)


def try_low_latency_gemm(x, weight, residual=None):
    """y = x @ weight.T (+ residual) by the kernel that the tables name, or None: the caller runs its own GEMM.

    x: [M, K], weight: [N, K], residual: [M, N] or None, all BF16 on one CUDA device; y: [M, N] BF16, packed. Never
    raises for unsupported input (in strict mode a launch that would compile raises NotCompiledError). The reason for
    falling back is in the debug log of "lowlat_gemm", once per shape, M and reason.
    """
    if residual is None:
        y = run_ready(x, weight)
        if y is not None:
            return y
    result = run_or_refuse(x, weight, residual)
    if type(result) is Refusal:
        log_refusal(x, weight, result)
        return None
    return result


def log_refusal(x, weight, refusal: Refusal, what: str = "falls back") -> None:
    """Puts a fall back into the debug log, once per shape, M and reason. ``what``: what the call does instead."""
    if _LOG.isEnabledFor(logging.DEBUG):
        _log_once(tuple(getattr(x, "shape", ())), tuple(getattr(weight, "shape", ())), what, refusal)


@functools.lru_cache(maxsize=4096)
def _log_once(x_shape, weight_shape, what: str, refusal: Refusal) -> None:
    _LOG.debug("x %s, weight %s %s: %s", x_shape, weight_shape, what, refusal)
