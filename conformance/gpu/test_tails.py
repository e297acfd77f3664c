"""N and K that no tile divides: a dropped tail of a one-hot product is exactly zero, so it cannot hide."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels import skinny
from lowlat_gemm.reference import parity

#: block_size, outputs_per_block, k_unroll, vector_width
CONFIGS = [(32, 3, 2, 8), (64, 4, 4, 4), (96, 2, 3, 2), (128, 6, 1, 8)]
TOKENS = (1, 3)


def _shapes(config: skinny.SkinnyConfig):
    step = config.step
    for k in (step, step + 8, 2 * step - 8, config.chunk + 8, 3 * config.chunk - 8, config.chunk * 2 + step + 24):
        yield from ((n, k) for n in (1, 8, 17, 100))


def _kernel(arch, n, k, m, config, residual, dtype):
    problem = skinny.why_not(arch, n, k, m, config, residual=residual)
    assert problem is None, problem
    return COMPILE_CACHE.get(skinny.compile_unit(arch, n, k, m, config, residual=residual, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("values", CONFIGS, ids=str)
def test_tails(arch, values, m, residual, dtype):
    config = skinny.SkinnyConfig(*values)
    for n, k in _shapes(config):
        where = f"N = {n}, K = {k}"
        compiled = _kernel(arch, n, k, m, config, residual, dtype)
        torch_dtype = getattr(torch, dtype)
        data = operands(n, k, "random", dtype=torch_dtype)
        x = poisoned(data.x[:m], k + 8)
        out = CanaryOutput(m, n, torch_dtype, "cuda", pitch=n + 3)
        launch(compiled, x, poisoned(data.weight, k + 8), data.residual[:m] if residual else None, out.y)
        assert out.problem() is None, f"{where}: {out.problem()}"
        report = parity(out.y, data.reference(m, residual))
        assert report.ok, f"{where}: {report}"

        one_hot_x = torch.zeros(m, k, dtype=torch_dtype, device="cuda")
        one_hot_w = torch.zeros(n, k, dtype=torch_dtype, device="cuda")
        one_hot_x[m - 1, k - 1], one_hot_w[n - 1, k - 1] = 3.0, 5.0
        want = torch.zeros(m, n, device="cuda")
        want[m - 1, n - 1] = 15.0
        none = torch.zeros(m, n, dtype=torch_dtype, device="cuda") if residual else None
        assert torch.equal(launch(compiled, one_hot_x, one_hot_w, none).float(), want), f"{where}: the tail is lost"
