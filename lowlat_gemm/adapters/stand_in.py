"""Objects that stand in for a framework's own while one of its functions runs: to change one product, and nothing else.

A function of a framework that multiplies by a layer's raw weight, among other work of its own, is called with
``Seen`` objects down to a ``Multiplied`` weight. Nothing of the function is copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class Seen:
    """``seen``, with some attributes replaced for whoever reads them here. All else is the object's own, writes too."""

    def __init__(self, seen: Any, **replaced: Any):
        self.__dict__.update(replaced, _lowlat_seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowlat_seen, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._lowlat_seen, name, value)


class Multiplied:
    """A weight [N, K] for which ``torch.mm(x, weight.t())`` asks ``gemm(x)`` first.

    ``gemm``: x [M, K] to y [M, N], or to None where torch's own is to run. Every other use is one of the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor, gemm: Callable[[torch.Tensor], torch.Tensor | None], transposed: bool = False):
        self._lowlat_tensor, self._lowlat_gemm, self._lowlat_transposed = tensor, gemm, transposed

    def t(self) -> Multiplied:
        return Multiplied(self._lowlat_tensor.t(), self._lowlat_gemm, not self._lowlat_transposed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowlat_tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.mm and len(args) == 2 and not kwargs:
            x, weight = args
            if isinstance(weight, cls) and weight._lowlat_transposed and not isinstance(x, cls):
                y = weight._lowlat_gemm(x)
                if y is not None:
                    return y
        args, kwargs = tree_map_only(cls, lambda weight: weight._lowlat_tensor, (args, kwargs or {}))
        return function(*args, **kwargs)
