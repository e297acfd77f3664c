"""Kimi-K3 in vLLM: enabling from a model's constructor, and the call sites that use weights past any linear method.

Two such sites serve BF16 weights (vllm/models/kimi_k3/nvidia, 0.33.0): the attention's sliced input projection
(mla.py, ``_unquantized_gemm``), and the up-projection that adds to the shared experts' output (model.py,
``KimiRoutedOutputTransform.forward``). They are replaced on each module, never on vLLM's classes, so that
``uninstall`` of one model leaves others alone. What our plan does not serve runs as vLLM has it. The KDA layers'
overlap is in ``vllm_kda_overlap``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..captures import note_capture
from ..dispatch import Plan
from ..execute import device_plan, log_refusal
from ..operands import Refusal
from ..warmup import request_low_latency_warmup

_LOG = logging.getLogger("lowlat_gemm")
_PACKAGE = "vllm.models.kimi_k3.nvidia"


def enable_kimi_k3_low_latency_gemm(module, dtype):
    """Installs the Kimi-K3 plans into vLLM's layers below ``module``, for a model's constructor to call.

    The same as ``adapters.vllm.install(module, dtype, "kimi_k3")``: exactly-unquantized linears and language-model
    heads without bias whose local (N, K) is in the table; kernels are compiled now. Only for torch.bfloat16: for
    another dtype nothing is done. Returns the InstallReport. ImportError without vLLM.
    """
    from . import vllm

    return vllm.install(module, dtype, "kimi_k3")


@dataclass(frozen=True)
class CallSite:
    """A method of a vLLM class that goes past the linear methods.

    ``parameters``: what it takes in the vLLM that this was written for; another signature is left alone.
    ``weights(module)``: the weights that it may use, or none when there is nothing to replace.
    ``run``: takes its place, called with the class's own, the module, the families to look in, and the arguments.
    """

    file: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    weights: Callable
    residual: bool
    run: Callable

    def owner_class(self) -> type | None:
        """The class in the vLLM that is loaded, or None: its file was never imported, or it is another version's."""
        module = sys.modules.get(f"{_PACKAGE}.{self.file}")
        owner = getattr(module, self.owner, None)
        if owner is None:
            return None
        found = tuple(inspect.signature(getattr(owner, self.method)).parameters)
        if found != self.parameters:
            _LOG.warning("%s.%s takes %s in this vLLM, not %s: left alone", self.owner, self.method, found, self.parameters)
            return None
        return owner


def _attention_weights(module):
    from . import vllm_methods

    packed = module.fused_qkv_a_g_proj
    if module._gate_events is None or packed is None or vllm_methods.method_refusal(packed) is not None:
        return ()
    rows = module.q_lora_rank + module.kv_lora_rank + module.qk_rope_head_dim
    return packed.weight[:rows], packed.weight[rows:]


def _attention_gemm(original, module, names, hidden_states, weight):
    from ..torch_op import linear_or_refuse, storage_of

    plain = storage_of(weight)
    y = linear_or_refuse(hidden_states, plain, names)
    if type(y) is not Refusal:
        # A slice is made anew at each call; what can move is the weight that it is of.
        note_capture(module.fused_qkv_a_g_proj, module.fused_qkv_a_g_proj.weight)
        return y
    log_refusal(hidden_states, plain, y)
    return original(module, hidden_states, weight)


def _up_projection_weights(module):
    from . import vllm_methods

    return () if vllm_methods.method_refusal(module.up_proj) is not None else (module.up_proj.weight,)


def _up_projection(original, module, names, hidden_states, residual=None):
    from .methods import PlannedMethod

    method = module.up_proj.quant_method
    if residual is None or not isinstance(method, PlannedMethod):
        return original(module, hidden_states, residual)
    if module.norm is not None:
        hidden_states = module.norm(hidden_states)
    y = method.residual_or_refuse(module.up_proj, hidden_states, residual)
    return residual.addmm_(hidden_states, module.up_proj.weight.t()) if type(y) is Refusal else y


CALL_SITES = (
    CallSite(
        file="mla",
        owner="MultiHeadLatentAttention",
        method="_unquantized_gemm",
        parameters=("self", "hidden_states", "weight"),
        weights=_attention_weights,
        residual=False,
        run=_attention_gemm,
    ),
    CallSite(
        file="model",
        owner="KimiRoutedOutputTransform",
        method="forward",
        parameters=("self", "hidden_states", "residual"),
        weights=_up_projection_weights,
        residual=True,
        run=_up_projection,
    ),
)


def install_call_sites(model, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Replaces the call sites below ``model`` of which a weight has a plan, and compiles their kernels.

    Returns their names ("layers.3.self_attn._unquantized_gemm").
    """
    from ..torch_op import storage_of

    done = []
    for site in CALL_SITES:
        owner = site.owner_class()
        if owner is None:
            continue
        for name, module in model.named_modules():
            if not isinstance(module, owner):
                continue
            weights = [weight for weight in map(storage_of, site.weights(module)) if _has_plan(weight, names, site.residual)]
            if not weights:
                continue
            for weight in weights:
                request_low_latency_warmup(weight)
            replaced = functools.partial(site.run, getattr(owner, site.method), module, names)
            module.__dict__[site.method] = replaced  # an instance's own attribute goes before its class's
            done.append(f"{name}.{site.method}" if name else site.method)
    return tuple(done)


def _has_plan(weight, names, residual: bool) -> bool:
    if weight.device.type != "cuda":
        return False
    plan = device_plan(weight.device.index, *weight.shape, names)
    entries = (plan.residual_entries if residual else plan.entries) if isinstance(plan, Plan) else {}
    return any(entry.refusal is None for entry in entries.values())


def installed_call_sites(model) -> tuple[str, ...]:
    """Names of the call sites below ``model`` that are replaced now."""
    return tuple(
        f"{name}.{site.method}" if name else site.method
        for site in CALL_SITES
        for name, module in model.named_modules()
        if _is_replaced(module, site)
    )


def uninstall_call_sites(model) -> int:
    """Puts vLLM's own back; returns how many were replaced."""
    count = 0
    for site in CALL_SITES:
        for module in model.modules():
            if _is_replaced(module, site):
                del module.__dict__[site.method]
                count += 1
    return count


def _is_replaced(module, site: CallSite) -> bool:
    found = module.__dict__.get(site.method)
    return isinstance(found, functools.partial) and found.func is site.run
