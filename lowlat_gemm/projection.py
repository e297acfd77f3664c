"""Projections that own their kernels: compiled when the object is made, launched by token count. Needs torch.

Dispatch runs what a table measured and falls back otherwise. These objects are an explicit request: shapes that no
table has run as well, by configs that the shape chooses, and what cannot run is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from . import execute
from . import settings as settings_module
from .arch import Arch, arch_of_device, device_properties
from .captures import Captures
from .dispatch import disabled_refusal, plan_for
from .kernels import skinny, split_k
from .kernels.compile_cache import CompileUnit
from .operands import check_operands
from .tables import TableError
from .tensor_map import check_projection_weight, matrix_view

#: Token counts that ``Projection`` runs on skinny.
SKINNY_TOKENS = (1, 2, 4)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as compile units have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def token_count(tokens) -> int:
    """``tokens``, or ValueError."""
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"expected token counts of 1 and more, found {tokens!r}")
    return tokens


def _arch_of(weight) -> Arch:
    arch = arch_of_device(weight.device.index)
    if arch is None:
        raise ValueError(f"no kernels for {device_properties(weight.device.index)}, where the weight is")
    return arch


class OwnedWeight:
    """A weight [N, K] whose shape, dtype and device the kernels were chosen for; its storage may move."""

    def __init__(self, weight):
        check_projection_weight(weight)
        self.weight = weight
        self.n, self.k = weight.shape
        self.arch = _arch_of(weight)
        self._made_for = (weight.shape, weight.dtype, weight.device)
        self._captures = Captures()

    def weight_now(self):
        """The weight as kernels take it, where it is now. ValueError if it has become another one."""
        weight = self.weight
        if (weight.shape, weight.dtype, weight.device) != self._made_for:
            shape, dtype, device = self._made_for
            raise ValueError(
                f"the weight is now {weight.dtype} {tuple(weight.shape)} on {weight.device}; "
                f"prepared was {dtype} {tuple(shape)} on {device}"
            )
        # A single row may have any stride, a tensor map only whole 16-byte words.
        return matrix_view(weight) if self.n == 1 else weight

    def stale(self) -> bool:
        """Whether a CUDA graph captured with this object reads the weight where it no longer is.

        Such a graph computes with the old storage, freed or not, and has to be captured again, after
        ``forget_captures()``. A weight that was written in place is not stale, nor are launches outside of graphs.
        """
        return self._captures.stale(self.weight)

    def forget_captures(self) -> None:
        """Says that the graphs captured so far are gone; those captured from now on count."""
        self._captures.forget()

    def checked(self, x):
        """The weight as kernels take it. ValueError unless x [M, K] is an input for it."""
        weight = self.weight_now()
        refusal = check_operands(x, weight, pitched_weight=True)
        if refusal is not None:
            raise ValueError(f"projection {self.n}x{self.k}: {refusal}")
        return weight

    def launch(self, kernel, x, weight, residual=None, out=None):
        """``execute.launch``; one that a capture has taken in counts for ``stale``, one that was refused does not."""
        y = execute.launch(kernel, x, weight, residual, out)
        self._captures.note(self.weight)
        return y


class Projection(OwnedWeight):
    """y = x @ weight.T for 1, 2 or 4 tokens on skinny, compiled for this K, and for ``split_k_tokens`` on split-K.

    weight: [N, K], BF16 or FP16 on CUDA, a row pitch of whole 16-byte words. Everything compiles here, before capture.
    Configs are those of the tables' cells for (N, K) and the token count where there are such, else the defaults by
    shape of ``skinny`` and ``split_k``; skinny's serves a token count where K % (block_size * 8) and N % outputs are 0.
    A token count whose kernel cannot serve the shape, or is on the deny list, is not supported, and none is with
    LOWLAT_GEMM_DISABLE or in batch-invariant mode, since kernels differ over the counts: the caller runs its own GEMM.

    From SM100 on split-K is the tcgen05 kernel, which no hardware has run yet: dispatch leaves it out, and here it runs
    only because ``split_k_tokens`` asks for it. ValueError for another weight, a device that is not on the list, or a
    token count below 1.
    """

    def __init__(self, weight, split_k_tokens: Iterable[int] = ()):
        super().__init__(weight)
        units = {tokens: self._skinny_unit(tokens) for tokens in SKINNY_TOKENS}
        for tokens in map(token_count, split_k_tokens):
            units[tokens] = self._split_k_unit(tokens) or units.get(tokens)
        off = disabled_refusal() is not None or settings_module.current().batch_invariant
        units = {} if off else {tokens: unit for tokens, unit in sorted(units.items()) if unit is not None}
        with torch.cuda.device(weight.device.index):
            self._kernels = dict(zip(units, execute.kernels_of(units.values())))

    def _cell(self, kernel: str, tokens: int) -> Mapping[str, int] | None:
        """The config that a table has for this shape and token count, if it is one of ``kernel``."""
        try:
            plan = plan_for(self.arch, self.n, self.k)
        except TableError:  # dispatch says so; a damaged table must not take a server down
            return None
        entry = None if plan is None else plan.entry(tokens, False)
        return None if entry is None or entry.cell.backend != kernel else entry.cell.config

    def _skinny_unit(self, tokens: int) -> CompileUnit | None:
        if settings_module.current().denied(skinny.NAME, self.n, self.k, tokens):
            return None
        cell = self._cell(skinny.NAME, tokens)
        if cell is not None:
            config = skinny.parse_config(cell)
        else:
            config = skinny.default_config(self.arch, self.n, self.k, tokens)
            if config is None or self.k % (config.block_size * 8) or self.n % config.outputs_per_block:
                return None
        config = skinny.with_static_k(self.arch, config, self.k)
        if skinny.why_not(self.arch, self.n, self.k, tokens, config) is not None:
            return None
        dtype = dtype_name(self.weight.dtype)
        return skinny.compile_unit(self.arch, self.n, self.k, tokens, config, dtype=dtype)

    def _split_k_unit(self, tokens: int) -> CompileUnit | None:
        if settings_module.current().denied(split_k.NAME, self.n, self.k, tokens):
            return None
        cell = self._cell(split_k.NAME, tokens)
        if cell is not None:
            config = split_k.parse_config(cell)
        else:
            sm_count = device_properties(self.weight.device.index).sm_count
            config = split_k.default_config(self.arch, self.n, self.k, tokens, sm_count)
        if config is None or split_k.why_not(self.arch, self.n, self.k, tokens, config) is not None:
            return None
        return split_k.compile_unit(self.arch, self.n, self.k, tokens, config, dtype=dtype_name(self.weight.dtype))

    def supports(self, tokens: int) -> bool:
        """Whether ``self(x)`` takes an x of so many rows."""
        return tokens in self._kernels

    def __call__(self, x):
        """y [M, N], packed, of x's dtype. x: [M, K], of the weight's dtype and device, rows of whole 16-byte words.

        ValueError, naming what was found, for another x, and for an M that is not supported, with those that are.
        """
        weight = self.checked(x)
        kernel = self._kernels.get(x.shape[0])
        if kernel is None:
            served = ", ".join(map(str, self._kernels)) or "none"
            raise ValueError(f"projection {self.n}x{self.k}: {x.shape[0]} tokens; supported are {served}")
        return self.launch(kernel, x, weight)
