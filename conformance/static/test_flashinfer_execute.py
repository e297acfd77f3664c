"""FlashInfer through the dispatcher's own path: prepared before a capture, never in one, and what a call does otherwise."""

from __future__ import annotations

import logging

import pytest
import torch

from conformance.fake_flashinfer import with_flashinfer  # noqa: F401
from conformance.fakes import bf16, clean_settings, cuda, device_of, execute, fake_table, use_table  # noqa: F401
from lowlat_gemm import request_low_latency_warmup, settings, try_low_latency_gemm
from lowlat_gemm.arch import SM90, SM103
from lowlat_gemm.execute import NotCompiledError, compile_ahead, device_plan, run_or_refuse
from lowlat_gemm.kernels import compiling, registry
from lowlat_gemm.kernels.compile_cache import CompileCache, CompileError
from lowlat_gemm.kernels.flashinfer import FlashInferConfig, compile_unit
from lowlat_gemm.operands import Reason
from lowlat_gemm.ready import READY
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.tables import Cell, Provenance
from lowlat_gemm.tables.schema import frozen

pytestmark = pytest.mark.usefixtures("clean_settings")

N, K = 64, 1024
TUNED = {"kernel": "cute-dsl", "tactic": "autotuned"}


def _brought(tokens, config=TUNED, **options):
    """fused_a at M = 1 to 5, and FlashInfer before it at ``tokens``."""
    own = {m: ("fused_a", {}) for m in range(1, 6)}
    table = fake_table(own, n=N, k=K, arch="sm103", **options)
    cells = {m: Cell("flashinfer", frozen(config), Provenance("public", source="test")) for m in tokens}
    spec = registry.replace(table.projections[N, K], optional_cells=frozen(cells))
    return registry.replace(table, projections=frozen({(N, K): spec}))


@pytest.fixture
def gpu(monkeypatch, with_flashinfer):  # noqa: F811
    """Two B300s: our kernels are FP64 arithmetic, FlashInfer's come from the stand-in through the real ``make``."""
    use_table(monkeypatch, _brought((2, 3, 5)))
    with torch.no_grad(), cuda([device_of(SM103)] * 2) as fake:
        ours = fake.cache._make

        def make(unit):
            return compiling.make(unit, None) if registry.is_foreign(unit) else ours(unit)

        fake.cache = CompileCache(make)
        monkeypatch.setattr(execute, "COMPILE_CACHE", fake.cache)
        with_flashinfer.fake_cuda = fake
        yield fake


def _right(x, weight, y):
    assert y is not None, "fell back"
    report = parity(y, reference_gemm(x, weight))
    assert report.ok, report


def test_a_warm_up_prepares_it_and_a_capture_launches_it(gpu, with_flashinfer):  # noqa: F811
    x, weight = bf16(2, K), bf16(N, K, seed=1)
    assert request_low_latency_warmup(weight) == len(device_plan(0, N, K).units())
    prepared = list(with_flashinfer.calls)
    # M = 2, 3 and 5: tuned at the next power of two, then run once at the very M.
    assert [(call[1], call[4]) for call in prepared] == [(2, (2,)), (2, None), (4, (4,)), (3, None), (8, (8,)), (5, None)]
    gpu.capturing = True
    y = try_low_latency_gemm(x, weight)
    _right(x, weight, y)
    assert with_flashinfer.calls[len(prepared) :] == [("cute-dsl", 2, K, N, None, True)]
    assert gpu.calls == [] and gpu.cache.late == 0


def test_nothing_is_prepared_in_a_capture_and_the_own_cell_serves(gpu, with_flashinfer, caplog):  # noqa: F811
    x, weight = bf16(2, K), bf16(N, K, seed=1)
    compile_ahead(unit for unit in device_plan(0, N, K).units() if not registry.is_foreign(unit))
    gpu.capturing = True
    with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
        _right(x, weight, try_low_latency_gemm(x, weight))
    assert with_flashinfer.calls == [] and [unit.kernel for unit, _ in gpu.calls] == ["fused_a"]
    said = "goes to fused_a, not flashinfer: kernel not compiled before graph capture: flashinfer at M = 2"
    assert said in caplog.text
    # A warm-up in a capture leaves it for later, and does not take it for broken.
    assert request_low_latency_warmup(weight) < len(device_plan(0, N, K).units()) and with_flashinfer.calls == []
    gpu.capturing = False
    _right(x, weight, try_low_latency_gemm(x, weight))
    assert with_flashinfer.calls and len(gpu.calls) == 1, "after the capture it is prepared and serves"


def test_without_an_own_cell_a_capture_falls_back_with_the_reason(gpu, with_flashinfer, monkeypatch):  # noqa: F811
    use_table(monkeypatch, fake_table({2: ("flashinfer", TUNED)}, n=N, k=K, arch="sm103"))
    x, weight = bf16(2, K), bf16(N, K, seed=1)
    gpu.capturing = True
    assert run_or_refuse(x, weight).reason is Reason.CAPTURE
    assert try_low_latency_gemm(x, weight) is None and with_flashinfer.calls == []
    gpu.capturing = False
    _right(x, weight, try_low_latency_gemm(x, weight))


@pytest.mark.parametrize("capturing", [False, True])
def test_strict_raises_instead(gpu, with_flashinfer, capturing):  # noqa: F811
    settings.change(strict=True)
    x, weight = bf16(2, K), bf16(N, K, seed=1)
    gpu.capturing = capturing
    with pytest.raises(NotCompiledError, match="flashinfer at M = 2 was not compiled before"):
        try_low_latency_gemm(x, weight)
    assert with_flashinfer.calls == []
    gpu.capturing = False
    request_low_latency_warmup(weight)
    gpu.capturing = capturing
    _right(x, weight, try_low_latency_gemm(x, weight))


