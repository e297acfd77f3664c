"""The vLLM adapter: its plugin hook, and installing plans into a loaded model.

vLLM (0.33) calls ``register`` once in each of its processes, by the entry point group ``vllm.general_plugins``. It
puts a subclass in front of each model loader; what a loader returns, weights loaded and post-processed, is installed
into at once. That is before the first trace by torch.compile and before any CUDA graph is captured, so that kernels
are compiled here and nowhere later.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Sequence

from .. import __version__, settings
from ..dispatch import Plan, family_names, missing_packages_refusal
from ..execute import compile_ahead, device_plan
from ..operands import Reason, Refusal, check_weight
from . import vllm_kimi_k3
from .torch_nn import InstallReport

_LOG = logging.getLogger("lowlat_gemm")
#: The package's name, which is another one in a tree that has a copy.
_NAME = __package__.rpartition(".")[0]


def _vllm_log() -> logging.Logger:
    """A logger that vLLM's own configuration shows."""
    from vllm.logger import init_logger

    return init_logger(f"vllm.plugins.{_NAME}")


# ---- the hook


def register() -> None:
    """The entry point of ``vllm.general_plugins``. May be called again; raises nothing; initialises no GPU.

    ``LOWLAT_GEMM_NO_PLUGIN=1`` makes it do nothing.
    """
    try:
        if settings.current().no_plugin:
            _LOG.info("the vLLM plugin is switched off by LOWLAT_GEMM_NO_PLUGIN")
            return
        from vllm.model_executor import model_loader

        # vLLM has no public list of its formats; registering is public.
        for load_format, loader in list(model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()):
            if not getattr(loader, "lowlat_installs", False):
                _register_quietly(model_loader, load_format, _installing(loader))
    except Exception:  # a plugin must not take a server down
        _LOG.error("the vLLM plugin could not be set up; vLLM runs without it\n%s", traceback.format_exc())


def _register_quietly(model_loader, load_format: str, loader: type) -> None:
    """Registers without vLLM's two lines for each format that it is being replaced."""
    before = model_loader.logger.level
    model_loader.logger.setLevel(logging.ERROR)
    try:
        model_loader.register_model_loader(load_format)(loader)
    finally:
        model_loader.logger.setLevel(before)


def _installing(loader: type) -> type:
    """A loader class whose loaded models have plans installed."""

    def load_model(self, *args, **kwargs):
        model = loader.load_model(self, *args, **kwargs)
        vllm_config = kwargs.get("vllm_config") or next(iter(args), None)
        install_after_load(model, vllm_config)
        return model

    load_model.__doc__ = loader.load_model.__doc__
    return type(loader.__name__, (loader,), {"load_model": load_model, "lowlat_installs": True, "__module__": __name__})


def install_after_load(model, vllm_config) -> InstallReport | None:
    """Installs into a model that a loader of vLLM just returned, and says so in one line of vLLM's log.

    On any error the model is left, or made again, as vLLM loaded it, and the answer is None.
    """
    try:
        report = _leave_alone(model, vllm_config) or install(model)
        if report.installed:
            change_compile_key(vllm_config, report)
        _vllm_log().info("%s", summary(report, type(model).__name__))
        return report
    except Exception:
        _LOG.error("nothing installed in %s: vLLM runs it as it is\n%s", type(model).__name__, traceback.format_exc())
        try:
            uninstall(model)
        except Exception:
            _LOG.error("taking back what was installed failed as well\n%s", traceback.format_exc())
        return None


def _leave_alone(model, vllm_config) -> InstallReport | None:
    """The report of a model that is not touched at all, or None."""
    refusal = None
    if getattr(vllm_config, "lora_config", None) is not None:
        refusal = Refusal(Reason.LAYER, "LoRA wraps the layers after loading")
    elif not isinstance(getattr(vllm_config, "additional_config", None), dict):
        refusal = Refusal(Reason.LAYER, "additional_config is not a dict: vLLM's compile cache would not see the plugin")
    return None if refusal is None else InstallReport((), {name: refusal for name, _ in _candidates(model)})


def change_compile_key(vllm_config, report: InstallReport) -> None:
    """Makes what was installed part of the key of vLLM's ahead-of-time compile cache, which knows nothing of plugins.

    Without it an artefact that was compiled without the plugin would be loaded, and would bypass it silently.
    """
    entry = vllm_config.additional_config.setdefault(_NAME, {"version": __version__, "installed": []})
    installed = hashlib.sha256("\n".join(report.installed).encode()).hexdigest()[:16]
    # A list, for a draft model may share the config of its target.
    entry["installed"] = sorted({*entry["installed"], installed})


