"""Standing cases: shapes and token counts that no table brings, on every kernel that is written, proven or not.

They run what does not depend on a table (layouts, streams, graphs, special values, determinism), with the residual
epilogue and many tokens, through the same code as the cells of the tables.
"""

from __future__ import annotations

from typing import Any

from conformance.cases import SPLIT_K_CONFIGS, Case
from lowlat_gemm.arch import Arch
from lowlat_gemm.dispatch import PlanEntry
from lowlat_gemm.kernels import fused_a, skinny, split_k
from lowlat_gemm.kernels.registry import every_backend
from lowlat_gemm.tables import Cell, Provenance

#: (N, K, M, residual). The last one ends in every tail: N and K of no tile, K of no 32.
STANDING = [
    (1536, 7168, 1, True),
    (1536, 7168, 2, True),
    (2304, 1536, 9, True),
    (2304, 1536, 16, False),
    (104, 1032, 5, True),
]

#: (N, K) of language-model heads: Kimi-K3's at TP 8, and whole, whose weight has more than 2^31 bytes.
LM_HEADS = [(20480, 7168), (163840, 7168)]


def _split_k_config(arch: Arch, n: int, k: int, m: int, residual: bool) -> split_k.SplitKConfig | None:
    """The first config whose tile holds the tokens, with several ranks."""
    for config in SPLIT_K_CONFIGS:
        if (
            config.split > 1
            and config.token_columns >= m
            and split_k.why_not(arch, n, k, m, config, residual=residual) is None
        ):
            return config
    return None


#: kernel -> (arch, N, K, M, residual) -> a config for a shape that no table names, or None. A kernel that is written
#: and is not here fails the static tests.
DEFAULT_CONFIGS = {
    skinny.NAME: lambda arch, n, k, m, residual: skinny.default_config(arch, n, k, m, residual=residual),
    fused_a.NAME: lambda arch, n, k, m, residual: fused_a.FusedAConfig(),
    split_k.NAME: _split_k_config,
}


def standing_case(kernel: str, arch: Arch, n: int, k: int, m: int, residual: bool, config: Any = None) -> Case | None:
    """One case on ``kernel`` with ``config`` or its default; None where the kernel's predicate refuses it."""
    backend = every_backend()[kernel]
    config = config or DEFAULT_CONFIGS[kernel](arch, n, k, m, residual)
    if config is None or backend.why_not(arch, n, k, m, config, residual=residual) is not None:
        return None
    unit = backend.compile_unit(arch, n, k, m, config, residual=residual)
    values = {name: value for name, value in vars(config).items() if value is not None}
    cell = Cell(kernel, values, Provenance("public", source="none: a standing case"))
    return Case("standing", arch, n, k, m, residual, cell, PlanEntry(m, residual, cell, config, unit))


def standing_cases(arch: Arch) -> list[Case]:
    """``STANDING`` on every kernel."""
    found = [standing_case(kernel, arch, *shape) for kernel in every_backend() for shape in STANDING]
    return [case for case in found if case is not None]


def lm_head_cases(arch: Arch) -> list[Case]:
    """``LM_HEADS`` at one and at several tokens on every kernel."""
    found = [
        standing_case(kernel, arch, n, k, m, False) for kernel in every_backend() for n, k in LM_HEADS for m in (1, 8)
    ]
    return [case for case in found if case is not None]
