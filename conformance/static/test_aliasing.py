"""Where a caller's own output may be: apart from the operands, or exactly the residual."""

from __future__ import annotations

import pytest
import torch

from conformance.fakes import bf16, clean_settings, execute, toy_gpu  # noqa: F401
from lowlat_gemm.operands import aliasing_problem

M, N, K = 4, 16, 24
BUFFER = bf16(64, 64)
X, WEIGHT, Y, RESIDUAL = BUFFER[:M, :K], BUFFER[8 : 8 + N, :K], BUFFER[32 : 32 + M, :N], BUFFER[40 : 40 + M, :N]


def moved(tensor: torch.Tensor, elements: int, pitch: int = 64) -> torch.Tensor:
    return tensor.as_strided(tensor.shape, (pitch, 1), tensor.storage_offset() + elements)


CASES = [
    ((Y, X, WEIGHT, None), None),
    ((Y, X, WEIGHT, RESIDUAL), None),
    ((Y, X, WEIGHT, Y), None),
    ((Y, X, WEIGHT, moved(Y, N)), None),
    ((moved(X, K)[:, :N], X, WEIGHT, None), None),
    ((X[:, :N], X, WEIGHT, None), "shares memory with x"),
    ((moved(X, K - 1)[:, :N], X, WEIGHT, None), "shares memory with x"),
    ((WEIGHT[2 : 2 + M, :N], X, WEIGHT, None), "shares memory with the weight"),
    ((Y, X, WEIGHT, moved(Y, 8)), "is not the same matrix"),
    ((Y, X, WEIGHT, moved(Y, 64)), "is not the same matrix"),
    ((Y, X, WEIGHT, moved(Y, 0, 32)), "is not the same matrix"),
    ((Y[:1], X[:1], WEIGHT, moved(Y, 0, 32)[:1]), None),
    ((Y, X, WEIGHT, Y.view(torch.float16)), "is not the same matrix"),
]


@pytest.mark.parametrize(("tensors", "problem"), CASES)
def test_where_an_output_may_be(tensors, problem):
    found = aliasing_problem(*tensors)
    assert found is None if problem is None else problem in (found or "accepted")


@pytest.mark.parametrize(("tensors", "problem"), CASES)
def test_a_launch_refuses_the_same(toy_gpu, tensors, problem):  # noqa: F811
    y, x, weight, residual = tensors
    calls = []
    if problem is None:
        assert execute.launch(lambda *given: calls.append(given), x, weight, residual, y) is y and len(calls) == 1
        return
    with pytest.raises(ValueError, match=problem):
        execute.launch(lambda *given: calls.append(given), x, weight, residual, y)
    assert not calls
