"""What stands in for a framework's objects changes one product and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from conformance.fakes import bf16, same_bits
from lowlat_gemm.adapters.stand_in import Multiplied, Seen

X, WEIGHT = bf16(3, 8), bf16(5, 8, seed=1)


def test_a_product_with_the_transposed_weight_goes_to_gemm():
    asked = []
    weight = Multiplied(WEIGHT, lambda x: asked.append(x) or torch.ones(3, 5))
    assert torch.equal(torch.mm(X, weight.t()), torch.ones(3, 5)) and asked[0] is X


def test_what_gemm_does_not_serve_is_torchs():
    assert same_bits(torch.mm(X, Multiplied(WEIGHT, lambda x: None).t()), torch.mm(X, WEIGHT.t()))


def test_every_other_use_is_one_of_the_weight():
    weight = Multiplied(WEIGHT, lambda x: 1 / 0)
    out = torch.empty(3, 5, dtype=X.dtype)
    assert same_bits(torch.mm(X, weight.t(), out=out), X @ WEIGHT.t()) and same_bits(out, X @ WEIGHT.t())
    assert same_bits(torch.nn.functional.linear(X, weight), torch.nn.functional.linear(X, WEIGHT))
    assert same_bits(torch.mm(bf16(4, 5), weight), bf16(4, 5) @ WEIGHT), "not transposed"
    assert same_bits(bf16(3, 5).addmm_(X, weight.t()), bf16(3, 5).addmm_(X, WEIGHT.t()))
    assert same_bits(torch.cat([weight, WEIGHT]), torch.cat([WEIGHT, WEIGHT]))
    assert weight.shape == WEIGHT.shape and same_bits(weight.narrow(0, 1, 2), WEIGHT[1:3])
    assert same_bits(weight.t().t().data, WEIGHT)


def test_seen_replaces_what_is_read_and_passes_on_what_is_written():
    runner = SimpleNamespace(weight=1, other=2, count=0)
    seen = Seen(runner, weight=10)
    seen.count = 5
    assert (seen.weight, seen.other, seen.count) == (10, 2, 5) and (runner.weight, runner.count) == (1, 5)
