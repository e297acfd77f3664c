"""From a local (N, K) and a token count to a decision: tables, operand contract, settings and kernels meet here.

Decisions are made from (N, K), M and the GPU generation alone; module names play no role. Nothing in this file needs
torch or cutlass: what runs a decision is ``execute.py``.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import settings as settings_module
from .arch import Arch, DeviceProperties, resolve_arch
from .kernels.compile_cache import CompileUnit
from .kernels.registry import backend, built_backends, is_foreign, missing_packages, on_device
from .kernels.wheels import mixed_wheels
from .operands import Reason, Refusal
from .settings import Settings
from .tables import Cell, ProjectionSpec, Table, available_tables, load_table

_LOG = logging.getLogger("lowlat_gemm")

#: The dtype that tables are about until a table says otherwise.
TABLE_DTYPE = "bfloat16"


@dataclass(frozen=True)
class PlanEntry:
    """What one (M, residual) of a plan comes to. ``refusal`` None: ``unit`` is what to compile and launch.

    ``otherwise``: of an optional cell's entry, the one of the row's own cell, for calls that the first does not take.
    ``passed_over``: of a row's own cell, the refused entry of the optional cell that would have come before it.
    """

    m: int
    residual: bool
    cell: Cell
    config: Any = None
    unit: CompileUnit | None = None
    refusal: Refusal | None = None
    otherwise: PlanEntry | None = None
    passed_over: PlanEntry | None = None

    def units(self) -> list[CompileUnit]:
        """What it can launch: nothing where it is refused, two units where a second cell stands behind the first."""
        ours = [] if self.refusal is not None else [self.unit]
        return ours if self.otherwise is None else [*ours, *self.otherwise.units()]

    def on(self, ordinal: int) -> PlanEntry:
        """The entry for CUDA device ``ordinal``."""
        otherwise = None if self.otherwise is None else self.otherwise.on(ordinal)
        unit = None if self.unit is None else on_device(self.unit, ordinal)
        return replace(self, unit=unit, otherwise=otherwise)


@dataclass(frozen=True)
class Plan:
    """The static part of dispatch for one local (N, K) on one generation.

    ``entries`` and ``residual_entries`` hold every cell of the table row by M, refused ones included.
    ``invariant``: whether, without and with residual, one kernel with one order of accumulation serves every M of the
    row. ``every_m``: batch-invariant mode, in which such a row serves every other M as well, the large ones too.
    """

    arch: Arch
    table: Table
    spec: ProjectionSpec
    invariant: tuple[bool, bool]
    every_m: bool
    entries: Mapping[int, PlanEntry]
    residual_entries: Mapping[int, PlanEntry]

    def entry(self, m: int, residual: bool) -> PlanEntry | None:
        """The entry that serves ``m`` tokens; in batch-invariant mode also one that the table names for another M."""
        entries = self.residual_entries if residual else self.entries
        found = entries.get(m)
        if found is None and self.every_m and self.invariant[residual] and m >= 1:
            found = entries[min((other for other in entries if other > m), default=max(entries))]
        return found

    def units(self, *, residual: bool = True) -> list[CompileUnit]:
        """Everything that the plan can launch, each once; without ``residual``, leaving out that epilogue."""
        entries = [*self.entries.values(), *(self.residual_entries.values() if residual else ())]
        return list(dict.fromkeys(unit for entry in entries for unit in entry.units()))

    @functools.cached_property
    def distinct(self) -> tuple[list[PlanEntry], list[PlanEntry]]:
        """Without and with residual: of the entries that run, one for each unit."""
        both = self.entries, self.residual_entries
        found = [{entry.unit: entry for entry in one.values() if entry.refusal is None} for one in both]
        return list(found[0].values()), list(found[1].values())

    def on(self, ordinal: int) -> Plan:
        """The plan for CUDA device ``ordinal``: the same one unless it has another package's kernels."""
        if not any(is_foreign(unit) for unit in self.units()):
            return self
        both = ({m: entry.on(ordinal) for m, entry in one.items()} for one in (self.entries, self.residual_entries))
        entries, residual_entries = both
        return replace(self, entries=entries, residual_entries=residual_entries)


