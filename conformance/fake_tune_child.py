"""A tuning child without a GPU: CPU tensors, kernels that torch computes, and times that a formula gives.

    python -m conformance.fake_tune_child PLAN        PLAN: JSON, candidate (as text) -> what it does

What a candidate does: "hang", "die" (the process), "raise", "wrong", "racy" (right alone, wrong in a chain), "slow" (a
time far above the others); anything not named is right. Its time: ``fake_us``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from types import SimpleNamespace

import torch

from lowlat_cli.tuning import worker
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.jobs import FLOOR, LINKED
from lowlat_gemm.reference import reference_gemm

#: What the floor and any baseline take, microseconds.
FLOOR_US, BASELINE_US = 2.0, 10.0


def fake_us(candidate: Candidate, chain: str) -> float:
    """A time between 3 and 6 that depends on the candidate alone; 1.5 more in the linked chain."""
    return 3 + zlib.crc32(str(candidate).encode()) % 3000 / 1000 + 1.5 * (chain == LINKED)


class FakeBench:
    def __init__(self, plan: dict[str, str]):
        self.plan = plan

    def copies(self, n, k, max_tokens):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max_tokens, k, generator=generator).bfloat16()
        weights = torch.randn(2, n, k, generator=generator).bfloat16()

        def chain(run, m, y):
            for w in weights:
                run(x[:m], w, y)
            return run

        return SimpleNamespace(
            x=x, weights=weights, copies=2, reference=reference_gemm(x, weights[0]), floor=FLOOR,
            back_to_back=lambda run, m, y: chain(run, m, y) and (run, "back_to_back"),
            linked=lambda run, m, y: chain(run, m, y) and (run, LINKED),
        )  # fmt: skip

    def kernel(self, candidate, n, k, m, residual):
        does, launches = self.plan.get(str(candidate)), [0]

        def run(x, w, r, y):
            launches[0] += 1
            if does == "hang":
                time.sleep(3600)
            if does == "die":
                os.abort()
            if does == "raise":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            out = x.double() @ w.double().T
            y.copy_(out if r is None else out + r.double())
            if does == "wrong" or (does == "racy" and launches[0] == 3):
                y[0, 0] += 8

        return run

    def replay_us(self, graph, launches):
        return 1.0

    def interleaved(self, graphs, launches, replays):
        def us(name, chain):
            if not isinstance(name, Candidate):
                return FLOOR_US if name == FLOOR else BASELINE_US + 1.5 * (chain == LINKED)
            if self.plan.get(str(name)) == "hang in turn":
                time.sleep(3600)
            return 99.0 if self.plan.get(str(name)) == "slow" else fake_us(name, chain)

        return {key: SimpleNamespace(us=us(*key)) for key in graphs}


if __name__ == "__main__":
    worker.main(lambda: FakeBench(json.loads(sys.argv[1])))
