"""The parts of the host cost benchmark that need no GPU: what is timed, in which order, and what is made of it."""

from __future__ import annotations

import datetime
import io
import json

import pytest
import torch
from rich.console import Console

from conformance.fakes import TOY_K as K
from conformance.fakes import TOY_N as N
from conformance.fakes import bf16, clean_settings, toy_linear  # noqa: F401
from conformance.fakes import toy_gpu as gpu  # noqa: F401
from lowlat_cli import host_cost, show_bench
from lowlat_cli.checking import Shape
from lowlat_cli.environment import Gpu
from lowlat_cli.host_cost import F_LINEAR, LINEAR, PLANNED, PLANNED_FORWARD, TRY, HostCell, medians
from lowlat_cli.measure import Timing
from lowlat_cli.record import make_host_record, render
from lowlat_gemm import enable_low_latency_gemm
from lowlat_gemm.arch import SM90, DeviceProperties

H200 = Gpu(0, DeviceProperties("NVIDIA H200", (9, 0), 132, 4814.0), SM90)
pytestmark = pytest.mark.usefixtures("clean_settings")


def _cell(**us):
    names = {"f": F_LINEAR, "linear": LINEAR, "forward": PLANNED_FORWARD, "planned": PLANNED, "try_": TRY}
    return HostCell(N, K, 1, "skinny", {names[key]: Timing(value, value, value) for key, value in us.items()})


def test_batches_take_turns_on_an_idle_device(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("idle"))
    calls = {name: (lambda name=name: events.append(name)) for name in "ab"}
    timings = host_cost.in_turns(calls, batch=2, rounds=3)
    rounds = ["ab"] + ["ab", "ba", "ab"]  # the first is not counted
    assert events == [event for order in rounds for name in order for event in ("idle", name, name)]
    assert all(timing.us > 0 for timing in timings.values())


def test_ratios_and_medians():
    cells = [_cell(f=8.0, linear=9.0, forward=4.0, planned=4.5, try_=6.0)]
    cells.append(_cell(f=2.0, linear=2.0, forward=4.0, planned=8.0, try_=1.0))
    assert cells[0].ratio("forward_over_f_linear") == 0.5 and cells[0].ratio("module_over_module") == 0.5
    found = medians(cells)
    assert found[F_LINEAR] == 5.0 and found["forward_over_f_linear"] == 1.0 and found["module_over_module"] == 1.4142
    assert medians([]) == {}


def test_what_is_timed_runs_on_our_kernel(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    planned, plain = toy_linear(), toy_linear()
    enable_low_latency_gemm(planned, torch.bfloat16)
    monkeypatch.setattr(host_cost, "in_turns", lambda calls: {
        name: Timing(*[len([call(), gpu.calls][1])] * 3) for name, call in calls.items()
    })  # fmt: skip
    cell = host_cost.host_cell(planned, plain, bf16(2, K), "skinny")
    launches = [timing.us for timing in cell.timings.values()]
    assert launches == [1, 1, 2, 3, 4], "one to see that it runs; F.linear, Linear; three ways through the plan"
    with pytest.raises(RuntimeError, match="64x1024 M=5: the call fell back"):
        host_cost.host_cell(planned, plain, bf16(5, K), "skinny")


def test_only_cells_with_a_kernel_are_timed(gpu, monkeypatch):
    timed, real, randn = [], torch.nn.Linear, torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(torch.nn, "Linear", lambda k, n, bias, dtype, device: real(k, n, bias, dtype=dtype))
    monkeypatch.setattr(host_cost, "enable_low_latency_gemm", lambda module, dtype: None)
    compiled = []
    monkeypatch.setattr(host_cost, "compile_ahead", lambda units: compiled.append(len(timed)) or list(units))
    monkeypatch.setattr(host_cost, "host_cell", lambda planned, plain, x, name: timed.append((tuple(x.shape), name)))
    host_cost.run_host([Shape(N, K, ()), Shape(N + 8, K, ())], [1, 3, 4, 5], H200)
    assert timed == [((1, K), "skinny"), ((4, K), "skinny")]
    assert compiled == [0], "compiled once for all shapes, before anything is timed"


def test_the_record_reads_back():
    cells = [_cell(f=8.0, linear=9.0, forward=4.0, planned=4.5, try_=6.0)]
    record = make_host_record("lowlat bench --host", cells, H200, datetime.datetime.now(), 1.0)
    read = json.loads(render(record))
    assert (read["schema"], read["kind"]) == (2, "host") and read["medians"][PLANNED_FORWARD] == 4.0
    assert read["cells"][0]["forward_over_f_linear"] == 0.5
    console = Console(width=200, file=io.StringIO())
    show_bench.host(console, cells, read["medians"], H200)
    assert "8.00 (8.00-8.00)" in console.file.getvalue() and "forward_over_f_linear 0.500" in console.file.getvalue()
    show_bench.host(console, [], {}, H200)
    assert "nothing to compare" in console.file.getvalue()
