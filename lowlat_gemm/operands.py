"""The operand contract: which tensors the kernels can take, and the closed set of reasons for falling back.

    y[M, N] = x[M, K] @ weight[N, K].T (+ residual[M, N])

Everything is decided on strides and addresses, never on ``is_contiguous()``: a one-row slice of a wider buffer
calls itself contiguous and has a foreign row stride, and a transposed one-column tensor keeps stride (1, 1)
through ``.contiguous()``. A row stride says nothing where there is only one row.

No torch import: the functions look at ``shape``, ``stride()``, ``dtype``, ``device``, ``data_ptr()`` and the storage's
offset only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: Kernels load and store 16 bytes at a time.
ALIGNMENT_BYTES = 16


class Reason(str, enum.Enum):
    """Why the caller's own GEMM runs instead. A closed set; values are what ``explain`` and the log show."""

    CAPABILITY = "capability not supported"
    DEVICE_CLASS = "device class not measured"
    SHAPE = "shape not in table"
    TOKENS = "M not in plan"
    RESIDUAL = "no residual config"
    DTYPE = "dtype"
    BIAS = "bias present"
    BATCH_INVARIANT = "plan is not batch-invariant"
    RANK = "x is not 2-D"
    INNER_STRIDE = "x inner stride is not 1"
    ROW_STRIDE = "x row stride is not a multiple of 16 bytes, or rows overlap"
    ALIGNMENT = "data pointer is not 16-byte aligned"
    FREED = "storage was freed"
    WEIGHT_LAYOUT = "weight is not packed row-major"
    RESIDUAL_LAYOUT = "residual does not match the output"
    K_MISMATCH = "K mismatch"
    DEVICE_MISMATCH = "device mismatch"
    BACKEND_NOT_BUILT = "backend not built"
    BACKEND_UNAVAILABLE = "backend unavailable"
    CONFIG = "config not valid for this shape"
    CAPTURE = "kernel not compiled before graph capture"
    AUTOGRAD = "autograd needs the backward of the caller's own GEMM"
    TENSOR_TYPE = "not a plain tensor"
    LAYER = "not a plain layer of its framework"
    TRACING = "traced by a compiler"
    TABLE = "table not readable"
    DISABLED = "disabled by the user"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Refusal:
    """A reason for falling back, and what was found."""

    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)


def _stride_refusal(name: str, tensor, inner: Reason, row: Reason) -> Refusal | None:
    """A matrix's rows must have unit inner stride, a pitch of whole 16-byte words, and not overlap."""
    rows, columns = tensor.shape
    row_stride, inner_stride = tensor.stride()
    if inner_stride != 1 and columns > 1:
        return Refusal(inner, f"{name} has strides {(row_stride, inner_stride)}")
    if rows > 1 and (row_stride * tensor.element_size()) % ALIGNMENT_BYTES:
        return Refusal(row, f"{name} has row stride {row_stride} elements")
    if rows > 1 and row_stride < columns:
        return Refusal(row, f"{name} has overlapping rows: row stride {row_stride} for {columns} columns")
    return None


def is_freed(tensor) -> bool:
    """Whether a strided tensor with elements has no memory for them (``untyped_storage().resize_(0)``).

    Its address is then what its offset makes of a null pointer: 0, or a small number for a view into the storage.
    """
    if tensor.data_ptr() != tensor.storage_offset() * tensor.element_size():
        return False
    return 0 not in tensor.shape and tensor.device.type != "meta"


def _start_refusal(name: str, tensor) -> Refusal | None:
    """A matrix starts on a 16-byte boundary of memory that is there."""
    if is_freed(tensor):
        return Refusal(Reason.FREED, f"{name} has {tuple(tensor.shape)} elements and no memory for them")
    misaligned = tensor.data_ptr() % ALIGNMENT_BYTES
    return Refusal(Reason.ALIGNMENT, f"{name} starts {misaligned} bytes past a boundary") if misaligned else None


