"""What the adapters of vLLM and SGLang share: both give each layer a method object that computes it.

A layer keeps its weight, and its method gets a plan in front. Which layers and methods are a framework's plain ones is
its adapter's to say.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..captures import note_capture, watch
from ..dispatch import Plan, missing_packages_refusal
from ..execute import compile_ahead, device_plan, log_refusal, run_or_refuse
from ..operands import Reason, Refusal, check_weight
from ..torch_op import linear, linear_or_refuse, names_of, storage_of, tables_argument
from .report import InstallReport, install_problem


#: The class that wraps layers for LoRA, by its name in vLLM and in SGLang: importing it costs every other start.
_LORA = "BaseLayerWithLoRA"


class PlannedMethod:
    """Mixin in front of a framework's method: the plan where it serves, that method's own GEMM otherwise.

    It holds no plan and no pointer: those are looked up by the weight as it is at the call.
    """

    #: The method that the layer had before; uninstalling puts it back.
    lowlat_replaced = None
    #: Families to look in, as the operator takes them.
    lowlat_tables = ""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            return super().apply(layer, x, bias)
        if torch.compiler.is_compiling():
            return linear(x, layer.weight, self.lowlat_tables)
        weight = storage_of(layer.weight)
        y = linear_or_refuse(x, weight, names_of(self.lowlat_tables))
        if type(y) is not Refusal:
            note_capture(layer, layer.weight)
            return y
        log_refusal(x, weight, y)
        return super().apply(layer, x, bias)

    def residual_or_refuse(self, layer: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor):
        """x @ weight.T + residual from a kernel, the sum in FP32 before the one rounding; or the Refusal, logged.

        x: [M, K], residual: [M, N]; y: [M, N]. Under a compiler always a Refusal, and for a layer whose outputs are
        summed over ranks: each would add the residual.
        """
        if torch.compiler.is_compiling():  # nothing that the frameworks compile has such a call site
            return Refusal(Reason.TRACING)
        if ranks := _summed_ranks(layer):
            return Refusal(Reason.LAYER, f"its outputs are summed over {ranks} ranks: the residual would be added by each")
        weight = storage_of(layer.weight)
        y = run_or_refuse(x, weight, residual, names_of(self.lowlat_tables))
        if type(y) is Refusal:
            log_refusal(x, weight, y)
        else:
            note_capture(layer, layer.weight)
        return y

    def apply_with_residual(self, layer: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As ``residual_or_refuse``, or torch's own addmm. ValueError for a layer whose outputs are summed over ranks."""
        if ranks := _summed_ranks(layer):
            raise ValueError(f"a residual here would be added {ranks} times, once by each rank: add it after the sum")
        y = self.residual_or_refuse(layer, x, residual)
        return torch.addmm(residual, x, layer.weight.t()) if type(y) is Refusal else y


def _summed_ranks(layer: torch.nn.Module) -> int:
    """How many ranks' outputs a row-parallel layer adds up; 0 for a layer that adds none."""
    ranks = getattr(layer, "tp_size", 1) if getattr(layer, "reduce_results", False) else 1
    return ranks if ranks > 1 else 0


@functools.cache
def _planned_class(mixin: type, kind: type) -> type:
    """A method class with a plan in front; it is a subclass, for frameworks ask by isinstance."""
    return type(f"Planned{kind.__name__}", (mixin, kind), {"__module__": __name__})


def planned(method, names: tuple[str, ...] | None, mixin: type = PlannedMethod) -> PlannedMethod:
    """``method`` with a plan in front. Its state is taken over; its constructor, which may need the framework's
    current config, is not run."""
    made = object.__new__(_planned_class(mixin, type(method)))
    made.__dict__.update(method.__dict__)
    made.lowlat_replaced, made.lowlat_tables = method, tables_argument(names)
    return made


def original(method):
    """The method that the framework gave the layer."""
    return method.lowlat_replaced if isinstance(method, PlannedMethod) else method


class _Surroundings:
    """What of a model decides on a layer beside the layer itself.

    ``owners``: how many modules own each parameter; a head is tied to the embedding by giving it that parameter.
    """

    def __init__(self, model: torch.nn.Module):
        modules = list(model.modules())
        self.owners = Counter(id(parameter) for module in modules for parameter in module._parameters.values())
        wrappers = (module for module in modules if any(kind.__name__ == _LORA for kind in type(module).__mro__))
        self._wrapped = {id(module) for wrapper in wrappers for module in wrapper.modules()}

    def refusal(self, module: torch.nn.Module) -> Refusal | None:
        return Refusal(Reason.LAYER, "wrapped for LoRA") if id(module) in self._wrapped else None


