"""``lowlat check``: the projections of a model through the dispatcher, every cell judged against FP64.

On a GPU a cell that the plan can run must run on its kernel and be right; a cell that it refuses must be refused at
the call as well. Without a GPU of the generation the same routing is followed on paper and the result is that of the
framework's own GEMM on the CPU, judged by the same bound: that proves routing and the oracle, nothing about kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lowlat_gemm.arch import Arch
from lowlat_gemm.dispatch import Decision, explain, plan_for
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.operands import Reason, Refusal
from lowlat_gemm.reference import parity, reference_gemm

from .environment import Gpu
from .record import CellResult, Status

#: Tokens that a check covers: where the public tables end.
TOKENS = range(1, 17)


@dataclass(frozen=True)
class Shape:
    """A local (N, K) of the model, with the projections and TP sizes that have it."""

    n: int
    k: int
    names: tuple[str, ...]

    @property
    def elements(self) -> int:
        return self.n * self.k


def model_shapes(model: str, tps: Iterable[int]) -> list[Shape]:
    """Every distinct local (N, K) of ``model`` at the TP sizes ``tps``. ValueError for an unknown model or bad TP."""
    names: dict[tuple[int, int], list[str]] = {}
    for tp in tps:
        for projection in projection_shapes(model, tp):
            names.setdefault((projection.n, projection.k), []).append(f"{projection.name} tp{tp}")
    return [Shape(n, k, tuple(found)) for (n, k), found in names.items()]


def with_names(shapes: Iterable[Shape], model: str) -> list[Shape]:
    """``shapes``, those that ``model`` has at a usual TP size under the names of all its projections that are of it."""
    names: dict[tuple[int, int], tuple[str, ...]] = {}
    for tp in (8, 4, 16, 2, 1):
        with contextlib.suppress(ValueError):  # not every size divides every model
            for shape in model_shapes(model, (tp,)):
                names[shape.n, shape.k] = (*names.get((shape.n, shape.k), ()), *shape.names)
    return [replace(shape, names=names.get((shape.n, shape.k), shape.names)) for shape in shapes]


class _Operands:
    """One shape's random operands and FP64 references for the largest M; fewer tokens are its first rows."""

    def __init__(self, shape: Shape, tokens: int, device: str, seed: int):
        import torch

        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=device).bfloat16()

        # In slices: an LM head in FP32 would need twice the memory of everything else.
        self.weight = torch.empty(shape.n, shape.k, dtype=torch.bfloat16, device=device)
        for rows in self.weight.split(4096):
            rows.copy_(normal(*rows.shape))
        self.x, self.residual = normal(tokens, shape.k), normal(tokens, shape.n)
        self.plain = reference_gemm(self.x, self.weight)
        self.added = self.plain.plus(self.residual)

    @functools.cached_property
    def framework_result(self):
        """The framework's own GEMM, without residual: added afterwards it would be rounded twice."""
        import torch.nn.functional as F

        return F.linear(self.x, self.weight)


def _judged(result, status: Status, reason: str | None, report) -> CellResult:
    return result(status, reason=reason, worst_ulps=report.worst_ulps, worst_share=report.worst_share)


