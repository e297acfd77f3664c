"""What GPU tests share. They launch through ``execute``, as the dispatcher does."""

from __future__ import annotations

import os

import pytest
import torch

from conformance import cases
from conformance.cases import Case
from conformance.standing import lm_head_cases, standing_cases
from lowlat_gemm.arch import Arch
from lowlat_gemm.execute import compile_ahead, compiled_for, launch, operand_refusal, try_low_latency_gemm
from lowlat_gemm.kda_branches import overlap_units


@pytest.fixture(scope="session", autouse=True)
def everything_compiled(arch: Arch) -> None:
    """Compiles in many processes what the tests would compile one by one; a sanitizer's run is of a few tests alone."""
    if os.environ.get("LOWLAT_TEST_SANITIZER"):
        return
    defaults = cases.default_units(arch, cases.DEFAULT_SHAPES, range(17))
    standing = [case.entry.unit for case in standing_cases(arch) + lm_head_cases(arch)]
    overlap = overlap_units(arch)
    problems = compile_ahead([*cases.compile_units(arch), *defaults, *standing, *overlap, *cases.split_k_units(arch)])
    assert not problems, problems


class Kernel:
    """A case's compiled kernel."""

    def __init__(self, case: Case):
        self.case = case
        entry = case.entry
        assert entry.refusal is None, f"{case}: {entry.refusal}"
        self.compiled = compiled_for(entry, torch.cuda.current_device())
        assert callable(self.compiled), f"{case}: {self.compiled}"

    def dispatched(self, x, weight, residual=None) -> torch.Tensor:
        """y as a caller gets it: through the dispatcher, which must take these operands. Standing cases pass its checks."""
        refusal = operand_refusal(x, weight, residual)
        assert refusal is None, f"{self.case}: the dispatcher falls back: {refusal}"
        if self.case.standing is not None:
            return self(x, weight, residual)
        y = try_low_latency_gemm(x, weight, residual)
        assert y is not None, f"{self.case}: the dispatcher fell back"
        return y

    def __call__(self, x, weight, residual=None, y=None) -> torch.Tensor:
        assert x.shape == (self.case.m, self.case.k), f"{self.case}: the test gives x {tuple(x.shape)}"
        return launch(self.compiled, x, weight, residual, y)


@pytest.fixture
def kernel(case: Case) -> Kernel:
    return Kernel(case)