def check_weight(weight, *, pitched: bool = False, name: str = "weight") -> Refusal | None:
    """Whether ``weight`` can be served: a 2-D [N, K] matrix of packed rows in memory, on a 16-byte aligned start.

    With ``pitched`` a row pitch of whole 16-byte words above K is accepted as well (kernels and prepared objects).
    ``name``: what the refusal calls it.
    """
    if weight.dim() != 2:
        return Refusal(Reason.WEIGHT_LAYOUT, f"{name} has {weight.dim()} dimensions")
    refusal = _stride_refusal(name, weight, Reason.WEIGHT_LAYOUT, Reason.WEIGHT_LAYOUT)
    if refusal is not None:
        return refusal
    rows, columns = weight.shape
    if not pitched and rows > 1 and weight.stride(0) != columns:
        return Refusal(Reason.WEIGHT_LAYOUT, f"{name} has row stride {weight.stride(0)} for K = {columns}")
    return _start_refusal(name, weight)


def check_operands(x, weight, residual=None, *, pitched_weight: bool = False) -> Refusal | None:
    """The one statement of which operands are servable: None, or why not.

    x: [M, K], rows of unit stride; for M > 1 a row stride of whole 16-byte words; 16-byte aligned start, not freed.
    weight: [N, K], see ``check_weight``, of x's dtype and device.
    residual: None or [M, N] with the same rules as x, of x's dtype and device.
    Whether a dtype, device or shape has a kernel is the dispatcher's question, not this one's.
    """
    if x.dim() != 2:
        return Refusal(Reason.RANK, f"x has {x.dim()} dimensions")
    refusal = check_weight(weight, pitched=pitched_weight)
    if refusal is not None:
        return refusal
    m, k = x.shape
    n = weight.shape[0]
    if weight.shape[1] != k:
        return Refusal(Reason.K_MISMATCH, f"x has K = {k}, weight has K = {weight.shape[1]}")
    if x.dtype != weight.dtype:
        return Refusal(Reason.DTYPE, f"x is {x.dtype}, weight is {weight.dtype}")
    if x.device != weight.device:
        return Refusal(Reason.DEVICE_MISMATCH, f"x is on {x.device}, weight on {weight.device}")
    refusal = _stride_refusal("x", x, Reason.INNER_STRIDE, Reason.ROW_STRIDE) or _start_refusal("x", x)
    if refusal is not None or residual is None:
        return refusal
    if tuple(residual.shape) != (m, n):
        return Refusal(Reason.RESIDUAL_LAYOUT, f"residual is {tuple(residual.shape)}, the output ({m}, {n})")
    if residual.dtype != x.dtype:
        return Refusal(Reason.DTYPE, f"residual is {residual.dtype}, x is {x.dtype}")
    if residual.device != x.device:
        return Refusal(Reason.DEVICE_MISMATCH, f"residual is on {residual.device}, x on {x.device}")
    refusal = _stride_refusal("residual", residual, Reason.RESIDUAL_LAYOUT, Reason.RESIDUAL_LAYOUT)
    return refusal or _start_refusal("residual", residual)


def overlap(a, b) -> bool:
    """Whether two matrices of unit inner stride share memory; False for columns side by side in one buffer.

    Exact where both have one row pitch or either has a single row; of different pitches, whether the spans overlap.
    """

    def pitch(matrix) -> int:
        return matrix.stride(0) * matrix.element_size()

    def width(matrix) -> int:
        return matrix.shape[1] * matrix.element_size()

    def span(matrix) -> int:
        return (matrix.shape[0] - 1) * pitch(matrix) + width(matrix)

    if 0 in a.shape or 0 in b.shape:
        return False
    distance = b.data_ptr() - a.data_ptr()
    if distance >= span(a) or -distance >= span(b):
        return False
    period = pitch(a) if a.shape[0] > 1 else pitch(b)
    if (b.shape[0] > 1 and pitch(b) != period) or period == 0:
        return True
    column = distance % period
    return not (column >= width(a) and column + width(b) <= period)


def aliasing_problem(y, x, weight, residual=None) -> str | None:
    """Why a caller's own output ``y`` [M, N] cannot be where it is, or None. All are matrices of unit inner stride.

    It shares no memory with x and weight, which other CTAs still read when the first ones store. A residual may be y
    itself, of the same dtype and pitch: each element is read by the thread that writes it, just before. Shared in part,
    or with other strides, one thread's y would be another one's residual.
    """
    for name, operand in (("x", x), ("the weight", weight)):
        if overlap(y, operand):
            return f"the output shares memory with {name}"
    if residual is None or not overlap(y, residual):
        return None
    same_rows = y.shape[0] == 1 or y.stride(0) == residual.stride(0)
    if y.data_ptr() == residual.data_ptr() and y.dtype == residual.dtype and same_rows:
        return None
    return "the output shares memory with the residual and is not the same matrix"