@dataclass(frozen=True)
class Decision:
    """What ``explain`` answers. ``backend`` is the table's; it runs only where ``refusal`` is None."""

    num_tokens: int
    n: int
    k: int
    has_residual: bool
    arch: str | None
    refusal: Refusal | None
    family: str | None = None
    label: str | None = None
    measured_on: str | None = None
    backend: str | None = None
    config: Mapping[str, int | str] = field(default_factory=dict)
    provenance: Any = None
    batch_invariant: bool = False
    #: the optional cell that would have served here, and why it does not
    passed_over: tuple[Cell, Refusal] | None = None
    #: where the decision is an optional cell: the backend of the row's own cell, for calls that the first does not take
    otherwise: str | None = None

    @property
    def runs(self) -> bool:
        return self.refusal is None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "n": self.n,
            "k": self.k,
            "has_residual": self.has_residual,
            "arch": self.arch,
            "runs": self.runs,
            "reason": None if self.refusal is None else self.refusal.reason.value,
            "detail": None if self.refusal is None else self.refusal.detail,
            "family": self.family,
            "label": self.label,
            "measured_on": self.measured_on,
            "backend": self.backend,
            "config": dict(self.config),
            "provenance": None if self.provenance is None else self.provenance.to_json(),
            "batch_invariant": self.batch_invariant,
            "otherwise": self.otherwise,
            "passed_over": None if self.passed_over is None else _passed_over_json(*self.passed_over),
        }

    def __str__(self) -> str:
        residual = " + residual" if self.has_residual else ""
        lines = [f"M={self.num_tokens} N={self.n} K={self.k}{residual} on {self.arch or 'an unlisted device'}"]
        if self.family is not None:
            lines.append(f"  row         {self.family}/{self.arch}: {self.label or 'unnamed'} (table for {self.measured_on})")
        if self.backend is not None:
            config = _config_text(self.config)
            lines.append(f"  cell        {self.backend}" + (f" ({config})" if config else ""))
            lines.append(f"  provenance  {self.provenance}")
            lines.append(f"  bits        {'the same' if self.batch_invariant else 'may differ'} over M")
        if self.passed_over is not None:
            cell, refusal = self.passed_over
            lines.append(f"  passed over {cell.backend} ({_config_text(cell.config)}), {cell.provenance}: {refusal}")
        if self.otherwise is not None:
            lines.append(f"  else        {self.otherwise}, for calls that {self.backend} does not take")
        lines.append(f"  decision    {self.backend}" if self.runs else f"  decision    falls back: {self.refusal}")
        return "\n".join(lines)


