"""``lowlat_gemm::linear`` on the device: torch's own checks, captured graphs, and compilers that trace it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conformance.cases import kernel_cases
from conformance.harness import operands
from lowlat_gemm import request_low_latency_warmup, try_low_latency_gemm
from lowlat_gemm.torch_op import linear

TOKENS = (1, 2, 3, 4, 8, 16)


@pytest.fixture(scope="module")
def data(arch):
    """Operands of the first shape of the table that has a kernel at M = 2."""
    case = next(case for case in kernel_cases(arch) if not case.residual and case.m == 2)
    found = operands(case.n, case.k, "random")
    request_low_latency_warmup(found.weight)
    return found


def expected(x, weight) -> torch.Tensor:
    y = try_low_latency_gemm(x, weight)
    return F.linear(x, weight) if y is None else y


@pytest.mark.parametrize("m", [2, 64])
def test_torchs_own_checks_of_an_operator(data, m):
    x = data.x[:1].repeat(m, 1)
    assert set(torch.library.opcheck(linear, (x, data.weight)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compile_serves_every_m(data, backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: linear(x, weight), backend=backend, fullgraph=True)
    with torch.no_grad():
        example = data.x[:2].clone()
        torch._dynamo.decorators.mark_unbacked(example, 0)
        compiled(example, data.weight)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for m in TOKENS:
                x = data.x[:m].clone() if m <= data.x.shape[0] else data.x[:1].repeat(m, 1)
                assert torch.equal(compiled(x, data.weight), expected(x, data.weight)), f"M = {m}"


def test_a_graph_of_the_compiled_operator_follows_its_input(data):
    x = data.x[:2].clone()
    linear(x, data.weight)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = linear(x, data.weight)
    for scale in (1.0, -2.0, 0.5):
        x.copy_(data.x[:2] * scale)
        graph.replay()
        assert torch.equal(y, expected(x, data.weight)), f"replay with x * {scale}"
