"""What a sweep tries: sound configs that fill the SMs, the tilings of the kernel's prototype among them."""

from __future__ import annotations

import pytest
import torch

from lowlat_cli import measure, sweep
from lowlat_cli.checking import Shape, model_shapes
from lowlat_cli.environment import Gpu
from lowlat_gemm.arch import SM90, DeviceProperties
from lowlat_gemm.kernels.split_k import SplitKConfig, shared_memory_bytes, why_not
from lowlat_gemm.reference import reference_gemm

SMS = 132


@pytest.mark.parametrize("m", [1, 8, 9, 16, 32, 64, 65])
def test_candidates_are_sound_and_fill_the_gpu(m):
    for shape in model_shapes("kimi_k3", (4, 8, 16)):
        found = sweep.candidates(SM90, shape.n, shape.k, m, SMS, most=8)
        assert len(set(found)) == len(found) <= 4 * 8
        for config in found:
            where = f"{shape.n}x{shape.k} M = {m} {config}"
            assert why_not(SM90, shape.n, shape.k, m, config) is None, where
            assert shared_memory_bytes(config) <= sweep.HALF_AN_SM and config.token_columns >= min(m, 64), where
            assert 0.72 <= sweep.fill(shape.n, config, SMS) <= 1, where


@pytest.mark.parametrize("n, rows, split, full", [(1536, 64, 4, 96 / 132), (8448, 64, 2, 1.0), (7168, 56, 1, 128 / 132), (20480, 48, 1, 0)])
def test_fill(n, rows, split, full):
    assert sweep.fill(n, SplitKConfig(rows, 8, split, 4), SMS) == pytest.approx(full)


#: Tilings (rows, split) of the prototype that the search must not lose.
PROTOTYPE = {(1536, 7168): (56, 4), (2112, 7168): (32, 2), (3584, 7168): (56, 2), (2304, 1536): (40, 2), (7168, 8448): (56, 2)}


@pytest.mark.parametrize("shape", PROTOTYPE, ids=str)
def test_the_prototypes_tilings_are_among_them(shape):
    found = {(config.rows, config.split) for config in sweep.candidates(SM90, *shape, 8, SMS, most=16)}
    assert PROTOTYPE[shape] in found, sorted(found)


def test_wrong_candidates_are_not_timed_and_the_best_is_first(monkeypatch):
    shape = Shape(24, 64, ())
    made = object.__new__(measure.ShapeCopies)
    made.gpu = Gpu(0, DeviceProperties("H200", (9, 0), SMS, 4814.0), SM90)
    made.shape, made.device, made.copies = shape, torch.device("cpu"), 3
    made.weights, made.x = torch.randn(3, 24, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    made.reference, made.floor = reference_gemm(made.x, made.weights[0]), "floor graph"
    configs = [SplitKConfig(8, 8, 1, stages) for stages in (3, 4, 5)]
    times = {"floor graph": 1.0, configs[0]: 4.0, configs[2]: 2.0}
    current = []

    def launch(kernel, x, w, residual, y):
        current.append(kernel)
        return y.copy_(x.double() @ w.double().T) if kernel is not configs[1] else y

    def capture(calls):
        calls = list(calls)
        current.clear()
        for call in calls:
            call()
        return current[0] if current else "library graph"

    monkeypatch.setattr(sweep, "COMPILE_CACHE", type("C", (), {"get": staticmethod(lambda config: config)}))
    monkeypatch.setattr(sweep, "compile_unit", lambda arch, n, k, m, config: config)
    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.setattr(sweep, "capture", capture)
    monkeypatch.setattr(sweep, "interleaved", lambda graphs, launches, replays: {
        name: measure.Timing(times.get(graph, 3.0), 0, 0) for name, graph in graphs.items()
    })  # fmt: skip
    monkeypatch.setattr(torch, "mm", lambda x, w, out: out.copy_(x.float() @ w.float()))
    cell = sweep.sweep_cell(made, 2, configs)
    assert [config for config, _ in cell.finalists] == [configs[2], configs[0]] and cell.over_floor == 2.0
    assert len(cell.wrong) == 1 and "stages=4" in cell.wrong[0] and cell.tried == 3
    assert cell.to_json()["over_cublas"] == round(2 / 3, 4)
