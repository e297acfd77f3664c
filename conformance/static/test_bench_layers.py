"""The benchmark of a stack of layers, on CPU with fakes: its shapes are the model's, what is judged, what is recorded."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace

import pytest
import torch

from conformance.fakes import TOY_CONFIG, bf16, clean_settings, cuda, device_of, fake_table, same_bits, use_table  # noqa: F401
from lowlat_cli import graphs, measure
from lowlat_cli.record import make_layers_record, render
from lowlat_gemm.arch import SM90
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.tables.schema import frozen
from tools import bench_layers
from tools.bench_layers import LibraryGemms, Wrong
from tools.layer_stack import Extents, Stack, TorchGemms

pytestmark = pytest.mark.usefixtures("clean_settings")

TOY = Extents(hidden=512, heads=64, f_a=64, beta=12, pad=4, qkv_a=96, q_lora=64, q_b=96, latent=256, shared=32)
MLA_AND_KDA = 4  # layers that have one of each kind
PROJECTIONS = {
    "in_proj_qkvgfab",
    "f_b_proj",
    "kda_o_proj",
    "fused_qkv_a_proj",
    "mla_g_proj",
    "q_b_proj",
    "mla_o_proj",
    "shared_gate_up_proj",
    "shared_down_proj",
    "routed_expert_down_proj",
    "routed_expert_up_proj",
}


@pytest.fixture
def gpu(monkeypatch):
    """An H200 whose table has the shared gate_up_proj at M = 1 and 2, and the routed up_proj with residual at 1."""
    config = TOY_CONFIG | {"block_size": 32}
    gate_up = fake_table({m: ("skinny", config) for m in (1, 2)}, n=2 * TOY.shared, k=TOY.hidden)
    up = fake_table({}, residual_cells={1: ("skinny", config)}, n=TOY.hidden, k=TOY.latent)
    use_table(monkeypatch, replace(gate_up, projections=frozen({**gate_up.projections, **up.projections})))
    monkeypatch.setattr(graphs, "capture", lambda calls: [call() for call in calls])
    monkeypatch.setattr(bench_layers, "interleaved", fake_timings)
    with torch.no_grad(), cuda(device_of(SM90)) as fake:
        yield fake


def fake_timings(captured, launches, replays):
    assert list(captured) == ["with", "without"] and all(len(results) == 1 for results in captured.values())
    assert torch.allclose(captured["with"][0].float(), captured["without"][0].float(), atol=0.1), "both compute the same"
    return {name: measure.Timing(us, us, us) for name, us in (("with", 6.0), ("without", 8.0))}


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_the_shapes_are_the_models(tp):
    extents = Extents.of_kimi_k3(tp)
    wanted = {shape.name: (shape.n, shape.k) for shape in projection_shapes("kimi_k3", tp)}
    shapes = extents.kda_weights() | extents.mla_weights()
    assert {name: wanted[name] for name in shapes} == shapes
    assert (extents.qkv_a, extents.hidden) == wanted["fused_qkv_a_proj"]
    assert (extents.heads, extents.hidden) == wanted["mla_g_proj"]


def test_a_stack_uses_every_weight_and_is_deterministic(gpu):
    stack, x = Stack(TOY, MLA_AND_KDA, "cpu"), bf16(3, TOY.hidden)
    seen = []

    class Spy(TorchGemms):
        def linear(self, name, x, weight):
            seen.append((name, weight.data_ptr()))
            return super().linear(name, x, weight)

        def linear_residual(self, name, x, weight, residual):
            seen.append((name, weight.data_ptr()))
            return super().linear_residual(name, x, weight, residual)

    y = stack.forward(Spy(), x)
    assert y.shape == x.shape and y.isfinite().all() and same_bits(y, stack.forward(TorchGemms(), x))
    assert {name for name, _ in seen} == PROJECTIONS and len(seen) == 3 * 7 + 8
    assert {pointer for _, pointer in seen} == {weight.data_ptr() for weight in stack.weights()}
    own = TOY.kda_weights(), TOY.mla_weights()
    assert stack.weight_bytes == 2 * sum(n * k for weights, times in zip(own, (3, 1)) for n, k in weights.values() for _ in range(times))


def test_a_run_and_its_record(gpu):
    said = []
    cells = bench_layers.run(TOY, MLA_AND_KDA, [1, 2, 3], "cpu", say=lambda cell: said.append(bench_layers.line(cell)))
    assert gpu.cache.compiles == 3 and [cell.m for cell in cells] == [1, 2, 3]
    ours = [{name for name, backend in cell.decisions.items() if backend} for cell in cells]
    gate_up = {"shared_gate_up_proj", "mla_g_proj"}  # of one shape, as in the model
    assert ours == [gate_up | {"routed_expert_up_proj"}, gate_up, set()]
    for cell in cells:
        assert set(cell.decisions) == PROJECTIONS and set(cell.reasons) == {n for n, b in cell.decisions.items() if b is None}
    assert cells[0].reasons["f_b_proj"].startswith("shape not in table") and "M = 3" in cells[2].reasons["shared_gate_up_proj"]
    assert said[0].startswith("M =  1") and said[0].endswith("ratio 0.750; 3 of 11 projections on our kernels")
    started = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    record = json.loads(render(make_layers_record("python -m tools.bench_layers", cells, None, started, 1.0)))
    assert record["geometric_mean_with_over_without"] == 0.75 and len(record["cells"]) == 3
    assert record["cells"][0]["timings"]["with"]["us"] == 6.0 and record["cells"][0]["decisions"] == cells[0].decisions


def test_a_wrong_result_is_not_timed(gpu, monkeypatch):
    real = bench_layers.linear_or_refuse

    def wrong(x, weight):
        y = real(x, weight)
        return y if isinstance(y, bench_layers.Refusal) else y + 1

    monkeypatch.setattr(bench_layers, "linear_or_refuse", wrong)
    monkeypatch.setattr(bench_layers, "interleaved", lambda *args: pytest.fail("timed"))
    with pytest.raises(Wrong, match="shared_gate_up_proj at M=1 N=64 K=512"):
        bench_layers.run(TOY, 1, [1], "cpu")


def test_a_decision_that_explain_does_not_give_is_an_error(gpu, monkeypatch):
    refusal = bench_layers.Refusal(bench_layers.run_or_refuse(bf16(1, 8), bf16(8, 16)).reason)
    monkeypatch.setattr(bench_layers, "linear_or_refuse", lambda x, weight: refusal)
    with pytest.raises(Wrong, match="explain says skinny, the call K mismatch"):
        Stack(TOY, 1, "cpu").forward(LibraryGemms(judge=True), bf16(1, TOY.hidden))


def test_a_kernel_that_does_not_compile_is_said(gpu):
    gpu.compile_error = RuntimeError("no")
    with pytest.raises(Wrong, match="explain says skinny, the call backend unavailable"):
        bench_layers.run(TOY, 1, [1], "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "torch sees no CUDA GPU"), (["--tokens", "0"], "token counts"), (["--tp", "7"], "not divisible by tp 7")],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["bench_layers", *arguments])
    monkeypatch.setattr("lowlat_cli.environment.find_gpus", lambda: ([], "torch sees no CUDA GPU"))
    try:
        code = bench_layers.main()
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and message in capsys.readouterr().err
