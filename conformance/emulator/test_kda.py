"""The KDA pair as compiled for SM90 and SM100, followed thread by thread: right, and the same bits on both."""

from __future__ import annotations

import pytest
import torch

from conformance.emulator.kda import emulate
from conformance.machine_code import compiled
from conformance.seed import SEED
from lowlat_gemm.arch import SM90, SM100
from lowlat_gemm.kernels import kda
from lowlat_gemm.reference import parity, reference_gemm

#: (M, config, N, K): rows beyond N in the last CTA, one warp a row and several.
CASES = [
    (1, kda.skinny_k_config(8), 20, 128),
    (5, kda.skinny_k_config(8), 11, 128),
    (16, kda.skinny_k_config(4), 9, 128),
    (3, kda.KdaConfig(2, 1, 2, 8), 5, 1024),
    (8, kda.KdaConfig(3, 1, 2, 8), 4, 512),
    (2, kda.KdaConfig(1, 2, 2, 4), 5, 256),
]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_right_and_the_same_bits(index):
    m, config, n, k = CASES[index]
    generator = torch.Generator().manual_seed(SEED + index)
    x, weight = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    found = []
    for arch in (SM90, SM100):
        unit = kda.compile_unit(arch, n, k, m, config)
        found.append(emulate(unit.spec, compiled(unit).ptx, x, weight, SEED))
        report = parity(found[-1], reference_gemm(x, weight))
        assert report.ok, f"{arch} M = {m}, {config}: {report}"
    assert torch.equal(*found), "convert-then-FMA and the FMA of BF16 differ"


#: (what stands in the PTX, what a wrong kernel would have there)
WRONG = [
    ("griddepcontrol.wait;", ""),
    (", 16, 31, -1;", ", 8, 31, -1;"),
    ("fma.rn.f32.bf16 lower, xl", "fma.rn.f32.bf16 lower, xh"),
]


@pytest.mark.parametrize("change", [None, *WRONG], ids=["none", "wait", "butterfly", "half"])
def test_a_wrong_kernel_is_seen(change):
    m, config, n, k = CASES[1]
    generator = torch.Generator().manual_seed(SEED)
    x, weight = (torch.randint(-3, 4, (rows, k), generator=generator).bfloat16() for rows in (m, n))
    unit = kda.compile_unit(SM100, n, k, m, config)
    ptx = compiled(unit).ptx
    assert change is None or change[0] in ptx
    y = emulate(unit.spec, ptx.replace(*change) if change else ptx, x, weight, 0)
    assert torch.equal(y, reference_gemm(x, weight).value.bfloat16()) == (change is None)
