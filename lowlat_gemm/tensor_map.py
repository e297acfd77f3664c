"""Matrices as kernels and TMA see them: views of the caller's tensors, and tensor maps in device memory. Needs torch.

The kernels of this package make their tensor maps themselves, at each launch, from the tensors that they are given. A
map from ``weight_map`` is for code that keeps one: a kernel of the caller's own that reads the same weight.
"""

from __future__ import annotations

import torch

from .operands import ALIGNMENT_BYTES, check_weight, is_freed

#: K of a map's box: 64 elements of 16 bits are the 128 bytes of its swizzle.
BOX_COLUMNS = 64
#: CUDA Driver API, cuTensorMapEncodeTiled: most elements of a box in a dimension; bytes of a CUtensorMap.
MAX_BOX_ROWS = 256
MAP_BYTES = 128

_DATA_TYPES = {torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"}


def matrix_view(tensor, *, output: bool = False):
    """``tensor`` [rows, columns] with strides that every kernel takes: (pitch, 1), on the same storage.

    A row pitch of the caller's is kept. Where an extent is 1 its stride means nothing and may be anything (a transposed
    one-column tensor, a row cut from a wider buffer): a single row gets the width in whole 16-byte words for a pitch,
    a single column unit stride. ValueError, naming what was found, for a tensor that is not 2-D, has an inner stride
    other than 1, overlapping rows or a freed storage, and unless it is an ``output`` for a pitch or a start that is not on 16 bytes:
    outputs are written by element where need be.
    """
    if tensor.dim() != 2:
        raise ValueError(f"expected a matrix [rows, columns], found {tensor.dim()} dimensions")
    rows, columns = tensor.shape
    row_stride, inner_stride = tensor.stride()
    if not output:
        refusal = check_weight(tensor, pitched=True, name="the matrix")
        if refusal is not None:
            raise ValueError(str(refusal))
    elif (inner_stride != 1 and columns > 1) or (rows > 1 and row_stride < columns):
        raise ValueError(
            f"expected rows of unit stride that do not overlap, found shape {tuple(tensor.shape)}, "
            f"strides {(row_stride, inner_stride)}"
        )
    elif is_freed(tensor):
        raise ValueError(f"expected a matrix in memory, found shape {tuple(tensor.shape)} whose storage was freed")
    if rows > 1 and inner_stride == 1:
        return tensor
    words = ALIGNMENT_BYTES // tensor.element_size()
    pitch = row_stride if rows > 1 else -(-columns // words) * words
    return tensor.as_strided((rows, columns), (pitch, 1))


def check_projection_weight(weight) -> None:
    """ValueError, naming what was found, unless ``weight`` is a BF16 or FP16 [N, K] of 16-byte rows on CUDA."""
    if weight.dim() != 2 or weight.dtype not in _DATA_TYPES:
        raise ValueError(f"expected a BF16 or FP16 weight [N, K], found {weight.dtype} {tuple(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"expected a weight of positive extents, found {tuple(weight.shape)}")
    refusal = check_weight(weight, pitched=True)
    if refusal is not None:
        raise ValueError(str(refusal))
    if weight.device.type != "cuda":
        raise ValueError(f"expected a weight on a CUDA device, found it on {weight.device}")


def weight_map(weight, rows: int):
    """A TMA tensor map of ``weight`` in its device's memory: a tensor [128] of bytes, which starts on 64.

    weight: [N, K], BF16 or FP16, a pitch of whole 16-byte words. The box is {64 of K, ``rows`` of N}, with the 128-byte
    swizzle, 256-byte L2 promotion and zeros outside. It is uploaded on the current stream of the weight's device, and
    is that of the weight's storage of now. A kernel acquires it (fence.proxy.tensormap) before use. ValueError for
    another weight, or rows other than 1 to 256; RuntimeError in a CUDA graph capture, for the map comes from the host,
    and with what the driver said where it refuses the map.
    """
    check_projection_weight(weight)
    if type(rows) is not int or not 1 <= rows <= MAX_BOX_ROWS:
        raise ValueError(f"expected 1 to {MAX_BOX_ROWS} rows of a box, found {rows!r}")
    view = matrix_view(weight)
    pitch = view.stride(0) * view.element_size()
    encoded = _encode(_DATA_TYPES[weight.dtype], view.data_ptr(), tuple(view.shape), pitch, rows)
    with torch.cuda.device(weight.device.index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a tensor map of {tuple(weight.shape)} would be uploaded during graph capture: prepare it before, and "
                "again where the weight moved"
            )
        uploaded = torch.empty(MAP_BYTES, dtype=torch.uint8, device=weight.device)
        uploaded.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    return uploaded


def _encode(data_type: str, address: int, shape: tuple[int, int], pitch_bytes: int, rows: int) -> bytes:
    """The bytes of a tensor map, made by the driver on the host. Dimensions go from the innermost outwards."""
    from cuda.bindings import driver

    def words(kind, *values):
        return [kind(value) for value in values]

    n, k = shape
    error, tensor_map = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, data_type),
        2,
        address,
        words(driver.cuuint64_t, k, n),
        words(driver.cuuint64_t, pitch_bytes),
        words(driver.cuuint32_t, BOX_COLUMNS, rows),
        words(driver.cuuint32_t, 1, 1),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no tensor map of {n}x{k}, pitch {pitch_bytes} bytes, box of {rows} rows: {error.name}")
    return b"".join(int(word).to_bytes(8, "little") for word in tensor_map.opaque)
