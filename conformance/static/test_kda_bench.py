"""The KDA benchmark without a GPU: what it times and judges, the limit that it finds, its record, and the table from it."""

from __future__ import annotations

import datetime
import io
import json
import shutil

import pytest
import torch
from rich.console import Console

from conformance.fakes import clean_settings, cuda, device_of  # noqa: F401
from conformance.ordering import Event, Stream, ordered
from lowlat_cli import bench_command, chain_kernel, kda_bench, report, show_bench
from lowlat_cli.bench import BenchError, Check
from lowlat_cli.environment import Gpu
from lowlat_cli.kda_bench import CUBLAS, IN_TURN, OVERLAP, SEQUENTIAL, KdaCell, limit_of, limit_times
from lowlat_cli.measure import BACK_TO_BACK, LINKED, Timing
from lowlat_cli.record import make_kda_record, render, write_record
from lowlat_cli.table_text import TableText
from lowlat_gemm.arch import SM90
from lowlat_gemm.tables import load_table_file
from tools import import_public_tables, write_kda_limit

pytestmark = pytest.mark.usefixtures("clean_settings")
H200 = Gpu(0, device_of(SM90), SM90)


def cell(m: int, overlap: float, sequential: float, chain: str = BACK_TO_BACK) -> KdaCell:
    us = {OVERLAP: overlap, IN_TURN: 23.0, SEQUENTIAL: sequential, CUBLAS: 30.0}
    timings = {name: Timing(value, value, value) for name, value in us.items()}
    return KdaCell(m, chain, 14, timings, {name: Check(True, 0.5, 0.5) for name in us})


@pytest.mark.parametrize(
    ("cells", "limit"),
    [
        ([cell(1, 20, 22), cell(2, 20, 22), cell(3, 23, 22), cell(4, 20, 22)], 2),
        ([cell(1, 22, 22), cell(2, 20, 22)], 0),
        ([cell(2, 20, 22)], 0),
        ([cell(m, 20, 22, chain) for m in range(1, 17) for chain in (BACK_TO_BACK, LINKED)], 16),
        ([cell(1, 20, 22), cell(1, 20, 22, LINKED), cell(2, 20, 22), cell(2, 23, 22, LINKED)], 1),
    ],
)
def test_the_limit_is_up_to_where_it_wins_without_a_gap_in_every_chain(cells, limit):
    assert limit_of(cells) == limit


@pytest.fixture
def layers(monkeypatch):
    """Two small copies on a pretended H200. ``events``: what a graph's calls did, in their order."""
    calls = []
    monkeypatch.setattr(kda_bench, "capture", lambda made: type("Graph", (), {"calls": [call() for call in made]})())
    monkeypatch.setattr(chain_kernel, "compiled_norm_link", lambda target: lambda y, h, x, stream: calls.append(("norm", y, x)))
    monkeypatch.setattr(torch, "Generator", lambda device: _REAL_GENERATOR())
    with torch.no_grad(), cuda([device_of(SM90)]) as fake, ordered(fake) as ordering:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        made = kda_bench.Layers(H200, 2, copies_bytes=1)
        made.fake, made.ordering, made.calls = fake, ordering, calls
        yield made


_REAL_GENERATOR = torch.Generator


def test_every_way_computes_the_same_and_only_one_forks(layers):
    ways = layers.ways(2)
    assert list(ways) == [OVERLAP, IN_TURN, SEQUENTIAL, CUBLAS]
    for name, way in ways.items():
        layers.ordering.operations.clear()
        assert layers.check(way, 2).ok, name
        streams = {one.stream for one in layers.ordering.operations}
        assert len(streams) == {OVERLAP: 2, CUBLAS: 0}.get(name, 1), f"{name}: {streams}"
        kernels = [one.name for one in layers.ordering.operations]
        assert kernels == {SEQUENTIAL: ["split_k", "fused_a"], IN_TURN: ["kda", "split_k", "fused_a"]}.get(name, kernels)


def test_a_graph_is_a_layer_a_copy_with_a_norm_between_where_linked(layers):
    for chain, norms in ((BACK_TO_BACK, 0), (LINKED, 2)):  # once before the capture, once between two layers
        layers.calls.clear()
        seen = []

        def way(x, packed, f_b):
            seen.append(packed.data_ptr())
            return x, x, x

        made = layers.graph(way, 1, chain)
        copies = [packed.data_ptr() for packed in layers.packed]
        assert len(copies) == 2 and seen[-2:] == copies and len(layers.calls) == norms, chain
        assert all(y is x for _, y, x in layers.calls), "the norm reads what the layer before it wrote"
        assert made.kept[0].shape == (1, 7168)


def test_a_wrong_result_of_ours_is_not_timed(layers, monkeypatch):
    real = kda_bench.run_kda_projection_overlap

    def wrong(*arguments, **options):
        qkvg, g1, beta = real(*arguments, **options)
        g1[0, 0] += 64
        return qkvg, g1, beta

    monkeypatch.setattr(kda_bench, "run_kda_projection_overlap", wrong)
    monkeypatch.setattr(kda_bench, "interleaved", lambda *arguments: pytest.fail("timed"))
    with pytest.raises(BenchError, match="KDA overlap at M=1: wrong by"):
        kda_bench.bench_m(layers, 1, [BACK_TO_BACK])