class _ShapeCheck:
    """The cells of one shape; operands are made when the first cell needs them."""

    def __init__(self, shape: Shape, tokens: Sequence[int], gpu: Gpu | None, seed: int):
        self.shape, self.tokens, self.gpu, self.seed = shape, tokens, gpu, seed

    @functools.cached_property
    def operands(self) -> _Operands:
        device = "cpu" if self.gpu is None else f"cuda:{self.gpu.ordinal}"
        return _Operands(self.shape, max(self.tokens), device, self.seed)

    def cell(self, arch: Arch, m: int, residual: bool) -> CellResult | None:
        """The result of one cell; None for a residual that the table row does not speak of."""
        on_device = self.gpu is not None
        decision = explain(m, self.shape.n, self.shape.k, arch=None if on_device else arch, has_residual=residual)
        if residual and decision.backend is None:
            return None  # no gap: callers add the residual themselves
        result = functools.partial(
            CellResult, arch.name, self.shape.n, self.shape.k, m, residual,
            family=decision.family,
            backend=decision.backend,
            config=dict(decision.config),
            provenance=None if decision.provenance is None else decision.provenance.kind,
        )  # fmt: skip
        if on_device:
            return self._on_device(decision, result)
        # On paper a missing kernel package changes nothing: routing does not need it.
        if decision.runs or decision.refusal.reason is Reason.BACKEND_UNAVAILABLE:
            report = parity(self.operands.framework_result[:m], self.operands.plain.rows(m))
            if report.ok:
                return _judged(result, Status.REFERENCE, f"no {arch} GPU here", report)
            return _judged(result, Status.FAILED, str(report), report)
        return self._refused(decision, result)

    def _refused(self, decision: Decision, result) -> CellResult:
        not_built = decision.refusal.reason is Reason.BACKEND_NOT_BUILT
        return result(Status.NOT_BUILT if not_built else Status.FALLBACK, reason=str(decision.refusal))

    def _on_device(self, decision: Decision, result) -> CellResult:
        import torch

        from lowlat_gemm.execute import run_or_refuse

        operands, m = self.operands, decision.num_tokens
        residual = operands.residual[:m] if decision.has_residual else None
        # The block that y will get holds NaN: what a kernel leaves unwritten must not look right.
        torch.full_like(operands.residual[:m], float("nan"))
        y = run_or_refuse(operands.x[:m], operands.weight, residual)
        if isinstance(y, Refusal):
            if decision.runs:
                return result(Status.FAILED, reason=f"explain said {decision.backend}, the call fell back: {y}")
            return self._refused(decision, result)
        if not decision.runs:
            return result(Status.FAILED, reason=f"explain said {decision.refusal}, the call ran a kernel")
        report = parity(y, (operands.added if decision.has_residual else operands.plain).rows(m))
        status = Status.KERNEL if report.ok else Status.FAILED
        return _judged(result, status, None if report.ok else str(report), report)


def check_shape(
    shape: Shape, arches: Sequence[Arch], gpu: Gpu | None, seed: int, tokens: Sequence[int] = TOKENS
) -> list[CellResult]:
    """Every cell of one shape on ``arches``; with ``gpu``, whose generation ``arches`` must be, on that device.

    ``seed``: of the random operands.
    """
    check = _ShapeCheck(shape, tokens, gpu, seed)
    cells = [check.cell(arch, m, residual) for arch in arches for residual in (False, True) for m in tokens]
    return [cell for cell in cells if cell is not None]


def run_check(
    shapes: Sequence[Shape],
    arches: Sequence[Arch],
    gpu: Gpu | None,
    seed: int,
    progress: Callable[[Shape, int], None] = lambda shape, done: None,
) -> list[CellResult]:
    """``check_shape`` over ``shapes``; ``progress`` is told before each and how many elements are behind."""
    results, done = [], 0
    with _current_device(gpu):
        if gpu is not None:
            _compile_ahead(shapes, gpu)
        for shape in shapes:
            progress(shape, done)
            results += check_shape(shape, arches, gpu, seed)
            done += shape.elements
    return results


def _compile_ahead(shapes: Sequence[Shape], gpu: Gpu) -> None:
    """Compiles what the shapes can launch, in several processes; what does not compile is said by its cell."""
    from lowlat_gemm.execute import compile_ahead

    plans = (plan_for(gpu.arch, shape.n, shape.k) for shape in shapes)
    compile_ahead(unit for plan in plans if plan is not None for unit in plan.on(gpu.ordinal).units())


def _current_device(gpu: Gpu | None):
    """Makes ``gpu`` the device that ``explain`` is asked about."""
    if gpu is None:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.device(gpu.ordinal)
