"""``request_low_latency_warmup``: everything a weight may launch is compiled, and nothing raises."""

from __future__ import annotations

import logging

import pytest

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_gemm import execute, request_low_latency_warmup, settings, try_low_latency_gemm

pytestmark = pytest.mark.usefixtures("clean_settings")


def test_a_slice_of_a_packed_weight(gpu):
    packed = bf16(3 * N, K)
    weight = packed[N : 2 * N]
    assert request_low_latency_warmup(weight) == 4 == gpu.cache.compiles  # M = 1, 2, 4, and a residual at 1
    gpu.capturing = True
    settings.change(strict=True)
    assert all(try_low_latency_gemm(bf16(m, K), weight) is not None for m in (1, 2, 4))
    assert try_low_latency_gemm(bf16(1, K), weight, bf16(1, N)) is not None
    assert gpu.cache.late == 0
    assert gpu.cache.compiles == 4 and request_low_latency_warmup(weight) == 4


def test_kernels_that_cannot_be_made_are_not_counted(gpu):
    gpu.compile_error = RuntimeError("no")
    assert request_low_latency_warmup(bf16(N, K)) == 0


@pytest.mark.parametrize("weight", [bf16(N + 8, K), bf16(K), bf16(2, N, K)], ids=["shape", "1-D", "3-D"])
def test_a_weight_without_a_plan(gpu, weight):
    assert request_low_latency_warmup(weight) == 0 == gpu.cache.compiles


def test_on_a_cpu():
    assert request_low_latency_warmup(bf16(1536, 7168)) == 0


def test_while_disabled(gpu):
    settings.change(disabled=True)
    assert request_low_latency_warmup(bf16(N, K)) == 0 == gpu.cache.compiles


def test_a_start_that_takes_long_says_how_far_it_is(caplog):
    times = iter([0.0, 1.0, 6.0, 6.0, 7.0, 20.0])
    told = execute.LoggedProgress(clock=lambda: next(times))
    with caplog.at_level(logging.INFO, logger="lowlat_gemm"):
        for done in (0, 1, 2):
            told(done, 3)
        told(3, 3)
    assert caplog.messages == ["1 of 3 kernels are made"]
