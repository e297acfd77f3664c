"""Kimi-K3 in vLLM: enabling from a model's constructor, and the call sites that use weights past any linear method.

Three such sites serve BF16 weights (vllm/models/kimi_k3/nvidia, 0.33.0): the attention's sliced input projection
(mla.py, ``_unquantized_gemm``), and the up-projection of the routed experts twice: under tensor parallelism, where it
hides the all-reduce of the shared experts' output (latent_moe_runner.py, ``_overlap_allreduce_tail``, up to 256
tokens), and with mega MoE alone, where it adds to that output (model.py, ``KimiRoutedOutputTransform.forward``). They
are replaced on each module, never on vLLM's classes, so that ``uninstall`` of one model leaves others alone. What our
plan does not serve runs as vLLM has it. ``_shard_up_proj_tail``, which multiplies by each rank's rows of the weight,
stays vLLM's: it is for more tokens than tables have, and no table has a row for such a slice. The KDA layers' overlap
is in ``vllm_kda_overlap``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..captures import note_capture
from ..dispatch import Plan, missing_packages_refusal
from ..execute import compile_ahead, device_plan, log_refusal
from ..operands import Reason, Refusal
from .report import InstallReport, install_problem
from .stand_in import Multiplied, Seen

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
    ``every_m``: whether vLLM comes here with every M; in batch-invariant mode another site is left alone, for at the
    other M vLLM multiplies by the same weight elsewhere.
    ``run``: takes its place, called with the class's own, the module, the families to look in, and the arguments.
    """

    file: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    weights: Callable
    residual: bool
    every_m: bool
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


def _tail_weights(module):
    from vllm import envs

    if not module._use_fused_path() or envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM:
        return ()  # vLLM then never comes here
    return _up_projection_weights(module.routed_output_transform)


def _tail(original, module, names, fused_output, shared_output, trunc_size):
    from ..torch_op import linear_or_refuse, storage_of

    if torch.compiler.is_compiling():
        return original(module, fused_output, shared_output, trunc_size)
    transform = module.routed_output_transform
    up_proj = transform.up_proj

    def gemm(x):
        plain = storage_of(up_proj.weight)
        y = linear_or_refuse(x, plain, names)
        if type(y) is Refusal:
            log_refusal(x, plain, y)
            return None
        note_capture(up_proj, up_proj.weight)
        return y

    # The reductions, their streams and events are vLLM's own code: it sees another weight, and nothing else.
    layer = Seen(up_proj, weight=Multiplied(up_proj.weight, gemm))
    runner = Seen(module, routed_output_transform=Seen(transform, up_proj=layer))
    return original(runner, fused_output, shared_output, trunc_size)


CALL_SITES = (
    CallSite(
        file="mla",
        owner="MultiHeadLatentAttention",
        method="_unquantized_gemm",
        parameters=("self", "hidden_states", "weight"),
        weights=_attention_weights,
        residual=False,
        every_m=False,
        run=_attention_gemm,
    ),
    CallSite(
        file="model",
        owner="KimiRoutedOutputTransform",
        method="forward",
        parameters=("self", "hidden_states", "residual"),
        weights=_up_projection_weights,
        residual=True,
        every_m=True,
        run=_up_projection,
    ),
    CallSite(
        file="latent_moe_runner",
        owner="LatentMoERunner",
        method="_overlap_allreduce_tail",
        parameters=("self", "fused_output", "shared_output", "trunc_size"),
        weights=_tail_weights,
        residual=False,
        every_m=False,
        run=_tail,
    ),
)


def install_call_sites(model, names: tuple[str, ...] | None) -> InstallReport:
    """Replaces the call sites below ``model`` of which a weight has a plan, and compiles their kernels.

    The report names them "layers.3.self_attn._unquantized_gemm", and has in ``skipped`` those with a plan that had to
    be left alone.
    """
    found, skipped = {}, {}
    for site in CALL_SITES:
        owner = site.owner_class()
        for name, module in () if owner is None else model.named_modules():
            plans = _plans(site, module, names) if isinstance(module, owner) else []
            if any(plan.every_m for plan in plans) and not site.every_m:
                skipped[_full_name(name, site)] = Refusal(Reason.BATCH_INVARIANT, "vLLM comes here with some M only")
            elif plans:
                found[_full_name(name, site)] = site, getattr(owner, site.method), module, plans
    failed = {}
    if missing_packages_refusal() is None:
        failed = compile_ahead(unit for *_, plans in found.values() for plan in plans for unit in plan.units())
    for name, (site, method, module, plans) in list(found.items()):
        problem = next(filter(None, (install_problem(plan, failed) for plan in plans)), None)
        if problem is not None:
            skipped[name] = problem
            del found[name]
            continue
        # An instance's own attribute goes before its class's.
        module.__dict__[site.method] = functools.partial(site.run, method, module, names)
    return InstallReport(tuple(found), skipped)


def _full_name(module_name: str, site: CallSite) -> str:
    return f"{module_name}.{site.method}" if module_name else site.method


def _plans(site: CallSite, module, names) -> list[Plan]:
    """The plans of a site's weights that serve some of its calls."""
    from ..torch_op import storage_of

    weights = (weight for weight in map(storage_of, site.weights(module)) if weight.device.type == "cuda")
    plans = [device_plan(weight.device.index, *weight.shape, names) for weight in weights]
    return [plan for plan in plans if isinstance(plan, Plan) and _serves(plan, site.residual)]


def _serves(plan: Plan, residual: bool) -> bool:
    entries = plan.residual_entries if residual else plan.entries
    return any(entry.refusal is None for entry in entries.values())


def installed_call_sites(model) -> tuple[str, ...]:
    """Names of the call sites below ``model`` that are replaced now."""
    return tuple(
        _full_name(name, site)
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
