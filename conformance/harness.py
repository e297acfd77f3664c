"""Operands that betray a kernel: inputs inside NaN-filled storage, outputs inside a storage of canaries."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from conformance.seed import SEED
from lowlat_gemm.reference import Reference, reference_gemm
from lowlat_gemm.tables import MAX_TOKENS

#: A NaN bit pattern that no kernel computes, in 16-bit storage.
CANARY = 0x7FA5
#: Rows of poison before and after a matrix, and least elements of it behind each row where there is a pitch.
GUARD_ROWS = 2


def poisoned(values: torch.Tensor, pitch: int | None = None, offset: int = 0) -> torch.Tensor:
    """A copy of ``values`` [rows, columns] with row stride ``pitch`` inside NaN-filled storage.

    ``offset``: elements of poison before the first column of every row. A kernel that reads one element too many
    brings a NaN home. The last row ends the storage only if ``pitch`` leaves nothing behind it.
    """
    rows, columns = values.shape
    pitch = columns + offset if pitch is None else pitch
    assert pitch >= columns + offset, f"pitch {pitch} does not hold {offset} + {columns} columns"
    storage = torch.full((rows + 2 * GUARD_ROWS, pitch), float("nan"), dtype=values.dtype, device=values.device)
    view = storage[GUARD_ROWS : GUARD_ROWS + rows, offset : offset + columns]
    view.copy_(values)
    return view


class CanaryOutput:
    """An output ``y`` [m, n] of 16-bit elements with row stride ``pitch``, inside a storage of canaries."""

    def __init__(self, m: int, n: int, dtype: torch.dtype, device, pitch: int | None = None):
        self.m, self.n, self.pitch = m, n, pitch or n
        self.storage = torch.full((m + 2 * GUARD_ROWS, self.pitch), CANARY, dtype=torch.int16, device=device)
        self.y = self.storage.view(dtype)[GUARD_ROWS : GUARD_ROWS + m, :n]

    def problem(self) -> str | None:
        """What was written that should not be, or not written that should; None when all is well."""
        is_canary = self.storage == CANARY
        inside = torch.zeros_like(is_canary)
        inside[GUARD_ROWS : GUARD_ROWS + self.m, : self.n] = True
        unwritten, trespassed = int((is_canary & inside).sum()), int((~is_canary & ~inside).sum())
        if unwritten or trespassed:
            return f"{unwritten} elements of y not written, {trespassed} elements around it overwritten"
        return None


@dataclass(frozen=True)
class Operands:
    """Operands of one (N, K) for up to ``tokens`` tokens, with FP64 references; fewer tokens are the first rows."""

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    plain: Reference
    added: Reference

    def reference(self, m: int, residual: bool) -> Reference:
        assert m <= len(self.x), f"operands for {len(self.x)} tokens, asked for {m}"
        return (self.added if residual else self.plain).rows(m)


#: Two shapes' worth stays on the device: cases of one shape follow one another.
@functools.lru_cache(maxsize=2)
def operands(
    n: int, k: int, kind: str, tokens: int = MAX_TOKENS, device: str = "cuda", dtype=torch.bfloat16
) -> Operands:
    """Fresh operands: ``kind`` "random" (normal) or "integer" (-1, 0, 1: every FP32 sum is exact).

    ``tokens``: by default as many as a cell of a table can have, so that its first M rows are M rows.
    """
    generator = torch.Generator(device).manual_seed(SEED + n * 1_000_003 + k)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        if kind == "integer":
            return torch.randint(-1, 2, (rows, columns), generator=generator, device=device).to(dtype)
        return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

    x, weight, residual = matrix(tokens, k), matrix(n, k), matrix(tokens, n)
    plain = reference_gemm(x, weight)
    return Operands(x, weight, residual, plain, plain.plus(residual))
