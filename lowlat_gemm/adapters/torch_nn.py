"""Plain ``torch.nn.Linear`` models: those linears that have a plan get a forward that uses it.

``enable_low_latency_gemm(model, torch.bfloat16)`` installs, ``disable_low_latency_gemm(model)`` undoes. Both may be
called again. A taken module changes its class, to a subclass of Linear with another forward, and nothing else: it
keeps its weight, hooks, name and state dict, and can be copied, pickled and replicated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import settings
from ..dispatch import Plan, entry_refusal, family_names, missing_packages_refusal
from ..execute import (
    compile_ahead,
    compiled_for,
    context_refusal,
    device_plan,
    launch,
    log_refusal,
    operand_refusal,
    tensor_refusal,
)
from ..operands import Reason, Refusal, check_weight
from ..ready import READY, run_ready

_LOG = logging.getLogger("lowlat_gemm")


class PlannedLinear(torch.nn.Linear):
    """A Linear that runs through its plan where plan and input allow it, and is a Linear otherwise.

    It holds no pointer: the weight is read at each call, so a replaced or reloaded one is used as it is, or falls
    back. Made by ``enable_low_latency_gemm`` alone.
    """

    #: Families to look in, None for all. Set by the install.
    lowlat_tables: tuple[str, ...] | None = None
    #: (what the plan depends on, the plan or why there is none); resolved at the first call.
    _lowlat_resolved: tuple[tuple, Plan | Refusal] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameters = self._parameters  # an attribute of a module costs ten times a look into the dictionary behind it
        weight = parameters.get("weight")
        if weight is not None and parameters.get("bias", weight) is None and "weight" not in self.__dict__:
            y = run_ready(input, weight, self.lowlat_tables, flatten=True)
            if y is not None:
                return y
        y = self.run_or_refuse(input)
        if type(y) is not Refusal:
            return y
        if y.reason is not Reason.TRACING:  # a compiler would trace the logging too
            log_refusal(input, self.weight, y)
        return super().forward(input)

    def __getstate__(self):
        # A plan belongs to the GPU of this process; copies resolve their own.
        return {key: value for key, value in self.__dict__.items() if key != "_lowlat_resolved"}

    def __prepare_scriptable__(self) -> torch.nn.Linear:
        # torch.jit.script takes this in our place: its language has no plans.
        linear = torch.nn.Linear.__new__(torch.nn.Linear)
        linear.__dict__.update(self.__getstate__())
        return linear

    def plan(self) -> Plan | Refusal:
        """The plan of the weight as it is now, where it is now, under the settings of now; or why there is none."""
        weight = self.weight
        key = (settings.current(), weight.device, weight.shape)
        if self._lowlat_resolved is None or self._lowlat_resolved[0] != key:
            if weight.device.type != "cuda":
                plan = Refusal(Reason.CAPABILITY, f"the weight is on {weight.device}")
            elif weight.dim() != 2:
                plan = Refusal(Reason.WEIGHT_LAYOUT, f"weight has {weight.dim()} dimensions")
            else:
                plan = device_plan(weight.device.index, *weight.shape, self.lowlat_tables)
            self._lowlat_resolved = (key, plan)
        return self._lowlat_resolved[1]

    def run_or_refuse(self, x: torch.Tensor) -> torch.Tensor | Refusal:
        """y, or why the module's own GEMM must run. Leading dimensions of x count as tokens."""
        refusal = context_refusal() or tensor_refusal(x) or tensor_refusal(self.weight)
        if refusal is not None:
            return refusal
        if self.bias is not None:
            return Refusal(Reason.BIAS)
        plan = self.plan()
        if type(plan) is Refusal:
            return plan
        n, k = plan.spec.n, plan.spec.k
        if x.dim() < 1 or x.shape[-1] != k:
            return Refusal(Reason.K_MISMATCH, f"x is {tuple(x.shape)}, weight has K = {k}")
        m = x.numel() // k
        refusal = entry_refusal(plan, m, False)
        if refusal is not None:
            return refusal
        rows = x if x.dim() == 2 else x.reshape(m, k)
        refusal = operand_refusal(rows, self.weight)
        if refusal is not None:
            return refusal
        compiled = compiled_for(plan.entry(m, False), x.device.index)
        if type(compiled) is Refusal:
            return compiled
        READY.add(self.lowlat_tables, x.device, n, k, m, compiled)
        y = launch(compiled, rows, self.weight)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


