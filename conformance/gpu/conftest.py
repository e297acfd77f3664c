"""What GPU tests share. They launch through ``execute``, as the dispatcher does."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import Case
from lowlat_gemm.execute import compiled_for, launch


class Kernel:
    """A case's compiled kernel."""

    def __init__(self, case: Case):
        self.case = case
        entry = case.plan.entry(case.m, case.residual)
        assert entry.refusal is None, f"{case}: {entry.refusal}"
        self.compiled = compiled_for(entry)
        assert callable(self.compiled), f"{case}: {self.compiled}"

    def __call__(self, x, weight, residual=None, y=None) -> torch.Tensor:
        return launch(self.compiled, x, weight, residual, y)


@pytest.fixture
def kernel(case: Case) -> Kernel:
    return Kernel(case)

