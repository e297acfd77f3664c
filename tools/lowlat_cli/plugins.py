"""Whether serving frameworks will call the library's plugin: what ``lowlat doctor`` says of each."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass

from lowlat_gemm.settings import Settings

from . import environment


@dataclass(frozen=True)
class Framework:
    """A framework with plugins: its distribution, its entry point group, and the variable that picks plugins by name.

    ``empty_is_none``: whether an empty value of that variable picks no plugin, rather than every one.
    """

    name: str
    distribution: str
    group: str
    variable: str
    empty_is_none: bool


FRAMEWORKS = (
    Framework("vLLM", "vllm", "vllm.general_plugins", "VLLM_PLUGINS", empty_is_none=True),
    Framework("SGLang", "sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", empty_is_none=False),
)
PLUGIN = "lowlat_gemm"


def state(framework: Framework, settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """In a few words: on, or why not."""
    version = environment.version(framework.distribution)
    if version is None:
        return f"{framework.name} is not installed"
    if PLUGIN not in importlib.metadata.entry_points(group=framework.group).names:
        return f"off: lowlat_gemm is not installed beside {framework.name} {version} (pip install lowlat_gemm)"
    if settings.disabled or settings.no_plugin:
        return f"off: {'LOWLAT_GEMM_DISABLE' if settings.disabled else 'LOWLAT_GEMM_NO_PLUGIN'}"
    picked = environ.get(framework.variable)
    if picked is not None and (picked or framework.empty_is_none):
        if PLUGIN not in (name.strip() for name in picked.split(",")):
            return f"off: {framework.variable}={picked} does not name {PLUGIN}"
    return f"on in {framework.name} {version}"


def states(settings: Settings) -> dict[str, str]:
    """By framework."""
    return {framework.name: state(framework, settings) for framework in FRAMEWORKS}