@dataclass(frozen=True)
class Framework:
    """What is a linear of the framework, and which of them are plain.

    ``is_candidate(module)``: whether it is a layer with a method in ``quant_method``, whatever that is.
    ``method_refusal(module)``: why a candidate's method, as the framework gave it, is left alone, or None.
    ``mixin``: goes in front of methods.
    """

    is_candidate: Callable[[torch.nn.Module], bool]
    method_refusal: Callable[[torch.nn.Module], Refusal | None]
    mixin: type = PlannedMethod

    def candidates(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        return [(name, module) for name, module in model.named_modules() if self.is_candidate(module)]

    def install(self, model: torch.nn.Module, dtype: torch.dtype | None, names: tuple[str, ...] | None) -> InstallReport:
        """Puts plans in front of the methods of all plain layers below ``model`` and compiles their kernels.

        ``dtype``: only weights of it, None for any; ``names``: families to look in, None for all.
        """
        self.uninstall(model)
        surroundings, plans, skipped = _Surroundings(model), {}, {}
        for name, module in self.candidates(model):
            plan = self._plan_or_refusal(module, dtype, names, surroundings)
            (skipped if isinstance(plan, Refusal) else plans)[name] = plan
        failed = {}
        if missing_packages_refusal() is None:
            failed = compile_ahead(unit for plan in plans.values() for unit in plan.units())
        for name, plan in list(plans.items()):
            if (problem := install_problem(plan, failed)) is not None:
                skipped[name] = problem
                del plans[name]
                continue
            module = model.get_submodule(name)
            module.quant_method = planned(module.quant_method, names, self.mixin)
            watch(module)
        return InstallReport(tuple(plans), skipped)

    def uninstall(self, model: torch.nn.Module) -> int:
        """Gives every layer back the method that the framework gave it; returns how many had a plan."""
        count = 0
        for _, module in self.candidates(model):
            method = original(module.quant_method)
            count += method is not module.quant_method
            module.quant_method = method
        return count

    def report(self, model: torch.nn.Module) -> InstallReport:
        """What has a plan now, and why each other layer does not."""
        installed, skipped, surroundings = [], {}, _Surroundings(model)
        for name, module in self.candidates(model):
            if isinstance(module.quant_method, PlannedMethod):
                installed.append(name)
                continue
            plan = self._plan_or_refusal(module, None, None, surroundings)
            skipped[name] = plan if isinstance(plan, Refusal) else Refusal(Reason.DISABLED, "not installed")
        return InstallReport(tuple(installed), skipped)

    def _plan_or_refusal(self, module, dtype, names, surroundings: _Surroundings) -> Plan | Refusal:
        refusal = surroundings.refusal(module) or self.method_refusal(module)
        if refusal is not None:
            return refusal
        parameter = module._parameters.get("weight")
        if parameter is None:
            return Refusal(Reason.LAYER, "it has no weight of its own")
        if module._parameters.get("bias") is not None:
            return Refusal(Reason.BIAS)
        if surroundings.owners[id(parameter)] > 1:
            return Refusal(Reason.WEIGHT_LAYOUT, "the weight is tied to another module")
        weight = storage_of(parameter)
        if weight.dtype != torch.bfloat16 or dtype not in (None, weight.dtype):
            return Refusal(Reason.DTYPE, f"weight is {weight.dtype}, asked for {dtype}; the tables are for bfloat16")
        if weight.device.type != "cuda":
            return Refusal(Reason.CAPABILITY, f"the weight is on {weight.device}")
        refusal = check_weight(weight)
        if refusal is not None:
            return refusal
        plan = device_plan(weight.device.index, *weight.shape, names)
        if isinstance(plan, Refusal) or plan.units():
            return plan
        # Nothing of the row can run: the framework's own method is then the better one.
        return next(entry.refusal for entries in (plan.entries, plan.residual_entries) for entry in entries.values())


def summary(where: str, model: str, version: str, report: InstallReport) -> str:
    """One line for a framework's log: how many calls go through plans and why the others do not."""
    reasons = Counter(refusal.reason.value for refusal in report.skipped.values())
    left = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    line = f"lowlat_gemm {version} in {where}: {len(report.installed)} calls of {model} go through plans"
    return f"{line}, {len(report.skipped)} left alone" + (f" ({left})" if left else "")