@dataclass(frozen=True)
class InstallReport:
    """What ``enable_low_latency_gemm`` did: module names that run through plans, and why each other linear does not."""

    installed: tuple[str, ...] = ()
    skipped: dict[str, Refusal] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"lowlat_gemm: {len(self.installed)} linears installed, {len(self.skipped)} left alone"]
        lines += [f"  {name}: {refusal}" for name, refusal in self.skipped.items()]
        return "\n".join(lines)


def _tied_weights(module: torch.nn.Module) -> set[int]:
    """Ids of parameters that more than one module owns (tied embeddings): those are left alone."""
    owners: dict[int, int] = {}
    for submodule in module.modules():
        for parameter in submodule._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def enable_low_latency_gemm(
    module: torch.nn.Module, dtype: torch.dtype, tables: str | Sequence[str] | None = None
) -> InstallReport:
    """Installs plans into the ``torch.nn.Linear`` modules below ``module`` (itself included).

    Taken are exact ``torch.nn.Linear`` (no subclass) without bias, with an untied ``dtype`` weight on a CUDA device
    whose shape is in one of ``tables`` (family names; all by default). Only BF16 has tables. Kernels of the taken
    modules are compiled here, so that nothing compiles while serving. Called again it brings every linear up to date,
    also those that may no longer be taken. Raises ValueError for an unknown family. Returns what was done.
    """
    names = family_names(tables)
    tied = _tied_weights(module)
    installed, skipped, plans = [], {}, []
    for name, submodule in module.named_modules():
        if not isinstance(submodule, torch.nn.Linear):
            continue
        _undo(submodule)
        plan = _plan_or_refusal(submodule, dtype, names, tied)
        if isinstance(plan, Refusal):
            skipped[name] = plan
            continue
        submodule.__class__ = PlannedLinear
        submodule.lowlat_tables = names
        plans.append(plan)
        installed.append(name)
    if missing_packages_refusal() is None:
        compile_ahead(unit for plan in plans for unit in plan.units(residual=False))
    report = InstallReport(tuple(installed), skipped)
    _LOG.info("%d linears installed, %d left alone", len(installed), len(skipped))
    _LOG.debug("%s", report)
    return report


def _plan_or_refusal(linear, dtype, names, tied: set[int]) -> Plan | Refusal:
    weight = linear.weight
    if type(linear) is not torch.nn.Linear:
        return Refusal(Reason.TENSOR_TYPE, f"{type(linear).__name__} is a subclass of Linear")
    if "forward" in linear.__dict__:
        return Refusal(Reason.TENSOR_TYPE, "its forward has been replaced by somebody else")
    if linear.bias is not None:
        return Refusal(Reason.BIAS)
    if id(weight) in tied:
        return Refusal(Reason.WEIGHT_LAYOUT, "the weight is tied to another module")
    refusal = tensor_refusal(weight)
    if refusal is not None:
        return refusal
    if dtype != torch.bfloat16 or weight.dtype != dtype:
        return Refusal(Reason.DTYPE, f"weight is {weight.dtype}, asked for {dtype}; the tables are for bfloat16")
    if weight.device.type != "cuda":
        return Refusal(Reason.CAPABILITY, f"the weight is on {weight.device}")
    refusal = check_weight(weight)
    if refusal is not None:
        return refusal
    plan = device_plan(weight.device.index, *weight.shape, names)
    if isinstance(plan, Refusal) or plan.units(residual=False):
        return plan
    return next(entry.refusal for entry in plan.entries.values())  # nothing of the row can run: leave it alone


def _undo(module: torch.nn.Module) -> bool:
    if type(module) is not PlannedLinear:
        return False
    module.__class__ = torch.nn.Linear
    for name in ("lowlat_tables", "_lowlat_resolved"):
        module.__dict__.pop(name, None)
    return True


def disable_low_latency_gemm(module: torch.nn.Module) -> int:
    """Makes every linear below ``module`` a plain one again; returns how many had a plan."""
    return sum(_undo(submodule) for submodule in module.modules())
