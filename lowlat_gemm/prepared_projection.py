"""Split-K by tactic: the code of one (``compile_projection``), a weight with one for each batch size. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from . import execute
from .arch import Arch, device_properties, resolve_arch
from .captures import WeightPlace
from .kernels import split_k
from .kernels.split_k import SplitKConfig
from .projection import OwnedWeight, dtype_name, token_count
from .tensor_map import matrix_view, weight_map

_OUTPUT_DTYPES = (torch.bfloat16, torch.float32)

#: (rows, token_columns, split, stages), or the config with everything that it has besides.
Tactic = Sequence[int] | SplitKConfig


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


def compile_projection(
    tactic: Tactic,
    output_dtype: torch.dtype,
    arch: str | Arch | None,
    input_dtype: torch.dtype = torch.bfloat16,
    *,
    residual: bool = False,
):
    """The compiled split-K kernel of a tactic: ``kernel(x, weight, residual | None, y, stream)``, for every M, N and K.

    Code alone (no weight, tensor map or pointer), one object in a process. ``arch``: a name or ``Arch``, None for the
    current CUDA device. Compile it before graph capture: inside, NotCompiledError. ValueError for a tactic that the
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
    problem = split_k.config_problem(found, config, residual=residual)
    if problem is not None:
        raise ValueError(f"invalid tactic {tactic!r} on {found}: {problem}")
    # The unit is the same for every shape.
    dtypes = {"dtype": dtype_name(input_dtype), "output_dtype": dtype_name(output_dtype)}
    unit = split_k.compile_unit(found, 1, 8, 1, config, residual=residual, **dtypes)
    return execute.kernels_of([unit])[0]


class PreparedProjection(OwnedWeight):
    """y = x @ weight.T (+ residual) on split-K, a tactic for each prepared token count, outputs that the caller owns.

    weight: [N, K], BF16 or FP16 on CUDA, a row pitch of whole 16-byte words. ``policies``: {tokens: tactic}, a tactic
    being (rows, token columns, split, stages) or a ``SplitKConfig``. ``residual``: whether ``run`` adds one.

    Tokens are rows of a padded batch: padding rows are input like any other, and masking what comes of them is the
    caller's. A token's bits depend on the split of the policy and on nothing else. The weight may be written in place,
    or get other storage of the same shape, dtype and device: every launch reads it where it is; a graph that was
    captured before still reads the old storage, and ``stale()`` says so. The switches of dispatch (LOWLAT_GEMM_DISABLE
    and the others) do not apply: there is nothing to fall back to.

    On SM90 this is the wgmma kernel. From SM100 on it is the tcgen05 kernel, which no hardware has run yet: dispatch
    leaves it out, and making this object asks for it all the same.

    ValueError, naming what was found, for another weight, an output dtype other than BF16 or FP32, no policy, a token
    count below 1, a tactic that cannot serve the shape, and a device that is not on the list.
    """

    def __init__(
        self,
        weight,
        policies: Mapping[int, Tactic],
        *,
        output_dtype: torch.dtype = torch.bfloat16,
        residual: bool = False,
    ):
        super().__init__(weight)
        _check_output_dtype(output_dtype)
        if not policies:
            raise ValueError("expected a tactic for one token count or more, found no policies")
        self.output_dtype, self.residual = output_dtype, residual
        self.configs: dict[int, SplitKConfig] = {}
        for tokens, tactic in policies.items():
            config = _config(tactic)
            problem = split_k.why_not(self.arch, self.n, self.k, token_count(tokens), config, residual=residual)
            if problem is not None:
                raise ValueError(f"invalid tactic {tactic!r} for {tokens} tokens of {self.n}x{self.k}: {problem}")
            self.configs[tokens] = config
        self._kernels = {}
        self._maps = {}

    def prepare(self) -> PreparedProjection:
        """Compiles every policy and makes the tensor maps of their rows, on the weight's device; returns self.

        To be called before graph capture: inside, what is not compiled yet raises NotCompiledError.
        """
        self.weight_now()
        with torch.cuda.device(self.weight.device.index):
            kernels = {
                tokens: compile_projection(
                    config, self.output_dtype, self.arch, self.weight.dtype, residual=self.residual
                )
                for tokens, config in self.configs.items()
            }
            for rows in {config.rows for config in self.configs.values()}:
                self.weight_map(rows)
        self._kernels = kernels
        return self

    def weight_map(self, rows: int):
        """The device's tensor map of the weight with boxes of ``rows`` rows (see ``tensor_map.weight_map``).

        The same tensor as long as the weight keeps its storage and strides; another is uploaded on the current stream,
        which must not be captured then (RuntimeError).
        """
        weight = self.weight_now()
        kept = self._maps.get(rows)
        if kept is None or not kept[0].is_of(weight):
            kept = self._maps[rows] = (WeightPlace(weight), weight_map(weight, rows))
        return kept[1]

    def run(self, x, out, residual=None):
        """Writes y into ``out`` and returns it.

        x: [M, K] for a prepared M, of the weight's dtype and device, rows of whole 16-byte words. out, and the residual
        where the object was made for one: [M, N] of the output dtype on that device, rows of unit stride and any pitch.
        out shares no memory with x and weight, and with the residual only where it is the same matrix. ValueError,
        naming what was found, for anything else.
        """
        weight = self.checked(x)
        tokens = x.shape[0]
        kernel = self._kernels.get(tokens)
        if kernel is None:
            prepared = ", ".join(map(str, sorted(self._kernels))) or "none: call prepare() first"
            raise ValueError(f"projection {self.n}x{self.k}: {tokens} tokens; prepared are {prepared}")
        if self.residual != (residual is not None):
            raise ValueError(
                f"projection {self.n}x{self.k}: run with{'' if residual is not None else 'out'} a residual; "
                f"it was made with residual={self.residual}"
            )
        self._check_like_y("out", out, x)
        if residual is not None:
            self._check_like_y("residual", residual, x)
        added = None if residual is None else matrix_view(residual, output=True)
        self.launch(kernel, x, weight, added, matrix_view(out, output=True))
        return out

    def _check_like_y(self, name: str, tensor, x) -> None:
        tokens = x.shape[0]
        if tuple(tensor.shape) != (tokens, self.n) or tensor.dtype != self.output_dtype or tensor.device != x.device:
            raise ValueError(
                f"projection {self.n}x{self.k}: expected {name} [{tokens}, {self.n}] of {self.output_dtype} on "
                f"{x.device}, found {list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
