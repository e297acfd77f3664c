"""Language-model heads: long N, and weights whose elements lie beyond 2^31 bytes."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.reference import parity


@pytest.mark.case_limit(180)
def test_parity(lm_head):
    case = lm_head
    data = operands(case.n, case.k, "random")
    out = CanaryOutput(case.m, case.n, torch.bfloat16, "cuda", pitch=case.n + 8)
    launch(COMPILE_CACHE.get(case.entry.unit), poisoned(data.x[: case.m], case.k + 8), data.weight, None, out.y)
    assert out.problem() is None, f"{case}: {out.problem()}"
    report = parity(out.y, data.reference(case.m, False))
    assert report.ok, f"{case}: {report}"
