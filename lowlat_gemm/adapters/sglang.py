"""The SGLang adapter: its plugin hook, and installing plans into a loaded model.

SGLang (0.5.23) calls ``register`` in each of its processes, by the entry point group ``sglang.srt.plugins``, before it
builds anything. The hook is on what loads a model into a worker, so that kernels are compiled before CUDA graphs are
captured. Language-model heads are left alone: SGLang multiplies with their weights itself, without a method.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence

from .. import __version__, settings
from ..dispatch import family_names
from ..operands import Reason, Refusal
from .methods import Framework, PlannedMethod, original, summary
from .report import InstallReport

_LOG = logging.getLogger("lowlat_gemm")
#: What a worker loads its model with; its module is that of workers, so other processes need not import it.
LOADS_A_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
#: Processes that have workers have this module.
_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """The entry point of ``sglang.srt.plugins``. Raises nothing; initialises no GPU.

    ``LOWLAT_GEMM_NO_PLUGIN=1`` makes it do nothing, as does a process without a scheduler, which loads no model.
    """
    try:
        if settings.current().no_plugin:
            _LOG.info("the SGLang plugin is switched off by LOWLAT_GEMM_NO_PLUGIN")
            return
        if _SCHEDULER not in sys.modules:
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks = HookRegistry._hooks.get(LOADS_A_MODEL, [])
        if not any(hook is _after_load for _, hook, *_ in hooks):
            HookRegistry.register(LOADS_A_MODEL, _after_load, HookType.AFTER)
    except Exception:  # a plugin must not take a server down
        _LOG.error("the SGLang plugin could not be set up; SGLang runs without it\n%s", traceback.format_exc())


def _after_load(result, runner, *args, **kwargs) -> None:
    """Called after ``ModelRunner.load_model``; None leaves its result as it is."""
    install_after_load(runner.model)


def install_after_load(model) -> InstallReport | None:
    """Installs into a model that a worker just loaded, and says so in one line of SGLang's log.

    On any error the model is left, or made again, as SGLang loaded it, and the answer is None.
    """
    try:
        report = _leave_alone(model) or install(model)
        where = f"SGLang {sys.modules['sglang'].__version__}"
        logging.getLogger("sglang.lowlat_gemm").info("%s", summary(where, type(model).__name__, __version__, report))
        return report
    except Exception:
        _LOG.error("nothing installed in %s: SGLang runs it as it is\n%s", type(model).__name__, traceback.format_exc())
        try:
            uninstall(model)
        except Exception:
            _LOG.error("taking back what was installed failed as well\n%s", traceback.format_exc())
        return None


def _leave_alone(model) -> InstallReport | None:
    """The report of a model that is not touched at all, or None."""
    from sglang.srt.runtime_context import get_exec, get_lora

    refusal = None
    if get_lora().enable_lora:
        refusal = Refusal(Reason.LAYER, "LoRA wraps the layers after loading")
    elif get_exec().deterministic.enable_deterministic_inference:
        refusal = Refusal(Reason.BATCH_INVARIANT, "SGLang's deterministic inference replaces torch's GEMMs")
    if refusal is None:
        return None
    return InstallReport((), {name: refusal for name, _ in layers().candidates(model)})


def install(model, dtype=None, tables: str | Sequence[str] | None = None) -> InstallReport:
    """Installs plans into the linears of SGLang below ``model``: those whose method is exactly its unquantized one,
    without bias, whose weight no other module owns and whose shape is in one of ``tables`` (families; all by default).

    ``dtype``: only BF16 has tables. Kernels are compiled here. Called again it brings every layer up to date. Raises
    ValueError for an unknown family. Returns what was done.
    """
    report = layers().install(model, dtype, family_names(tables))
    _LOG.debug("%s", report)
    return report


def uninstall(model) -> int:
    """Gives every linear below ``model`` back the method that SGLang gave it; returns how many had a plan."""
    return layers().uninstall(model)


def report(model) -> InstallReport:
    """What runs through plans below ``model`` as it is now, and why each other linear does not."""
    return layers().report(model)


class _Mixin(PlannedMethod):
    """As any planned method; and SGLang's own GEMM choice stays its own under a compiler."""

    def apply(self, layer, x, bias=None):
        import torch

        if torch.compiler.is_compiling() and not _torch_runs_gemms():
            # Our operator falls back to torch's linear, where SGLang would run what the user or it chose.
            return super(PlannedMethod, self).apply(layer, x, bias)
        return super().apply(layer, x, bias)

    def apply_with_addend(self, layer, x, addend, bias=None):
        """SGLang's own: x @ weight.T + addend, which the caller takes for consumed."""
        if bias is None:
            y = self.residual_or_refuse(layer, x, addend)
            if type(y) is not Refusal:
                return y
        return super().apply_with_addend(layer, x, addend, bias)


def _torch_runs_gemms() -> bool:
    from sglang.srt.layers.quantization import unquant

    backend = unquant.get_bf16_gemm_backend()
    return not (backend.is_cutedsl() or backend.is_gemv())


def layers() -> Framework:
    """SGLang's linears, and which of them are plain ones."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    def is_candidate(module) -> bool:
        return isinstance(module, LinearBase) and getattr(module, "quant_method", None) is not None

    def method_refusal(module) -> Refusal | None:
        kind = type(original(module.quant_method))
        return None if kind is UnquantizedLinearMethod else Refusal(Reason.LAYER, f"method {kind.__name__}")

    return Framework(is_candidate, method_refusal, _Mixin)