def summary(report: InstallReport, model: str) -> str:
    """One line: how many calls go through plans and why the others do not."""
    reasons = Counter(refusal.reason.value for refusal in report.skipped.values())
    left = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    line = f"lowlat_gemm {__version__} in vLLM {sys.modules['vllm'].__version__}: {len(report.installed)} calls of {model} go through plans"
    return f"{line}, {len(report.skipped)} left alone" + (f" ({left})" if left else "")


# ---- installing into a model


def install(model, dtype=None, tables: str | Sequence[str] | None = None) -> InstallReport:
    """Installs plans into the linears and language-model heads of vLLM below ``model`` (itself included).

    Taken are layers whose method is exactly vLLM's unquantized one (or its own low-latency one for Kimi-K3) with
    vLLM's default GEMM, without bias, whose weight no other module owns and whose shape is in one of ``tables``
    (family names; all by default). ``dtype``: only BF16 has tables; None takes every layer by its weight's. Kernels
    are compiled here. Called again it brings every layer up to date. Raises ValueError for an unknown family. Returns
    what was done.
    """
    from . import vllm_methods

    names = family_names(tables)
    uninstall(model)
    owners = _owners(model)
    plans: dict[str, Plan] = {}
    skipped: dict[str, Refusal] = {}
    for name, module in _candidates(model):
        plan = _plan_or_refusal(module, dtype, names, owners)
        if isinstance(plan, Refusal):
            skipped[name] = plan
        else:
            plans[name] = plan
    failed = {}
    if missing_packages_refusal() is None:
        failed = compile_ahead(unit for plan in plans.values() for unit in plan.units())
    for name, plan in list(plans.items()):
        module = model.get_submodule(name)
        problem = next((failed[unit] for unit in plan.units() if unit in failed), None)
        if plan.every_m and problem is not None:  # batch-invariant mode: every M or none
            skipped[name] = Refusal(Reason.BACKEND_UNAVAILABLE, problem.splitlines()[0])
            del plans[name]
            continue
        module.quant_method = vllm_methods.planned(module.quant_method, names)
    call_sites = vllm_kimi_k3.install_call_sites(model, names)
    report = InstallReport((*plans, *call_sites), skipped)
    _LOG.debug("%s", report)
    return report


def uninstall(model) -> int:
    """Gives every layer below ``model`` back the method that vLLM gave it; returns how many had a plan."""
    from . import vllm_methods

    vllm_kimi_k3.uninstall_call_sites(model)
    count = 0
    for _, module in _candidates(model):
        method = vllm_methods.original(module.quant_method)
        count += method is not module.quant_method
        module.quant_method = method
    return count


def report(model) -> InstallReport:
    """What runs through plans below ``model`` as it is now, and why each other layer does not."""
    from . import vllm_methods

    installed, skipped, owners = [], {}, _owners(model)
    for name, module in _candidates(model):
        if isinstance(module.quant_method, vllm_methods.PlannedMethod):
            installed.append(name)
            continue
        plan = _plan_or_refusal(module, None, None, owners)
        skipped[name] = plan if isinstance(plan, Refusal) else Refusal(Reason.DISABLED, "not installed")
    return InstallReport((*installed, *vllm_kimi_k3.installed_call_sites(model)), skipped)


def _candidates(model) -> list[tuple[str, object]]:
    from . import vllm_methods

    return [(name, module) for name, module in model.named_modules() if vllm_methods.is_candidate(module)]


def _owners(model) -> Counter:
    """How many modules own each parameter. vLLM ties a head to the embedding by giving it that parameter."""
    return Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())


def _plan_or_refusal(module, dtype, names, owners: Counter) -> Plan | Refusal:
    import torch

    from ..torch_op import storage_of
    from . import vllm_methods

    refusal = vllm_methods.method_refusal(module)
    if refusal is not None:
        return refusal
    parameter = module._parameters.get("weight")
    if parameter is None:
        return Refusal(Reason.LAYER, "it has no weight of its own")
    if module._parameters.get("bias") is not None:
        return Refusal(Reason.BIAS)
    if owners[id(parameter)] > 1:
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
    # Nothing of the row can run: vLLM's own method is then the better one.
    return next(entry.refusal for entries in (plan.entries, plan.residual_entries) for entry in entries.values())
