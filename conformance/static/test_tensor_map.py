"""Matrices as kernels and TMA see them: strides that a view keeps or mends, what is refused, what a map is made of."""

from __future__ import annotations

import pytest
import torch

from conformance.fakes import bf16, clean_settings, cuda, device_of  # noqa: F401
from lowlat_gemm import matrix_view, weight_map
from lowlat_gemm.arch import SM90
from lowlat_gemm.operands import overlap

BUFFER = bf16(16, 64)


@pytest.mark.parametrize(
    ("tensor", "output", "strides"),
    [
        (BUFFER, False, (64, 1)),
        (BUFFER[:, 8:32], False, (64, 1)),
        (BUFFER.as_strided((1, 24), (3, 1)), False, (24, 1)),
        (BUFFER.as_strided((1, 20), (1, 1)), False, (24, 1)),
        (BUFFER.as_strided((4, 1), (8, 5)), False, (8, 1)),
        (BUFFER.as_strided((1, 1), (7, 9)), False, (8, 1)),
        (BUFFER[:, 1:24], True, (64, 1)),
        (BUFFER.as_strided((4, 3), (5, 1)), True, (5, 1)),
        (BUFFER.as_strided((3, 1), (1, 1)), True, (1, 1)),
        (BUFFER.as_strided((3, 1), (5, 2)), True, (5, 1)),
        (BUFFER.float().as_strided((1, 6), (1, 1)), True, (8, 1)),
    ],
)
def test_a_view_keeps_pitches_and_mends_what_means_nothing(tensor, output, strides):
    view = matrix_view(tensor, output=output)
    assert view.stride() == strides and view.shape == tensor.shape and view.data_ptr() == tensor.data_ptr()
    assert torch.equal(view, tensor)


@pytest.mark.parametrize(
    ("tensor", "output", "found"),
    [
        (BUFFER[0], False, "1 dimensions"),
        (BUFFER[:, ::2], False, r"strides \(64, 2\)"),
        (BUFFER.as_strided((4, 16), (20, 1)), False, "row stride 20"),
        (BUFFER.as_strided((4, 16), (8, 1)), False, "row stride 8 for 16 columns"),
        (BUFFER[:, 1:9], False, "starts 2 bytes past"),
        (BUFFER[0], True, "1 dimensions"),
        (BUFFER.T, True, r"shape \(64, 16\), strides \(1, 64\)"),
        (BUFFER.as_strided((4, 16), (8, 1)), True, r"strides \(8, 1\)"),
    ],
)
def test_a_matrix_that_kernels_cannot_take_is_refused(tensor, output, found):
    with pytest.raises(ValueError, match=found):
        matrix_view(tensor, output=output)


def at(start: int, rows: int, columns: int, pitch: int) -> torch.Tensor:
    return BUFFER.as_strided((rows, columns), (pitch, 1), start)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (at(0, 4, 8, 8), at(32, 4, 8, 8), False),
        (at(0, 4, 8, 8), at(31, 4, 8, 8), True),
        (at(0, 4, 16, 64), at(16, 4, 48, 64), False),
        (at(0, 4, 17, 64), at(16, 4, 48, 64), True),
        (at(0, 4, 16, 64), at(16, 4, 49, 64), True),
        (at(64, 3, 16, 64), at(32, 4, 32, 64), False),
        (at(0, 4, 16, 64), at(64, 4, 16, 64), True),
        (at(0, 4, 16, 64), at(80, 1, 16, 16), False),
        (at(80, 1, 16, 16), at(0, 4, 16, 64), False),
        (at(72, 1, 16, 16), at(0, 4, 16, 64), True),
        (at(0, 4, 16, 64), at(16, 4, 16, 32), True),
        (at(0, 4, 16, 64), at(0, 4, 16, 64), True),
        (at(0, 0, 16, 64), at(0, 4, 16, 64), False),
        (at(8, 0, 16, 16), at(0, 4, 16, 64), False),
    ],
)
def test_overlap(a, b, shared):
    assert overlap(a, b) == shared and overlap(b, a) == shared


@pytest.fixture
def gpu(clean_settings):  # noqa: F811
    with cuda([device_of(SM90)] * 2) as fake:
        yield fake


def test_a_map_is_made_of_the_weight_where_it_is(gpu):
    weight = bf16(20, 64)[:, :40]
    made = weight_map(weight, 56)
    assert made.shape == (128,) and made.dtype == torch.uint8 and made.data_ptr() % 64 == 0
    assert gpu.maps == [("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", weight.data_ptr(), (20, 40), 128, 56)]
    assert bytes(made.tolist()) == gpu.encode(*gpu.maps[0])
    half = gpu.place(torch.ones(1, 80, dtype=torch.float16), "cuda:1")
    weight_map(half.as_strided((1, 40), (3, 1)), 8)
    assert gpu.maps[-1] == ("CU_TENSOR_MAP_DATA_TYPE_FLOAT16", half.data_ptr(), (1, 40), 80, 8) and gpu.entered[-1] == 1


@pytest.mark.parametrize("rows", [0, 257, -8, 8.0, True, None])
def test_rows_that_a_box_cannot_have(gpu, rows):
    with pytest.raises(ValueError, match="expected 1 to 256 rows of a box, found"):
        weight_map(bf16(16, 64), rows)


def test_the_driver_is_asked_in_its_own_words(monkeypatch):
    """Everything but the driver's own code: extents from the innermost, strides in bytes, swizzle, promotion."""
    from cuda.bindings import driver

    from lowlat_gemm import tensor_map

    asked, answer = [], [driver.CUresult.CUDA_SUCCESS, driver.CUtensorMap()]

    def encode(*arguments):
        asked.append(arguments)
        return answer

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    made = tensor_map._encode("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 0x1000, (1536, 7168), 14_400, 56)
    assert made == bytes(128)
    data_type, rank, address, *lists, interleave, swizzle, promotion, fill = asked[0]
    assert (data_type.name, rank, address) == ("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 2, 0x1000)
    assert [[int(word) for word in words] for words in lists] == [[7168, 1536], [14_400], [64, 56], [1, 1]]
    kinds = [driver.cuuint64_t, driver.cuuint64_t, driver.cuuint32_t, driver.cuuint32_t]
    assert [{type(word) for word in words} for words in lists] == [{kind} for kind in kinds]
    assert interleave.name.endswith("NONE") and fill.name.endswith("NONE")
    assert swizzle.name == "CU_TENSOR_MAP_SWIZZLE_128B" and promotion.name == "CU_TENSOR_MAP_L2_PROMOTION_L2_256B"
    answer[0] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="1536x7168, pitch 14400 bytes, box of 56 rows: CUDA_ERROR_INVALID_VALUE"):
        tensor_map._encode("CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 0x1000, (1536, 7168), 14_400, 56)
