"""The names of the backends: a closed set that tables, kernels and dispatch share.

Public sources call ``skinny`` "cute" and ``fused_a`` "dsv3_fused_a".
"""

from __future__ import annotations

from typing import NamedTuple

BACKEND_NAMES: tuple[str, ...] = ("skinny", "fused_a", "split_k", "flashinfer")


class ConfigKeys(NamedTuple):
    """The config keys that a table cell of one backend must and may name; every value is an integer > 0."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


#: Names alone: whether the values fit an (Arch, N, K, M) is the predicate of the backend's kernel. A backend
#: whose kernel is not written yet takes no keys; its kernel brings them.
CONFIG_KEYS: dict[str, ConfigKeys] = {
    "skinny": ConfigKeys(("block_size", "outputs_per_block", "k_unroll", "vector_width"), ("static_k",)),
    "fused_a": ConfigKeys((), ("row_warps", "k_warps", "row_tiles", "unroll")),
    "split_k": ConfigKeys(
        ("rows", "token_columns", "split", "stages"), ("k_blocks", "prefetch", "trigger", "token_stages")
    ),
    "flashinfer": ConfigKeys(),
}

#: Kernels that a branch of the KDA projection overlap can name: every backend, and one that no row of a table has.
BRANCH_CONFIG_KEYS: dict[str, ConfigKeys] = {
    **CONFIG_KEYS,
    "kda": ConfigKeys(("rows_per_warp", "row_warps", "k_warps", "vector_width")),
}
