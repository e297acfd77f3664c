"""What GPU tests share. They launch through ``execute``, as the dispatcher does."""

from __future__ import annotations

import pytest
import torch

from conformance import cases
from conformance.cases import Case
from lowlat_gemm.arch import Arch
from lowlat_gemm.execute import compile_ahead, compiled_for, launch


@pytest.fixture(scope="session", autouse=True)
def everything_compiled(arch: Arch) -> None:
    """Compiles in many processes what the tests would compile one by one."""
    defaults = cases.default_units(arch, cases.DEFAULT_SHAPES, range(17))
    problems = compile_ahead([*cases.compile_units(arch), *defaults, *cases.split_k_units(arch)])
    assert not problems, problems


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

