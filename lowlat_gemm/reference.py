"""The FP64 oracle and the elementwise bound that every kernel's result is judged by.

    |out - ref| <= half a unit in the last place of the output type at ref + FP32 accumulation

where ref is the product of the given (already rounded) operands in FP64. The accumulation term is
``accumulation_factor(K) * 2**-24 * (sum |x||w| + |residual|)``, elementwise. The factor stands for the order of
the additions: any order of K rounded FP32 additions stays under K, but a kernel adds in many short chains, and the
errors of those do not all point one way. ``2 * sqrt(K) + 16`` covers chains of that many additions in the
worst case, and longer ones by the usual probabilistic argument (Higham & Mary, "A new approach to probabilistic rounding error analysis", 2019), while being
small enough beside half an ulp that partial sums kept in bf16 are caught.

Cosine similarity and norms over the whole matrix are no tests: one wrong element disappears in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FP32_UNIT_ROUNDOFF = 2.0**-24
#: Explicit bits of the significand and least exponent of a normal number, by output dtype.
_FORMATS = {"bfloat16": (7, -126), "float16": (10, -14), "float32": (23, -126)}


def accumulation_factor(k: int) -> float:
    """How many FP32 unit roundoffs, relative to sum |x||w|, a dot product of length ``k`` may be off."""
    return 2.0 * math.sqrt(k) + 16.0


@dataclass(frozen=True)
class Reference:
    """FP64 ``value`` [M, N] and ``magnitude`` [M, N] = sum |x||w| + |residual|, for a dot length of ``k``."""

    value: "torch.Tensor"
    magnitude: "torch.Tensor"
    k: int

    def plus(self, residual) -> "Reference":
        """The reference with ``residual`` [M, N] added to the product before it is rounded."""
        wide = residual.double()
        return Reference(self.value + wide, self.magnitude + wide.abs(), self.k)

    def rows(self, m: int) -> "Reference":
        """The reference of the first ``m`` tokens: rows do not depend on one another."""
        return Reference(self.value[:m], self.magnitude[:m], self.k)


@dataclass(frozen=True)
class ParityReport:
    """Elementwise verdict.

    ``worst_share``: largest |out - ref| as a share of what is allowed at its element; at most 1 exactly when every
    element is right, NaN where one is. ``worst_ulps``: largest |out - ref| in units in the last place of the output
    type at the element itself. Where the terms of a dot product cancel, the unit is that of the small remainder while
    the FP32 accumulation erred by the terms: right results may have thousands of units there.
    """

    ok: bool
    elements: int
    bad: int
    worst_ulps: float
    worst_share: float
    first_bad: str | None

    def __str__(self) -> str:
        if self.ok:
            return f"{self.elements} elements within the bound, worst at {self.worst_share:.3f} of it"
        return f"{self.bad} of {self.elements} elements outside the bound; first {self.first_bad}"


def reference_gemm(x, weight, residual=None, *, chunk_rows: int = 4096) -> Reference:
    """x [M, K] @ weight [N, K].T (+ residual [M, N]) in FP64 on the operands' device.

    ``chunk_rows``: rows of the weight converted to FP64 at a time, to bound the memory of a large LM head.
    """
    import torch

    x64 = x.double()
    x_abs = x64.abs()
    values, magnitudes = [], []
    for rows in weight.split(chunk_rows):
        w64 = rows.double()
        values.append(x64 @ w64.T)
        magnitudes.append(x_abs @ w64.abs().T)
    product = Reference(torch.cat(values, dim=1), torch.cat(magnitudes, dim=1), x.shape[1])
    return product if residual is None else product.plus(residual)


def ulp(value, dtype) -> "torch.Tensor":
    """The unit in the last place of ``dtype`` at each element of the FP64 tensor ``value``, as FP64."""
    import torch

    bits, least = _FORMATS[str(dtype).removeprefix("torch.")]
    _, exponent = torch.frexp(value)  # value = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = torch.where(value == 0, least, torch.clamp(exponent - 1, min=least))
    return torch.ldexp(torch.ones_like(value), exponent - bits)


def error_bound(reference: Reference, dtype) -> "torch.Tensor":
    """Largest allowed |out - ref| for an output of ``dtype``, elementwise, FP64 [M, N]."""
    accumulation = accumulation_factor(reference.k) * _FP32_UNIT_ROUNDOFF * reference.magnitude
    # The accumulated value is what gets rounded, and it may lie in the next binade.
    return 0.5 * ulp(reference.value.abs() + accumulation, dtype) + accumulation


def parity(out, reference: Reference) -> ParityReport:
    """Judges ``out`` [M, N] elementwise against ``reference``.

    NaN, infinity and a value that was never written are outside every bound. An infinity is expected exactly where
    the reference rounds to it, or is one because an operand is. Raises ValueError when the shapes differ.
    """
    import torch

    if tuple(out.shape) != tuple(reference.value.shape):
        raise ValueError(f"out is {tuple(out.shape)}, the reference {tuple(reference.value.shape)}")
    if out.numel() == 0:
        return ParityReport(True, 0, 0, 0.0, 0.0, None)
    want = reference.value
    bound = error_bound(reference, out.dtype)
    rounded = want.to(out.dtype)
    same = out == rounded  # covers infinities of the same sign
    error = (out.double() - want).abs()
    error = torch.where(same & ~torch.isfinite(rounded), torch.zeros_like(error), error)
    # Where an operand is infinite the bound is too, and would allow anything: there error / bound is NaN.
    share = torch.where(error == 0, error, error / bound)
    good = share <= 1  # a NaN compares false
    worst_ulps = (error / ulp(want, out.dtype)).max().item()  # max propagates NaN: it cannot hide
    bad = int((~good).sum().item())
    first_bad = None
    if bad:
        m, n = (~good).nonzero()[0].tolist()
        first_bad = f"[{m}, {n}]: got {out[m, n].item()!r}, want {want[m, n].item()!r} +- {bound[m, n].item():.3g}"
    return ParityReport(bad == 0, out.numel(), bad, worst_ulps, share.max().item(), first_bad)