def _config_text(config: Mapping[str, int | str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in config.items())


def _passed_over_json(cell: Cell, refusal: Refusal) -> dict[str, Any]:
    return {
        "backend": cell.backend,
        "config": dict(cell.config),
        "provenance": cell.provenance.to_json(),
        "reason": refusal.reason.value,
        "detail": refusal.detail,
    }


def families() -> tuple[str, ...]:
    """The model families that have a table, in the order in which they are asked for a shape."""
    return tuple(dict.fromkeys(family for family, _ in available_tables()))


def family_names(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The families that a ``tables`` or ``names`` argument means; None for all. ValueError for an unknown one."""
    if names is None:
        return None
    wanted, known = (names,) if isinstance(names, str) else tuple(names), families()
    for name in wanted:
        if name not in known:
            raise ValueError(f"no tables of family {name!r}: known are {', '.join(known)}")
    return wanted


def _row(arch: Arch, n: int, k: int, names: Sequence[str]) -> tuple[Table, ProjectionSpec] | None:
    """The first table of ``names`` with a row for (n, k) on ``arch``."""
    shipped = available_tables()
    for family in names:
        if (family, arch.name) in shipped:
            table = load_table(family, arch)
            spec = table.projections.get((n, k))
            if spec is not None:
                return table, spec
    return None


def select_kimi_k3_backend(
    num_tokens: int, n: int, k: int, *, has_residual: bool = False, arch: str | Arch | None = None
) -> str | None:
    """The backend that the Kimi-K3 table names for a local (N, K) at ``num_tokens``, or None to fall back.

    None as well for ``has_residual`` where the row has no residual config. The table alone answers, with what needs no
    other package: switches, optional cells, missing packages and backends that are not built yet are ``explain``'s
    business. ``arch``: a name, an ``Arch``, or None for
    the current CUDA device (without CUDA: SM103; on an unlisted device the answer is None). Raises ValueError for an
    unknown name.
    """
    found = resolve_arch(arch)
    row = None if found is None else _row(found, n, k, ("kimi_k3",))
    cell = None if row is None else row[0].cell(n, k, num_tokens, residual=has_residual)
    return None if cell is None else cell.backend


def _plan_entry(arch: Arch, spec: ProjectionSpec, m: int, residual: bool, cell: Cell, settings: Settings) -> PlanEntry:
    def refused(reason: Reason, detail: str) -> PlanEntry:
        return PlanEntry(m, residual, cell, refusal=Refusal(reason, detail))

    if settings.denied(cell.backend, spec.n, spec.k, m):
        return refused(Reason.DISABLED, "on the deny list")
    implementation = backend(cell.backend, arch)
    if implementation is None:
        return refused(Reason.BACKEND_NOT_BUILT, f"{cell.backend}; this build has {', '.join(built_backends(arch))}")
    problem = implementation.unavailable(arch)
    if problem is not None:
        return refused(Reason.BACKEND_UNAVAILABLE, problem)
    try:
        config = implementation.parse_config(cell.config)
        problem = implementation.why_not(arch, spec.n, spec.k, m, config, residual=residual)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        _warn_once(f"table row {spec.n}x{spec.k} for {arch}, M = {m}: {problem}; it falls back")
        return refused(Reason.CONFIG, problem)
    unit = implementation.compile_unit(arch, spec.n, spec.k, m, config, residual=residual)
    return PlanEntry(m, residual, cell, config, unit)


@functools.lru_cache(maxsize=4096)
def _warn_once(text: str) -> None:
    _LOG.warning("%s", text)


@functools.lru_cache(maxsize=4096)
def _plan(arch: Arch, n: int, k: int, names: tuple[str, ...], settings: Settings) -> Plan | None:
    row = _row(arch, n, k, names)
    if row is None:
        return None
    table, spec = row
    by_residual = [
        {m: _plan_entry(arch, spec, m, residual, cell, settings) for m, cell in sorted(cells.items())}
        for residual, cells in ((False, spec.cells), (True, spec.residual_cells))
    ]
    for m, cell in sorted(spec.optional_cells.items()):
        entry = _plan_entry(arch, spec, m, False, cell, settings)
        by_residual[0][m] = _preferred(entry, by_residual[0].get(m), settings)
    invariant = tuple(_is_invariant(arch, entries) for entries in by_residual)
    if settings.batch_invariant:
        # Served by one kernel for every M, the large ones too, or declined whole: never a mix.
        for entries, whole in zip(by_residual, invariant):
            if not whole:
                entries.update({m: _declined(entry) for m, entry in entries.items()})
    return Plan(arch, table, spec, invariant, settings.batch_invariant, *by_residual)


def _preferred(optional: PlanEntry, own: PlanEntry | None, settings: Settings) -> PlanEntry:
    """What serves where a row has an optional cell, and ``own`` from its other cells or None."""
    if settings.batch_invariant and optional.refusal is None:
        reason = Refusal(Reason.BATCH_INVARIANT, f"{optional.cell.backend} chooses for each M how it adds")
        optional = replace(optional, unit=None, refusal=reason)
    if optional.refusal is None:
        return replace(optional, otherwise=own)
    return optional if own is None else replace(own, passed_over=optional)


def _is_invariant(arch: Arch, entries: Mapping[int, PlanEntry]) -> bool:
    """Whether all entries run, and add in one order that does not depend on M."""
    orders = {
        None if entry.refusal is not None else backend(entry.cell.backend, arch).invariance(entry.config)
        for entry in entries.values()
    }
    return len(orders) == 1 and None not in orders


def _declined(entry: PlanEntry) -> PlanEntry:
    """The entry as batch-invariant mode has it in a row that is not: refused, for its own reason if it has one."""
    reason = Refusal(Reason.BATCH_INVARIANT, "the row's kernels do not add in one order at every M")
    return entry if entry.refusal is not None else replace(entry, unit=None, refusal=reason)


def plan_for(arch: Arch, n: int, k: int, names: tuple[str, ...] | None = None) -> Plan | None:
    """The plan of a local (N, K) under the current settings, or None where no table of ``names`` has the shape.

    ``names``: families to look in, all by default. Cached, also per settings: a changed deny list gives another plan.
    """
    return _plan(arch, n, k, families() if names is None else names, settings_module.current())


def disabled_refusal() -> Refusal | None:
    """The refusal of everything, when the user has switched the library off."""
    settings = settings_module.current()
    if not settings.disabled:
        return None
    return Refusal(Reason.DISABLED, settings.problem or "LOWLAT_GEMM_DISABLE is set")


def shape_refusal(arch: Arch, n: int, k: int) -> Refusal:
    """The refusal of a shape that no table of ``arch`` has."""
    return Refusal(Reason.SHAPE, f"{n}x{k} is in no table for {arch}")


def device_refusal(plan: Plan, device: DeviceProperties) -> Refusal | None:
    """Why a plan's table is not for this device, or None."""
    if settings_module.current().any_device:
        return None
    mismatch = plan.table.device.mismatch(device)
    return None if mismatch is None else Refusal(Reason.DEVICE_CLASS, f"{mismatch} (LOWLAT_GEMM_ANY_DEVICE=1 uses it)")


def entry_refusal(plan: Plan, m: int, residual: bool) -> Refusal | None:
    """Why the plan does not serve (m, residual), or None when its entry can run."""
    entry = plan.entry(m, residual)
    if entry is not None:
        return entry.refusal
    if residual and not plan.residual_entries:
        return Refusal(Reason.RESIDUAL, f"{plan.spec.n}x{plan.spec.k} has none on {plan.arch}")
    served = sorted(plan.residual_entries if residual else plan.entries)
    return Refusal(Reason.TOKENS, f"M = {m}; the row has M = {', '.join(map(str, served)) or 'none'}")


def missing_packages_refusal() -> Refusal | None:
    """Why no kernel at all can be compiled here, or None."""
    missing = missing_packages()
    problem = f"not installed: {', '.join(missing)}" if missing else mixed_wheels()
    return None if problem is None else Refusal(Reason.BACKEND_UNAVAILABLE, problem)


def explain(
    num_tokens: int,
    n: int,
    k: int,
    *,
    arch: str | Arch | None = None,
    has_residual: bool = False,
    dtype: str = TABLE_DTYPE,
    bias: bool = False,
    names: str | Sequence[str] | None = None,
) -> Decision:
    """The decision for a local (N, K) at ``num_tokens`` and why: the table row with its provenance, or the reason.

    ``arch=None`` asks for the current CUDA device, its device class included; a named generation is answered for the
    device class that its table was measured on. ``dtype`` is a torch dtype's name. ``names``: families to look in.
    What depends on the tensors of one call (strides, alignment, capture) is checked at the call; set the log level of
    "lowlat_gemm" to DEBUG to see it. Raises ValueError for an unknown arch or family.
    """
    num_tokens, n, k = map(_plain, (num_tokens, n, k))
    found = resolve_arch(arch)
    decision = functools.partial(
        Decision, num_tokens, n, k, has_residual, None if found is None else found.name
    )
    device = _current_device() if arch is None else None
    if found is None:
        return decision(disabled_refusal() or Refusal(Reason.CAPABILITY, str(device or "")))
    plan = plan_for(found, n, k, family_names(names))
    if plan is None:
        return decision(disabled_refusal() or shape_refusal(found, n, k))
    entry = plan.entry(num_tokens, has_residual)
    refusal = (
        disabled_refusal()
        or (None if device is None else device_refusal(plan, device))
        or (None if dtype == TABLE_DTYPE else Refusal(Reason.DTYPE, f"{dtype}; the table is for {TABLE_DTYPE}"))
        or (Refusal(Reason.BIAS) if bias else None)
        or entry_refusal(plan, num_tokens, has_residual)
        or missing_packages_refusal()
    )
    row = {"family": plan.table.family, "label": plan.spec.label, "measured_on": plan.table.device.name}
    if entry is None:
        return decision(refusal, **row)
    return decision(
        refusal,
        **row,
        backend=entry.cell.backend,
        config=entry.cell.config,
        provenance=entry.cell.provenance,
        batch_invariant=plan.invariant[has_residual],
        passed_over=None if entry.passed_over is None else (entry.passed_over.cell, entry.passed_over.refusal),
        otherwise=None if entry.otherwise is None else entry.otherwise.cell.backend,
    )


def _plain(value):
    """An integer of any kind (numpy's, say) as Python's own; anything else as it is, for no row has it."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def _current_device() -> DeviceProperties | None:
    """Properties of the current CUDA device, or None without CUDA or torch."""
    from .arch import device_properties

    try:
        import torch
    except ImportError:
        return None
    return device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
