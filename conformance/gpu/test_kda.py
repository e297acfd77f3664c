"""The KDA pair at every M: F_A and beta, then F_B from a slice of what they wrote; strides, tails, reruns."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels import kda
from lowlat_gemm.reference import parity

SHAPES = {"skinny_n": (144, 7168, kda.skinny_n_config), "skinny_k": (1536, 128, kda.skinny_k_config)}
#: Rows of a CTA: those of the public data, and one that divides no N here.
OUTPUTS = {"skinny_n": (1, 2, 3, 5), "skinny_k": (8, 12, 16, 24, 7)}


def _kernel(arch, n, k, m, config, dtype="bfloat16"):
    problem = kda.why_not(arch, n, k, m, config)
    assert problem is None, f"N = {n}, K = {k}, M = {m}, {config}: {problem}"
    return COMPILE_CACHE.get(kda.compile_unit(arch, n, k, m, config, dtype=dtype))


@pytest.mark.parametrize("m", range(1, 17))
@pytest.mark.parametrize("part", SHAPES)
def test_parity(arch, part, m):
    n, k, make = SHAPES[part]
    for outputs in OUTPUTS[part]:
        config = make(outputs)
        if part == "skinny_n" and outputs * m > 25:
            continue  # more sums than the public data asks for, and than registers hold
        for kind in ("random", "integer"):
            data = operands(n, k, kind)
            for pitch in (k + 16, 6288) if part == "skinny_k" else (k, k + 8):
                out = CanaryOutput(m, n, torch.bfloat16, "cuda", pitch=n + 3)
                launch(_kernel(arch, n, k, m, config), poisoned(data.x[:m], pitch), poisoned(data.weight, k + 16), None, out.y)
                where = f"{part} {kind} M = {m}, {config}, row stride {pitch}"
                assert out.problem() is None, f"{where}: {out.problem()}"
                report = parity(out.y, data.reference(m, False))
                assert report.ok, f"{where}: {report}"
                if kind == "integer":
                    assert torch.equal(out.y, data.reference(m, False).value.bfloat16()), where


def test_fp16(arch):
    for part, (n, k, make) in SHAPES.items():
        data = operands(n, k, "random", dtype=torch.float16)
        y = launch(_kernel(arch, n, k, 8, make(8 if part == "skinny_k" else 2), "float16"), data.x[:8], data.weight)
        report = parity(y, data.reference(8, False))
        assert report.ok, f"{part}: {report}"


@pytest.mark.parametrize("m", [1, 2, 5, 8, 14, 16])
def test_the_pair_in_a_graph_with_changing_inputs(arch, m):
    """F_B reads the first 128 columns of what F_A and beta wrote, launched behind it, replayed with other tokens."""
    first, second = operands(144, 7168, "integer", tokens=32), operands(1536, 128, "random")
    few = _kernel(arch, 144, 7168, m, kda.skinny_n_config(1))
    many = _kernel(arch, 1536, 128, m, kda.skinny_k_config(8))
    x, between = first.x[:m].clone(), torch.full((m, 144), float("nan"), dtype=torch.bfloat16, device="cuda")
    y = torch.empty(m, 1536, dtype=torch.bfloat16, device="cuda")

    def pair():
        launch(few, x, first.weight, None, between)
        launch(many, between[:, :128], second.weight, None, y)

    pair()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair()
    for begin in (0, 16, 7, 16, 0):
        x.copy_(first.x[begin : begin + m])
        graph.replay()
        # Every product of both is right for the inputs of this replay: compared with the kernel alone, bit for bit.
        wanted = launch(few, first.x[begin : begin + m], first.weight)
        assert torch.equal(between, wanted), f"M = {m}, tokens from {begin}: F_A"
        assert torch.equal(y, launch(many, wanted[:, :128], second.weight)), f"M = {m}, tokens from {begin}: F_B"
