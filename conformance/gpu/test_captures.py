"""Graphs over weights that move: what replays compute, and that ``stale()`` says so when it is not the weight of now."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import operands
from lowlat_gemm import PreparedProjection, Projection, enable_low_latency_gemm, forget_captures, stale_weights
from lowlat_gemm.reference import parity, reference_gemm

#: (N, K): Kimi-K3's q_b_proj at TP 8.
N, K = 2304, 1536
COUNTS = (1, 8)


class Captured:
    """A weight in a linear, and a graph a token count that launches on it."""

    def __init__(self, kind: str):
        self.data = operands(N, K, "random")
        self.linear = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        self.linear.weight.copy_(self.data.weight)
        if kind == "linear":
            enable_low_latency_gemm(self.linear, torch.bfloat16)
            self.launch, self.stale = self.linear, lambda: stale_weights(self.linear) == ("",)
            self.forget = lambda: forget_captures(self.linear)
        else:
            made = Projection(self.linear.weight, COUNTS) if kind == "projection" else None
            if made is None:
                made = PreparedProjection(self.linear.weight, {1: (64, 8, 2, 4), 8: (64, 8, 2, 4)}).prepare()
            run = made if kind == "projection" else lambda x: made.run(x, torch.empty(len(x), N, dtype=x.dtype, device="cuda"))
            self.launch, self.stale, self.forget = run, made.stale, made.forget_captures
        self.inputs = {m: self.data.x[:m].clone() for m in COUNTS}
        self.capture()

    def capture(self) -> None:
        self.graphs = {}
        for m, x in self.inputs.items():
            self.launch(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = self.launch(x)
            self.graphs[m] = (graph, y)

    def replayed(self) -> dict[int, torch.Tensor]:
        for graph, y in self.graphs.values():
            y.fill_(float("nan"))
            graph.replay()
        return {m: y for m, (_, y) in self.graphs.items()}

    def are_of(self, results, weight) -> bool:
        return all(parity(y, reference_gemm(self.inputs[m], weight)).ok for m, y in results.items())


@pytest.fixture(params=["linear", "projection", "prepared"])
def captured(request, arch):
    with torch.no_grad():
        yield Captured(request.param)


def test_a_weight_that_is_copied_over_is_in_the_next_replay(captured):
    new = captured.data.weight.flip(0).contiguous()
    captured.linear.weight.data.copy_(new)
    assert captured.are_of(captured.replayed(), new) and not captured.stale()


def test_a_graph_over_a_weight_that_was_freed_is_stale_until_it_is_captured_again(captured):
    """The old storage is freed and full of NaN, or of anything else, by the time of a replay; eager launches are right."""
    assert captured.are_of(captured.replayed(), captured.data.weight) and not captured.stale()
    new = captured.data.weight.flip(0).contiguous()
    captured.linear.weight.data = new
    filler = [torch.full((N, K), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    assert captured.stale(), "a graph reads a storage that is gone, and nothing says so"
    assert captured.are_of({m: captured.launch(x) for m, x in captured.inputs.items()}, new)
    del filler
    captured.forget()
    captured.capture()
    assert captured.are_of(captured.replayed(), new) and not captured.stale()


def test_a_weight_that_lies_where_the_old_one_was(captured):
    """Freed, and its address given out again: another storage, whatever the address."""
    address = captured.linear.weight.data_ptr()
    captured.linear.weight.data = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    captured.linear.weight.data = captured.data.weight.flip(1).contiguous()
    assert captured.stale()
    new = captured.linear.weight
    assert captured.are_of({m: captured.launch(x) for m, x in captured.inputs.items()}, new), f"from {address} to {new.data_ptr()}"