def test_a_run_times_every_way_in_every_chain(layers, monkeypatch):
    timed = []

    def fake_times(graphs, launches, replays):
        timed.append((list(graphs), launches, replays))
        return {name: Timing(1.0, 1.0, 1.0) for name in graphs}

    layers.ways = lambda m: dict.fromkeys((OVERLAP, IN_TURN, SEQUENTIAL, CUBLAS), lambda x, packed, f_b: (x, x, x))
    layers.check = lambda way, m: Check(True, 0.1, 0.1)
    monkeypatch.setattr(kda_bench, "Layers", lambda gpu, most: layers)
    monkeypatch.setattr(kda_bench, "interleaved", fake_times)
    monkeypatch.setattr(kda_bench, "compile_ahead", lambda units: {})
    cells = kda_bench.run_kda([1, 2], H200, [BACK_TO_BACK, LINKED], 3)
    assert [(one.m, one.chain) for one in cells] == [(1, BACK_TO_BACK), (1, LINKED), (2, BACK_TO_BACK), (2, LINKED)]
    assert timed == [([OVERLAP, IN_TURN, SEQUENTIAL, CUBLAS], 2, 3)] * 4
    with pytest.raises(ValueError, match="up to 16 tokens, found 17"):
        kda_bench.run_kda([17], H200, [LINKED])


CELLS = [cell(1, 20, 22), cell(1, 21, 22, LINKED), cell(2, 20, 22), cell(2, 21.5, 22, LINKED), cell(3, 25, 22), cell(3, 20, 22, LINKED)]
STARTED = datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc)


def record_of(cells, gpu=H200):
    return json.loads(render(make_kda_record("lowlat bench --kda", cells, gpu, STARTED, 1.0)))


def test_the_record_reads_back_and_is_reported(tmp_path):
    record = record_of(CELLS)
    assert record["kind"] == "kda" and record["max_tokens"] == 2 and len(record["cells"]) == 6
    assert record["cells"][0]["overlap_over"] == {IN_TURN: 0.8696, SEQUENTIAL: 0.9091, CUBLAS: 0.6667}
    write_record(record, tmp_path / "kda.json")
    found = report.summarise(tmp_path / "kda.json")
    assert found.worst[0].ratio == 1.1364 and found.worst[0].cell == "M = 3, back_to_back" and "M = 2" in found.notes[0]
    console = Console(width=200, file=io.StringIO())
    show_bench.kda(console, CELLS, 2, H200)
    assert "in all chains at every M up to 2" in console.file.getvalue()


def test_the_command_says_which_chain_is_none(monkeypatch):
    monkeypatch.setattr(kda_bench, "run_kda", lambda *arguments: pytest.fail("ran"))
    with pytest.raises(ValueError, match="--chain 'x'"):
        bench_command.run_kda("", [1], ["x"], H200, replays=1, record=None, as_json=False, out=None, err=None)


def test_the_limit_rests_on_the_chain_where_it_does_worst():
    cells = record_of(CELLS)["cells"]
    assert limit_times(cells, 2) == (21.5, 22) and limit_times(cells, 0) == (21, 22)
    with pytest.raises(ValueError, match="no cell of M = 9"):
        limit_times(cells, 9)


@pytest.mark.parametrize(("cells", "limit"), [(CELLS, 2), ([cell(1, 24, 22)], 0)])
def test_the_limit_is_written_into_the_table_and_the_import_keeps_it(tmp_path, cells, limit):
    name = "kimi_k3_sm90.toml"
    shutil.copy(import_public_tables.TABLES / name, tmp_path / name)
    before = load_table_file(tmp_path / name)
    said = write_kda_limit.write(record_of(cells), tmp_path)
    after = load_table_file(tmp_path / name)
    assert after.kda_overlap.limit.max_tokens == limit and f"up to M = {limit}, measured on" in said
    assert after.kda_overlap.fa_beta == before.kda_overlap.fa_beta and after.projections == before.projections
    written = (tmp_path / name).read_text()
    assert import_public_tables.with_measured(import_public_tables.public_texts()[name], written) == written
    write_kda_limit.write(record_of(cells), tmp_path)
    assert (tmp_path / name).read_text() == written, "written twice it is there twice"
    assert TableText.parse(written).render() == written


def test_what_is_no_record_of_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no GPU of a served generation"):
        write_kda_limit.write(record_of(CELLS, None), tmp_path)
    with pytest.raises(ValueError, match="kind 'bench'"):
        write_kda_limit.limit_line({"kind": "bench"})
    other = Gpu(0, device_of(SM90, sm_count=114), SM90)
    with pytest.raises(ValueError, match="114 SMs, the table of H200 with 132"):
        write_kda_limit.write(record_of(CELLS, other), tmp_path)
