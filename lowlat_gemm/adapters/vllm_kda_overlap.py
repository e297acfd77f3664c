"""Kimi-K3's KDA projection overlap in vLLM: our limit for each layer, and our branches where one is above 0.

A KDA layer of vLLM 0.33.0 (vllm/models/kimi_k3/nvidia/kda.py, ``forward``) overlaps in a capture of up to
``_projection_overlap_max_tokens`` tokens, by a function that it imports from ``low_latency_gemm`` at the call, and
takes its two linears one after the other otherwise. vLLM's constructor sets that number, and its warm-up raises it to
14 wherever it is not 0. The layer says nothing of itself in the call: it is known by its weight. So both functions are
replaced on their module, for as long as a layer is taken, and pass all other layers on to vLLM's own.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from dataclasses import dataclass

from ..captures import note_capture
from ..execute import CompileError, NotCompiledError
from ..kda_overlap import autotune_kda_qkvg, kda_overlap_limit, run_kda_projection_overlap
from ..operands import Reason, Refusal
from ..settings import current
from ..torch_op import storage_of
from .methods import PlannedMethod

_LOG = logging.getLogger("lowlat_gemm")
_PACKAGE = "vllm.models.kimi_k3.nvidia"
#: The attribute of a layer with the largest M at which it overlaps.
LIMIT = "_projection_overlap_max_tokens"


@dataclass(frozen=True)
class _Taken:
    """What a layer has from us: ``limit`` tokens at most, and ``before``, vLLM's number."""

    limit: int
    before: int


_TAKEN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _run(original, hidden_states, packed_weight, f_b_weight, aux_stream, events):
    operands = hidden_states, packed_weight, f_b_weight, aux_stream, events
    layer = next((layer for layer in list(_TAKEN) if layer.in_proj_qkvgfab.weight is packed_weight), None)
    if layer is None:
        return original(*operands)
    try:
        y = run_kda_projection_overlap(*operands)
    except (ValueError, NotCompiledError) as error:  # both come before the first launch
        if isinstance(error, NotCompiledError) and current().strict:
            raise
        _LOG.warning("the KDA overlap of %d tokens is vLLM's: %s", hidden_states.shape[0], error)
        return original(*operands)
    for linear in (layer.in_proj_qkvgfab, layer.f_b_proj):
        note_capture(linear, linear.weight)
    return y


def _autotune(original, model):
    original(model)
    for layer, taken in list(_TAKEN.items()):
        setattr(layer, LIMIT, taken.limit)


#: vLLM's functions by name: what they take in the vLLM that this was written for, and what takes their place.
FUNCTIONS = {
    "run_kda_projection_overlap": (
        ("hidden_states", "packed_weight", "f_b_weight", "aux_stream", "events"),
        _run,
    ),
    "autotune_kda_qkvg": (("model",), _autotune),
}


def _is_ours(function, ours) -> bool:
    return isinstance(function, functools.partial) and function.func is ours


def _replace_functions() -> bool:
    """Puts ours in place; False, with nothing replaced, where vLLM's are not those that this was written for."""
    module = sys.modules[f"{_PACKAGE}.low_latency_gemm"]
    for name, (parameters, ours) in FUNCTIONS.items():
        found = getattr(module, name, None)
        if not _is_ours(found, ours) and (found is None or tuple(inspect.signature(found).parameters) != parameters):
            _LOG.warning("%s is not what it was in vLLM 0.33.0: the KDA overlap is left alone", name)
            return False
    for name, (_, ours) in FUNCTIONS.items():
        if not _is_ours(found := getattr(module, name), ours):
            setattr(module, name, functools.partial(ours, found))
    return True


def _put_functions_back() -> None:
    module = sys.modules.get(f"{_PACKAGE}.low_latency_gemm")
    for name, (_, ours) in FUNCTIONS.items():
        if _is_ours(found := getattr(module, name, None), ours):
            setattr(module, name, found.args[0])


def _layers(model) -> dict[str, object]:
    """The KDA layers below ``model`` both of whose linears go through plans and that have a stream to overlap on."""
    owner = getattr(sys.modules.get(f"{_PACKAGE}.kda"), "KimiK3DeltaAttention", None)
    return {
        name: module
        for name, module in (() if owner is None else model.named_modules())
        if isinstance(module, owner)
        and hasattr(module, LIMIT)
        and module._projection_aux_stream is not None
        and module._projection_events is not None
        and all(isinstance(linear.quant_method, PlannedMethod) for linear in (module.in_proj_qkvgfab, module.f_b_proj))
    }


def install_overlap(model) -> None:
    """Gives each KDA layer below ``model`` our limit, and compiles what it runs up to there.

    With 0 the layer takes its linears one after the other, through their plans. A layer without a known limit (nobody
    measured one, another device class, disabled) keeps vLLM's overlap; in batch-invariant mode it has none.
    """
    layers = _layers(model)
    if not layers:
        return
    try:
        limits = autotune_kda_qkvg(model)
    except (CompileError, ImportError) as error:
        _LOG.warning("the KDA overlap stays vLLM's: %s", error)
        return
    taken = {layers[name]: limit for name, limit in limits.items() if name in layers and _is_known(layers[name])}
    if not taken or not _replace_functions():
        return
    for layer, limit in taken.items():
        _TAKEN[layer] = _Taken(limit, getattr(layer, LIMIT))
        setattr(layer, LIMIT, limit)


def _is_known(layer) -> bool:
    limit = kda_overlap_limit(storage_of(layer.in_proj_qkvgfab.weight).device.index)
    return not isinstance(limit, Refusal) or limit.reason is Reason.BATCH_INVARIANT


def overlaps(model) -> tuple[str, ...]:
    """Names of the overlaps below ``model`` that run our branches; not those of limit 0."""
    return tuple(
        f"{name}.run_kda_projection_overlap" if name else "run_kda_projection_overlap"
        for name, module in model.named_modules()
        if module in _TAKEN and _TAKEN[module].limit > 0
    )


def uninstall_overlap(model) -> None:
    """Gives the layers below ``model`` vLLM's limits back, and vLLM its functions after the last one."""
    for module in model.modules():
        if (taken := _TAKEN.pop(module, None)) is not None:
            setattr(module, LIMIT, taken.before)
    if not _TAKEN:
        _put_functions_back()
