"""``lowlat_gemm::linear``: dispatch and fall back as one opaque operator, for code that a compiler traces.

Under torch.compile the token count is a symbol: a lookup in plain Python would make it a constant, one graph for each
M. So the lookup, the checks of one call's tensors and the fall back happen inside of an operator, which the compiler
sees as its shapes alone; one graph then serves every M. The operator's namespace is the package's name, so that a copy
under another name registers its own. Eager code calls ``linear_or_refuse`` and saves the operator's overhead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import settings
from .captures import note_operator
from .execute import log_refusal, run_or_refuse
from .operands import ALIGNMENT_BYTES, Reason, Refusal
from .ready import run_ready

NAMESPACE = __package__.replace(".", "_")
#: What a packed copy of x mends.
_LAYOUT = {Reason.INNER_STRIDE, Reason.ROW_STRIDE, Reason.ALIGNMENT}


def linear_or_refuse(x, weight, names: tuple[str, ...] | None = None):
    """y = x @ weight.T from the selected kernel, or the Refusal; leading dimensions of x count as tokens.

    x: [..., K], weight: [N, K], y: [..., N]. ``names``: families to look in, None for all. In batch-invariant mode an
    x whose layout no kernel takes is copied: there a plan serves every call or none.
    """
    y = run_ready(x, weight, names, flatten=True)
    if y is not None:
        return y
    if x.dim() == 2:
        rows = x
    elif x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return Refusal(Reason.K_MISMATCH, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}")
    else:
        rows = x.reshape(x.numel() // max(x.shape[-1], 1), x.shape[-1])
    y = run_or_refuse(rows, weight, names=names)
    if type(y) is Refusal and y.reason in _LAYOUT and settings.current().batch_invariant and not _misaligned(weight):
        y = run_or_refuse(torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows), weight, names=names)
    return y if type(y) is Refusal or x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _misaligned(weight) -> bool:
    return bool(weight.data_ptr() % ALIGNMENT_BYTES)


def storage_of(tensor):
    """The tensor as a plain one of the same storage, where it is a subclass that only adds Python attributes.

    Frameworks keep loader state on subclasses of Parameter. A subclass with a ``__torch_dispatch__`` of its own means
    something else by its storage and stays as it is.
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return tensor
    return tensor.data if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ else tensor


def _linear(x, weight, tables: str = ""):
    plain = storage_of(weight)
    y = linear_or_refuse(storage_of(x), plain, names_of(tables))
    if type(y) is not Refusal:
        note_operator(weight)
        return y
    log_refusal(x, weight, y)
    return F.linear(x, plain)


def tables_argument(names: Sequence[str] | None) -> str:
    """Families to look in, as the operator takes them: "" for all."""
    return "" if names is None else ",".join(names)


def names_of(tables: str) -> tuple[str, ...] | None:
    """The inverse of ``tables_argument``."""
    return tuple(tables.split(",")) if tables else None


def _fake(x, weight, tables: str = ""):
    torch._check(weight.dim() == 2, lambda: f"weight has {weight.dim()} dimensions")
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    of_x = gradient @ weight if ctx.needs_input_grad[0] else None
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = gradient.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1])
    return of_x, of_weight, None


# A fragment, so that a reloaded module does not collide with itself in another library object.
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, str tables='') -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::linear", _fake, lib=_LIBRARY)
torch.library.register_autograd(f"{NAMESPACE}::linear", _backward, setup_context=_setup_context, lib=_LIBRARY)

#: y[..., N] = x[..., K] @ weight[N, K].T, by the selected kernel or else by torch's own linear. ``tables``: families to
#: look in, comma-separated; "" for all. Differentiable; one graph for every M.
linear = getattr(torch.ops, NAMESPACE).linear.default
