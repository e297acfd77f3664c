"""The names of the backends: a closed set that tables, kernels and dispatch share.

Public sources call ``skinny`` "cute" and ``fused_a`` "dsv3_fused_a".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

BACKEND_NAMES: tuple[str, ...] = ("skinny", "fused_a", "split_k", "flashinfer")

#: Backends whose kernels another package brings; a table's ``optional_cells`` may name these alone.
OPTIONAL_BACKENDS: tuple[str, ...] = ("flashinfer",)


class ConfigKeys(NamedTuple):
    """The config keys that a table cell of one backend must and may name.

    ``required`` and ``optional``: values are integers > 0. ``words``: required, with the closed set of its values.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.words, *self.required, *self.optional)


#: Names alone: whether the values fit an (Arch, N, K, M) is the predicate of the backend's kernel.
CONFIG_KEYS: dict[str, ConfigKeys] = {
    "skinny": ConfigKeys(("block_size", "outputs_per_block", "k_unroll", "vector_width"), ("static_k",)),
    "fused_a": ConfigKeys((), ("row_warps", "k_warps", "row_tiles", "unroll", "trigger")),
    "split_k": ConfigKeys(
        ("rows", "token_columns", "split", "stages"), ("k_blocks", "prefetch", "trigger", "token_stages")
    ),
    # kernel: what FlashInfer calls its backend. tactic: its rule's own choice, or what its autotuner measures to be the
    # fastest when the kernel is prepared; a tactic itself cannot be given to FlashInfer's public interface.
    "flashinfer": ConfigKeys(
        words=MappingProxyType(
            {
                "kernel": ("cute-dsl", "tinygemm", "cutile", "cutlass", "cublaslt", "cudnn"),
                "tactic": ("default", "autotuned"),
            }
        )
    ),
}

#: Kernels that a branch of the KDA projection overlap can name: every backend, and one that no row of a table has.
BRANCH_CONFIG_KEYS: dict[str, ConfigKeys] = {
    **CONFIG_KEYS,
    "kda": ConfigKeys(("rows_per_warp", "row_warps", "k_warps", "vector_width")),
}
