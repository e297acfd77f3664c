"""The short way of a call: everything that a launch depends on, asked in its cheapest form. Needs torch.

A call that was served once is served again as long as the same questions have the same answers; ``execute.py`` asks
them one by one and says what is wrong. Here they are asked for a yes alone: ``run_ready`` launches when all of them are
answered yes, and gives None for anything else, also for what the long way would serve after all. It decides nothing:
a kernel gets into the table when the long way has served that device, (N, K) and M under the current settings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import settings as settings_module
from .dispatch import TABLE_DTYPE
from .operands import ALIGNMENT_BYTES, is_freed

_DTYPE = getattr(torch, TABLE_DTYPE)
_MISALIGNED = ALIGNMENT_BYTES - 1
#: A freed tensor's address is its offset, which is below in any storage under a terabyte; most memory is above, and is
#: spared the second look.
_SURELY_MEMORY = 1 << 40

# Bound once: each lookup through a package costs as much as the question.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_forward_ad = torch.autograd.forward_ad
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_is_autocast_enabled = torch.is_autocast_enabled  # without an argument: CUDA's, at a third of the cost
_is_grad_enabled = torch.is_grad_enabled


#: Most kernels at a time. In batch-invariant mode each M of a prefill adds one.
LIMIT = 4096


class ReadyKernels:
    """Compiled kernels of calls that were served, by (families, device, N, K, M), all under one ``Settings``.

    A full table starts anew: the next call of each goes the long way once.
    """

    def __init__(self) -> None:
        # One object, exchanged whole: a thread must not see the kernels of other settings.
        self.state: tuple[object, dict[tuple, Callable]] = (None, {})

    def add(self, settings, names: tuple[str, ...] | None, device: torch.device, n: int, k: int, m: int, kernel) -> None:
        """``kernel`` serves packed rows of M tokens on ``device``: x [M, K], weight [N, K], no residual.

        ``settings``: those that the call was decided under; they may have changed while its kernel was compiled.
        """
        state = self.state
        if state[0] is not settings or len(state[1]) >= LIMIT:
            state = self.state = (settings, {})
        state[1][names, device, n, k, m] = kernel

    def cache_clear(self) -> None:
        self.state = (None, {})


READY = ReadyKernels()


def run_ready(x, weight, names: tuple[str, ...] | None = None, *, flatten: bool = False) -> torch.Tensor | None:
    """y [M, N] where this very call is known to be servable, else None.

    ``flatten``: leading dimensions of x count as tokens, and y has them. Contiguous operands alone are taken: for K
    above 1 that means rows of unit stride and, for more than one row, a pitch of K, which the operand contract asks for.
    """
    if _is_compiling():  # before anything that a compiler would trace
        return None
    settings, kernels = READY.state
    if (
        settings is not settings_module._current
        or _is_tracing()
        or _dispatch_modes()
        or _transforms()
        or _forward_ad._current_level >= 0
        or (_is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not _DTYPE)
        or (type(x) is not _Tensor and type(x) is not _Parameter)
        or (type(weight) is not _Parameter and type(weight) is not _Tensor)
    ):
        return None
    try:
        shape, device, x_at, weight_at = x.shape, x.device, x.data_ptr(), weight.data_ptr()
        n, k = weight.shape
        if (
            x.dtype is not _DTYPE
            or weight.dtype is not _DTYPE
            or weight.device != device
            or not shape
            or shape[-1] != k
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or (x_at | weight_at) & _MISALIGNED
            or (x_at < _SURELY_MEMORY and is_freed(x))
            or (weight_at < _SURELY_MEMORY and is_freed(weight))
        ):
            return None
    except (RuntimeError, ValueError):  # a nested, sparse or opaque tensor has no such thing, nor a vector two extents
        return None
    is_matrix = len(shape) == 2
    if not is_matrix and not flatten:
        return None
    m = shape[0] if is_matrix else x.numel() // k if k else 0
    kernel = kernels.get((names, device, n, k, m))
    if kernel is None or (_is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return None
    if m == 1 and is_matrix and x.stride(0) != k:
        return None  # contiguous by name; the long way gives the kernel a stride that a tensor map can have
    rows = x if is_matrix else x.view(m, k)
    y = rows.new_empty(m, n)
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch._C._cuda_getDevice():
        kernel(rows, weight, None, y, stream)
    else:
        with torch.cuda.device(index):
            kernel(rows, weight, None, y, stream)
    return y if is_matrix else y.view(*shape[:-1], n)
