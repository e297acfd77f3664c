"""Projections that own their kernels: compiled when the object is made, launched by token count afterwards. Needs torch.

Dispatch runs what a table measured and falls back otherwise. These objects are an explicit request: shapes that no
table has run as well, by configs that the shape chooses, and what cannot run is a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from . import execute
from . import settings as settings_module
from .arch import Arch, arch_of_device, device_properties, resolve_arch
from .dispatch import disabled_refusal, plan_for
from .kernels import skinny, split_k
from .kernels.compile_cache import CompileUnit
from .kernels.split_k import SplitKConfig
from .operands import check_operands, overlap
from .tables import TableError
from .tensor_map import check_projection_weight, matrix_view, weight_map

#: Token counts that ``Projection`` runs on skinny.
SKINNY_TOKENS = (1, 2, 4)

_OUTPUT_DTYPES = (torch.bfloat16, torch.float32)

#: (rows, token_columns, split, stages), or the config with everything that it has besides.
Tactic = Sequence[int] | SplitKConfig


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _config(tactic: Tactic) -> SplitKConfig:
    if isinstance(tactic, SplitKConfig):
        return tactic
    try:
        rows, token_columns, split, stages = tactic
        return split_k.parse_config(dict(rows=rows, token_columns=token_columns, split=split, stages=stages))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"invalid tactic {tactic!r}: expected (rows, token columns, split, stages) or a SplitKConfig ({error})"
        ) from None


def _check_output_dtype(dtype: torch.dtype) -> None:
    if dtype not in _OUTPUT_DTYPES:
        raise ValueError(f"expected an output of BF16 or FP32, found {dtype}")


def _arch_of(weight) -> Arch:
    arch = arch_of_device(weight.device.index)
    if arch is None:
        raise ValueError(f"no kernels for {device_properties(weight.device.index)}, where the weight is")
    return arch


def compile_projection(
    tactic: Tactic, output_dtype: torch.dtype, arch: str | Arch | None, input_dtype: torch.dtype = torch.bfloat16
):
    """The compiled split-K kernel of a tactic: ``kernel(x, weight, None, y, stream)``, for every M, N and K.

    Code alone (no weight, tensor map or pointer), one object in a process. ``arch``: a name or ``Arch``, None for the
    current CUDA device. Compile it before graph capture: inside, CaptureError. ValueError for a tactic that the
    generation cannot run, an output other than BF16 or FP32, an input other than BF16 or FP16, an unknown arch.
    CompileError and ImportError where there is no compiler to compile it. From SM100 on see ``PreparedProjection``.
    """
    found = resolve_arch(arch)
    if found is None:
        raise ValueError(f"no kernels for {device_properties(torch.cuda.current_device())}, the current device")
    if input_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"expected an input of BF16 or FP16, found {input_dtype}")
    _check_output_dtype(output_dtype)
    config = _config(tactic)
    problem = split_k.config_problem(found, config)
    if problem is not None:
        raise ValueError(f"invalid tactic {tactic!r} on {found}: {problem}")
    # The unit is the same for every shape.
    unit = split_k.compile_unit(found, 1, 8, 1, config, dtype=_name(input_dtype), output_dtype=_name(output_dtype))
    return execute.kernels_of([unit])[0]


class _OwnedWeight:
    """A weight [N, K] whose shape, dtype and device the kernels were chosen for; its storage may move."""

    def __init__(self, weight):
        check_projection_weight(weight)
        self.weight = weight
        self.n, self.k = weight.shape
        self.arch = _arch_of(weight)
        self._made_for = (weight.shape, weight.dtype, weight.device)

    def _weight_now(self):
        weight = self.weight
        if (weight.shape, weight.dtype, weight.device) != self._made_for:
            shape, dtype, device = self._made_for
            raise ValueError(
                f"the weight is now {weight.dtype} {tuple(weight.shape)} on {weight.device}; "
                f"prepared was {dtype} {tuple(shape)} on {device}"
            )
        # A single row may have any stride, a tensor map only whole 16-byte words.
        return matrix_view(weight) if self.n == 1 else weight

    def _checked(self, x):
        """The weight as kernels take it. ValueError unless x [M, K] is an input for it."""
        weight = self._weight_now()
        refusal = check_operands(x, weight, pitched_weight=True)
        if refusal is not None:
            raise ValueError(f"projection {self.n}x{self.k}: {refusal}")
        return weight


class Projection(_OwnedWeight):
    """y = x @ weight.T for 1, 2 or 4 tokens on skinny, compiled for this K, and for ``split_k_tokens`` on split-K.

    weight: [N, K], BF16 or FP16 on CUDA, a row pitch of whole 16-byte words. Everything compiles here, before capture.
    Configs are those of the tables' cells for (N, K) and the token count where there are such, else the defaults by shape
    of ``skinny`` and ``split_k``; skinny's default serves a token count where K % (block_size * 8) and N % outputs are 0.
    A token count whose kernel cannot serve the shape, or is on the deny list, is not supported, and none is with
    LOWLAT_GEMM_DISABLE or in batch-invariant mode, since kernels differ over the counts: the caller runs its own GEMM.

    From SM100 on split-K is the tcgen05 kernel, which no hardware has run yet: dispatch leaves it out, and here it runs
    only because ``split_k_tokens`` asks for it. ValueError for another weight, a device that is not on the list, or a
    token count below 1.
    """

    def __init__(self, weight, split_k_tokens: Iterable[int] = ()):
        super().__init__(weight)
        units = {tokens: self._skinny_unit(tokens) for tokens in SKINNY_TOKENS}
        for tokens in map(_token_count, split_k_tokens):
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
        dtype = _name(self.weight.dtype)
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
        return split_k.compile_unit(self.arch, self.n, self.k, tokens, config, dtype=_name(self.weight.dtype))

    def supports(self, tokens: int) -> bool:
        """Whether ``self(x)`` takes an x of so many rows."""
        return tokens in self._kernels

    def __call__(self, x):
        """y [M, N], packed, of x's dtype. x: [M, K], of the weight's dtype and device, rows of whole 16-byte words.

        ValueError, naming what was found, for another x, and for an M that is not supported, with those that are.
        """
        weight = self._checked(x)
        kernel = self._kernels.get(x.shape[0])
        if kernel is None:
            served = ", ".join(map(str, self._kernels)) or "none"
            raise ValueError(f"projection {self.n}x{self.k}: {x.shape[0]} tokens; supported are {served}")
        return execute.launch(kernel, x, weight)


def _token_count(tokens) -> int:
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"expected token counts of 1 and more, found {tokens!r}")
    return tokens


class PreparedProjection(_OwnedWeight):
    """y = x @ weight.T on split-K, with a tactic for each prepared token count and outputs that the caller owns.

    weight: [N, K], BF16 or FP16 on CUDA, a row pitch of whole 16-byte words. ``policies``: {tokens: tactic}, a tactic
    being (rows, token columns, split, stages) or a ``SplitKConfig``. Tokens are rows of a padded batch: padding rows are
    input like any other, and masking what comes of them is the caller's. A token's bits depend on the split of the
    policy and on nothing else. The weight may be written in place, or get other storage of the same shape, dtype and
    device: every launch reads it where it is; a graph that was captured before still reads the old storage.
    The switches of dispatch (LOWLAT_GEMM_DISABLE and the others) do not apply: there is nothing to fall back to.

    On SM90 this is the wgmma kernel. From SM100 on it is the tcgen05 kernel, which no hardware has run yet: dispatch
    leaves it out, and making this object asks for it all the same.

    ValueError, naming what was found, for another weight, an output dtype other than BF16 or FP32, no policy, a token
    count below 1, a tactic that cannot serve the shape, and a device that is not on the list.
    """

    def __init__(self, weight, policies: Mapping[int, Tactic], *, output_dtype: torch.dtype = torch.bfloat16):
        super().__init__(weight)
        _check_output_dtype(output_dtype)
        if not policies:
            raise ValueError("expected a tactic for one token count or more, found no policies")
        self.output_dtype = output_dtype
        self.configs: dict[int, SplitKConfig] = {}
        for tokens, tactic in policies.items():
            config = _config(tactic)
            problem = split_k.why_not(self.arch, self.n, self.k, _token_count(tokens), config)
            if problem is not None:
                raise ValueError(f"invalid tactic {tactic!r} for {tokens} tokens of {self.n}x{self.k}: {problem}")
            self.configs[tokens] = config
        self._kernels = {}
        self._maps = {}

    def prepare(self) -> PreparedProjection:
        """Compiles every policy and makes the tensor maps of their rows, on the weight's device; returns self.

        To be called before graph capture: inside, what is not compiled yet raises CaptureError.
        """
        self._weight_now()
        with torch.cuda.device(self.weight.device.index):
            kernels = {
                tokens: compile_projection(config, self.output_dtype, self.arch, self.weight.dtype)
                for tokens, config in self.configs.items()
            }
            for rows in {config.rows for config in self.configs.values()}:
                self.weight_map(rows)
        self._kernels = kernels
        return self

    def weight_map(self, rows: int):
        """The device's tensor map of the weight with boxes of ``rows`` rows (see ``tensor_map.weight_map``).

        The same tensor as long as the weight keeps its storage and strides; a new one is uploaded on the current stream.
        """
        weight = self._weight_now()
        where = (weight.data_ptr(), weight.stride())
        kept = self._maps.get(rows)
        if kept is None or kept[0] != where:
            kept = self._maps[rows] = (where, weight_map(weight, rows))
        return kept[1]

    def run(self, x, out):
        """Writes y into ``out`` and returns it.

        x: [M, K] for a prepared M, of the weight's dtype and device, rows of whole 16-byte words. out: [M, N] of the
        output dtype on that device, rows of unit stride and any pitch, apart from x and weight in memory. ValueError,
        naming what was found, for anything else.
        """
        weight = self._checked(x)
        tokens = x.shape[0]
        kernel = self._kernels.get(tokens)
        if kernel is None:
            prepared = ", ".join(map(str, sorted(self._kernels))) or "none: call prepare() first"
            raise ValueError(f"projection {self.n}x{self.k}: {tokens} tokens; prepared are {prepared}")
        if tuple(out.shape) != (tokens, self.n) or out.dtype != self.output_dtype or out.device != x.device:
            raise ValueError(
                f"projection {self.n}x{self.k}: expected out [{tokens}, {self.n}] of {self.output_dtype} on {x.device}, "
                f"found {list(out.shape)} of {out.dtype} on {out.device}"
            )
        y = matrix_view(out, output=True)
        for name, operand in (("x", x), ("the weight", weight)):
            if overlap(y, operand):
                raise ValueError(f"projection {self.n}x{self.k}: out shares memory with {name}")
        execute.launch(kernel, x, weight, None, y)
        return out
