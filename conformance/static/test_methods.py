"""Planned methods of frameworks, on layers that are none of a framework's."""

from __future__ import annotations

import pytest
import torch

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm.adapters.methods import PlannedMethod
from lowlat_gemm.operands import Reason

pytestmark = pytest.mark.usefixtures("clean_settings")


class RowParallel(torch.nn.Module):
    """One rank's part of a layer that is cut along K."""

    def __init__(self, ranks: int, reduces: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(bf16(N, K), requires_grad=False)
        self.tp_size, self.reduce_results = ranks, reduces


def test_a_residual_is_refused_where_ranks_are_summed(gpu):
    """Each rank would add it: after the sum it would be there as many times as there are ranks."""
    method, x, residual = PlannedMethod(), torch.zeros(1, K, dtype=torch.bfloat16), torch.ones(1, N, dtype=torch.bfloat16)
    summed = RowParallel(2, reduces=True)
    with pytest.raises(ValueError, match="added 2 times"):
        method.apply_with_residual(summed, x, residual)
    refusal = method.residual_or_refuse(summed, x, residual)
    assert refusal.reason is Reason.LAYER and "2 ranks" in refusal.detail and gpu.calls == []
    for layer in (RowParallel(1, reduces=True), RowParallel(2, reduces=False)):
        assert torch.equal(method.apply_with_residual(layer, x, residual), residual)
    assert len(gpu.calls) == 2
