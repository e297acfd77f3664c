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
from collections.abc import Sequence

from .. import __version__, settings
from ..dispatch import family_names
from ..operands import Reason, Refusal
from . import vllm_kda_overlap, vllm_kimi_k3
from .methods import summary
from .report import InstallReport

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
        where = f"vLLM {sys.modules['vllm'].__version__}"
        _vllm_log().info("%s", summary(where, type(model).__name__, __version__, report))
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
    if refusal is None:
        return None
    from .vllm_methods import LAYERS

    return InstallReport((), {name: refusal for name, _ in LAYERS.candidates(model)})


def change_compile_key(vllm_config, report: InstallReport) -> None:
    """Makes what was installed part of the key of vLLM's ahead-of-time compile cache, which knows nothing of plugins.

    Without it an artefact that was compiled without the plugin would be loaded, and would bypass it silently.
    """
    entry = vllm_config.additional_config.setdefault(_NAME, {"version": __version__, "installed": []})
    installed = hashlib.sha256("\n".join(report.installed).encode()).hexdigest()[:16]
    # A list, for a draft model may share the config of its target.
    entry["installed"] = sorted({*entry["installed"], installed})


# ---- installing into a model


def install(model, dtype=None, tables: str | Sequence[str] | None = None) -> InstallReport:
    """Installs plans into the linears and language-model heads of vLLM below ``model`` (itself included).

    Taken are layers whose method is exactly vLLM's unquantized one (or its own low-latency one for Kimi-K3) with
    vLLM's default GEMM, without bias, whose weight no other module owns and whose shape is in one of ``tables``
    (family names; all by default). ``dtype``: only BF16 has tables; None takes every layer by its weight's. Kernels
    are compiled here. Called again it brings every layer up to date. Raises ValueError for an unknown family. Returns
    what was done.
    """
    from .vllm_methods import LAYERS

    names = family_names(tables)
    vllm_kimi_k3.uninstall_call_sites(model)
    vllm_kda_overlap.uninstall_overlap(model)
    done = LAYERS.install(model, dtype, names)
    sites = vllm_kimi_k3.install_call_sites(model, names)
    vllm_kda_overlap.install_overlap(model)
    installed = *done.installed, *sites.installed, *vllm_kda_overlap.overlaps(model)
    report = InstallReport(installed, done.skipped | sites.skipped)
    _LOG.debug("%s", report)
    return report


def uninstall(model) -> int:
    """Gives every layer below ``model`` back the method that vLLM gave it; returns how many had a plan."""
    from .vllm_methods import LAYERS

    vllm_kimi_k3.uninstall_call_sites(model)
    vllm_kda_overlap.uninstall_overlap(model)
    return LAYERS.uninstall(model)


def report(model) -> InstallReport:
    """What runs through plans below ``model`` as it is now, and why each other layer does not."""
    from .vllm_methods import LAYERS

    found = LAYERS.report(model)
    sites = (*vllm_kimi_k3.installed_call_sites(model), *vllm_kda_overlap.overlaps(model))
    return InstallReport((*found.installed, *sites), found.skipped)
