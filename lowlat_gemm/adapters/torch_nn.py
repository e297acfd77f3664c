"""Plain ``torch.nn.Linear`` models: those linears that have a plan get a forward that uses it.

``enable_low_latency_gemm(model, torch.bfloat16)`` installs, ``disable_low_latency_gemm(model)`` undoes. Both may be
called again. A taken module changes its class, to a subclass of Linear with another forward, and nothing else: it
keeps its weight, hooks, name and state dict, and can be copied, pickled and replicated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..captures import is_stale, note_capture
from ..dispatch import Plan, family_names, missing_packages_refusal
from ..execute import compile_ahead, context_refusal, device_plan, log_refusal, tensor_refusal
from ..operands import Reason, Refusal, check_weight
from ..ready import run_ready
from ..torch_op import linear_or_refuse
from .methods import PlannedMethod
from .report import InstallReport, install_problem

_LOG = logging.getLogger("lowlat_gemm")


class PlannedLinear(torch.nn.Linear):
    """A Linear that runs through its plan where plan and input allow it, and is a Linear otherwise.

    It holds no pointer: the weight is read at each call, so a replaced or reloaded one is used as it is, or falls
    back. Made by ``enable_low_latency_gemm`` alone.
    """

    #: Families to look in, None for all. Set by the install.
    lowlat_tables: tuple[str, ...] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameters = self._parameters  # an attribute of a module costs ten times a look into the dictionary behind it
        weight = parameters.get("weight")
        if weight is not None and parameters.get("bias", weight) is None and "weight" not in self.__dict__:
            y = run_ready(input, weight, self.lowlat_tables, flatten=True)
            if y is not None:
                note_capture(self, weight)
                return y
        y = self.run_or_refuse(input)
        if type(y) is not Refusal:
            note_capture(self, self.weight)
            return y
        if y.reason is not Reason.TRACING:  # a compiler would trace the logging too
            log_refusal(input, self.weight, y)
        return super().forward(input)

    def stale(self) -> bool:
        """Whether a CUDA graph captured through this module reads a weight that it no longer has (``captures.py``)."""
        return is_stale(self)

    def __prepare_scriptable__(self) -> torch.nn.Linear:
        # torch.jit.script takes this in our place: its language has no plans.
        linear = torch.nn.Linear.__new__(torch.nn.Linear)
        linear.__dict__.update(self.__dict__)
        return linear

    def run_or_refuse(self, x: torch.Tensor) -> torch.Tensor | Refusal:
        """y, or why the module's own GEMM must run. Leading dimensions of x count as tokens."""
        refusal = context_refusal() or tensor_refusal(x) or tensor_refusal(self.weight)
        if refusal is not None:
            return refusal
        return Refusal(Reason.BIAS) if self.bias is not None else linear_or_refuse(x, self.weight, self.lowlat_tables)


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
    also those that may no longer be taken. Layers of a serving framework are left to its adapter, which the report names.
    Raises ValueError for an unknown family. Returns what was done.
    """
    names = family_names(tables)
    tied = _tied_weights(module)
    taken, skipped = {}, {}
    for name, submodule in module.named_modules():
        if not isinstance(submodule, torch.nn.Linear):
            if _is_a_frameworks(submodule):
                skipped[name] = Refusal(Reason.LAYER, _adapter_for(submodule))
            continue
        _undo(submodule)
        plan = _plan_or_refusal(submodule, dtype, names, tied)
        (skipped if isinstance(plan, Refusal) else taken)[name] = plan
    failed = {}
    if missing_packages_refusal() is None:
        failed = compile_ahead(unit for plan in taken.values() for unit in plan.units(residual=False))
    for name, plan in list(taken.items()):
        if (problem := install_problem(plan, failed)) is not None:
            skipped[name] = problem
            del taken[name]
            continue
        submodule = module.get_submodule(name)
        submodule.__class__ = PlannedLinear
        submodule.lowlat_tables = names
    report = InstallReport(tuple(taken), skipped)
    _LOG.info("%d linears installed, %d left alone", len(taken), len(skipped))
    _LOG.debug("%s", report)
    return report


def _is_a_frameworks(module: torch.nn.Module) -> bool:
    """Whether a module that is no Linear computes with a method object, as vLLM's and SGLang's do, and has none of ours."""
    method, weight = getattr(module, "quant_method", None), module._parameters.get("weight")
    return method is not None and not isinstance(method, PlannedMethod) and weight is not None and weight.dim() == 2


def _adapter_for(module: torch.nn.Module) -> str:
    of = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    names = [name for name in ("vllm", "sglang") if name in of] or ["vllm", "sglang"]
    return f"a {type(module).__name__} is for " + " or ".join(f"{__package__}.{name}.install" for name in names)


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
    module.__dict__.pop("lowlat_tables", None)
    return True


def disable_low_latency_gemm(module: torch.nn.Module) -> int:
    """Makes every linear below ``module`` a plain one again; returns how many had a plan."""
    return sum(_undo(submodule) for submodule in module.modules())