def test_what_cannot_be_prepared_leaves_the_own_cell(gpu, with_flashinfer, caplog):  # noqa: F811
    with_flashinfer.error = RuntimeError("nvcc not found")
    x, weight = bf16(2, K), bf16(N, K, seed=1)
    with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
        _right(x, weight, try_low_latency_gemm(x, weight))
        _right(x, weight, try_low_latency_gemm(x, weight))
    assert len(with_flashinfer.calls) == 1, "a broken kernel is not tried on every token"
    assert "not flashinfer: backend unavailable" in caplog.text and "nvcc not found" in caplog.text


def _pitched(rows):
    return bf16(rows, K + 64)[:, :K]


def _shifted(rows, elements):
    """Packed rows that start ``elements`` past a boundary of 64 bytes."""
    whole = torch.empty(rows * K + 64, dtype=torch.bfloat16)
    start = -(whole.data_ptr() // 2) % 32 + elements
    return whole[start : start + rows * K].view(rows, K).copy_(bf16(rows, K))


@pytest.mark.parametrize(
    ("x", "reason"),
    [(_pitched(2), "row stride 1088"), (_shifted(2, 8), "16 bytes past a boundary of 32"), (_shifted(2, 16), None)],
    ids=["pitched rows", "16 bytes", "32 bytes"],
)
def test_operands_that_it_does_not_take_go_to_the_own_cell(gpu, with_flashinfer, caplog, x, reason):  # noqa: F811
    weight = bf16(N, K, seed=1)
    request_low_latency_warmup(weight)
    for y in (try_low_latency_gemm(bf16(2, K), weight), None):
        before, launched = len(with_flashinfer.calls), len(gpu.calls)
        with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
            _right(x, weight, try_low_latency_gemm(x, weight))
        if reason is None:
            assert (len(with_flashinfer.calls), len(gpu.calls)) == (before + 1, launched)
        else:
            assert (len(with_flashinfer.calls), len(gpu.calls)) == (before, launched + 1) and reason in caplog.text
    # Nor does one such call keep the others from it.
    before = len(with_flashinfer.calls)
    _right(bf16(2, K), weight, try_low_latency_gemm(bf16(2, K), weight))
    assert len(with_flashinfer.calls) == before + 1


def test_the_short_way_does_not_have_it(gpu, with_flashinfer):  # noqa: F811
    weight = bf16(N, K, seed=1)
    for m in (2, 4):
        try_low_latency_gemm(bf16(m, K), weight)
    assert {key[-1] for key in READY.state[1]} == {4}


def test_each_device_is_prepared_for(gpu, with_flashinfer):  # noqa: F811
    weights = [gpu.place(bf16(N, K, seed=1), f"cuda:{ordinal}") for ordinal in (0, 1)]
    first = request_low_latency_warmup(weights[0])
    count = len(with_flashinfer.calls)
    assert request_low_latency_warmup(weights[1]) == first and len(with_flashinfer.calls) == 2 * count
    assert {unit.spec.ordinal for unit in device_plan(1, N, K).units() if registry.is_foreign(unit)} == {1}
    ours = [[unit for unit in device_plan(ordinal, N, K).units() if not registry.is_foreign(unit)] for ordinal in (0, 1)]
    assert ours[0] == ours[1], "our own kernels serve every device"


@pytest.mark.parametrize(
    ("arch", "kernel", "tactic", "buckets"),
    [(SM90, "tinygemm", "default", None), (SM90, "cutile", "default", None), (SM90, "cublaslt", "autotuned", (4,)),
     (SM103, "cute-dsl", "default", None), (SM103, "cutlass", "autotuned", (4,)), (SM103, "cudnn", "default", None)],
)  # fmt: skip
def test_every_kernel_is_called_as_it_asks(gpu, with_flashinfer, arch, kernel, tactic, buckets):  # noqa: F811
    unit = compile_unit(arch, N, K, 3, FlashInferConfig(kernel, tactic))
    launched = gpu.cache.get(unit)
    rows = 3 if buckets is None else 4
    assert with_flashinfer.calls == [(kernel, rows, K, N, buckets, False), (kernel, 3, K, N, None, False)]
    x, weight = bf16(3, K), bf16(N, K, seed=1)
    _right(x, weight, execute.launch(launched, x, weight))


def test_it_is_never_stored_and_never_left_to_a_worker(gpu, with_flashinfer, tmp_path, monkeypatch):  # noqa: F811
    units = [compile_unit(SM103, N, K, m, FlashInferConfig("cute-dsl")) for m in range(1, 30)]
    store = compiling.ObjectStore.open(tmp_path)
    monkeypatch.setattr(compiling, "_make_in_processes", lambda units, *rest: units and pytest.fail(f"a worker got {units[0]}"))
    cache = CompileCache(lambda unit: compiling.make(unit, store))
    assert compiling.make_all(units, cache, store) == {} and cache.compiles == 29
    assert list(tmp_path.iterdir()) == []


def test_preparing_in_a_capture_is_refused(gpu, with_flashinfer):  # noqa: F811
    gpu.capturing = True
    with pytest.raises(CompileError, match="while a CUDA graph is captured"):
        gpu.cache.get(compile_unit(SM103, N, K, 3, FlashInferConfig("cute-dsl")))
    assert with_flashinfer.calls == []
