"""The KDA overlap on a pretended GPU: results, what its streams and events put in order, limits, and each ValueError."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from conformance.fakes import clean_settings, cuda, device_of, kda_overlap  # noqa: F401
from conformance.ordering import Event, Stream, ordered
from lowlat_gemm import autotune_kda_qkvg, kda_branches, kda_overlap_limit, run_kda_projection_overlap, settings
from lowlat_gemm.arch import ARCHES, SM90, DeviceProperties
from lowlat_gemm.execute import NotCompiledError
from lowlat_gemm.kda_branches import GEOMETRY, branches, overlap_units
from lowlat_gemm.kernels import kda
from lowlat_gemm.kernels.registry import every_backend
from lowlat_gemm.operands import Reason
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.settings import Settings, parse_deny
from lowlat_gemm.tables import OverlapLimit, Provenance, load_table

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.fixture
def gpu():
    with torch.no_grad(), cuda([device_of(SM90)] * 2) as fake:
        yield fake


@pytest.fixture
def ordering(gpu):
    with ordered(gpu) as found:
        yield found


@pytest.fixture(scope="module")
def weights():
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(rows, columns, generator=generator).bfloat16()
        for rows, columns in ((GEOMETRY.packed, GEOMETRY.hidden), (GEOMETRY.f_b, GEOMETRY.f_a))
    )


def tokens(m: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(m, GEOMETRY.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def overlap(x, weights, *, aux=None, events=None, max_tokens=16):
    return run_kda_projection_overlap(x, *weights, aux or Stream(), events or (Event(), Event()), max_tokens=max_tokens)


def set_limit(monkeypatch, limit: int | None, arch=SM90):
    """The table's limit is ``limit`` (None: not measured)."""
    table = load_table("kimi_k3", arch)
    made = None if limit is None else OverlapLimit(limit, Provenance("public", source="test"))
    changed = replace(table, kda_overlap=replace(table.kda_overlap, limit=made))
    monkeypatch.setattr(kda_branches, "load_table", lambda family, arch: changed)
    kda_overlap._limit.cache_clear()


# What it computes, and in what order


def test_the_geometry_is_that_of_the_model():
    assert vars(GEOMETRY) == dict(hidden=7168, qkvg=6144, packed=6288, f_a=128, beta=12, f_b=1536)
    assert GEOMETRY.shapes == {"qkvg": (6144, 7168), "fa_beta": (144, 7168), "f_b": (1536, 128)}


@pytest.mark.parametrize("m", [1, 2, 16])
def test_the_three_products(ordering, weights, m):
    x, (packed, f_b) = tokens(m), weights
    qkvg, g1, beta = overlap(x, weights)
    assert parity(qkvg, reference_gemm(x, packed[:6144])).ok
    assert beta.stride() == (144, 1) and parity(beta, reference_gemm(x, packed[6272:6284])).ok
    f_a = reference_gemm(x, packed[6144:6272]).value.bfloat16()
    assert parity(g1, reference_gemm(f_a, f_b)).ok and g1.is_contiguous() and qkvg.is_contiguous()


def test_qkvg_is_on_the_callers_stream_and_the_others_are_beside_it(ordering, weights):
    aux = Stream()
    overlap(tokens(2), weights, aux=aux)
    where = {one.name: one.stream for one in ordering.operations}
    assert where == {"kda": aux.cuda_stream, "fused_a": aux.cuda_stream, "split_k": ordering.current.cuda_stream}
    qkvg = next(one for one in ordering.operations if one.name == "split_k")
    assert aux.cuda_stream not in qkvg.behind, "QKVG waits for the other branch: nothing overlaps"


def layers(ordering, weights, count: int = 2):
    """Layers with one pair of events, x written before and the outputs read and their memory written again behind."""
    aux, events, x = Stream(), (Event(), Event()), tokens(4)
    for layer in range(count):
        ordering.note(f"write x {layer}", writes=[x])
        outputs = overlap(x, weights, aux=aux, events=events)
        whole = [outputs[0], outputs[1], outputs[2].as_strided((4, 144), (144, 1), 0)]
        ordering.note(f"read {layer}", reads=whole)
        ordering.note(f"reuse {layer}", writes=whole)


def test_every_access_is_ordered(ordering, weights):
    layers(ordering, weights)
    assert len(ordering.operations) == 12 and ordering.races() == []


@pytest.mark.parametrize(("left_out", "race"), [("start", ("write x 0", "kda")), ("done", ("kda", "read 0"))])
def test_a_missing_wait_is_seen(ordering, weights, monkeypatch, left_out, race):
    """Of the stand-in: without the wait of one event, the pair that it orders is a race."""
    waits, real = [], Stream.wait_event

    def wait_event(stream, event):
        waits.append(event)
        if (len(waits) % 2 == 1) != (left_out == "start"):
            real(stream, event)

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    layers(ordering, weights, 1)
    assert race in ordering.races()


@pytest.mark.parametrize("branch", ["kda", "fused_a", "split_k"])
def test_the_join_is_there_also_when_a_launch_raises(gpu, ordering, weights, monkeypatch, branch):
    aux, events, launched, real = Stream(), (Event(), Event()), [], kda_overlap.launch
    by_branch = dict(kda="fa_beta", fused_a="f_b", split_k="qkvg")

    def launch(kernel, x, weight, residual, y):
        launched.append(real(kernel, x, weight, residual, y))
        if ordering.operations[-1].name == branch:
            raise RuntimeError("no")

    monkeypatch.setattr(kda_overlap, "launch", launch)
    with pytest.raises(RuntimeError, match="no"):
        overlap(tokens(2), weights, aux=aux, events=events)
    assert launched, by_branch[branch]
    behind = ordering.current.clocks.get(aux.cuda_stream, 0)
    assert behind == aux.clocks[aux.cuda_stream], f"{by_branch[branch]}: work on the aux stream that nobody waits for"


def test_outputs_are_allocated_on_the_callers_stream(ordering, weights, monkeypatch):
    real, where = torch.empty, []

    def empty(*shape, **options):
        where.append(ordering.current)
        return real(*shape, **options)

    main = ordering.current
    monkeypatch.setattr(torch, "empty", empty)
    overlap(tokens(2), weights)
    assert where == [main] * 3


def test_a_parameter_with_attributes_of_a_framework_is_a_weight(ordering, weights):
    class Weight(torch.nn.Parameter):
        pass

    made = [Weight(weight, requires_grad=False) for weight in weights]
    assert parity(overlap(tokens(1), made)[0], reference_gemm(tokens(1), weights[0][:6144])).ok


# What the branches run


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_sections_cells_are_valid_and_are_what_runs(arch):
    section, kernels = load_table("kimi_k3", arch).kda_overlap, {**every_backend(), kda.NAME: kda}
    for name, shape in GEOMETRY.shapes.items():
        for m, cell in getattr(section, name).items():
            if cell.backend == "flashinfer":
                continue
            kernel = kernels[cell.backend]
            config = kernel.parse_config(cell.config)
            assert kernel.why_not(arch, *shape, m, config) is None, f"{name} M = {m}"
            assert getattr(branches(arch, m), name) == kernel.compile_unit(arch, *shape, m, config), f"{name} M = {m}"


def test_on_sm90_the_packed_rows_config_streams_qkvg_and_the_measured_row_runs_f_b():
    row, f_b = (load_table("kimi_k3", SM90).projections[shape] for shape in ((6288, 7168), (1536, 128)))
    for m in range(1, 17):
        chosen = branches(SM90, m)
        split_k = every_backend()["split_k"]
        assert chosen.qkvg == split_k.compile_unit(SM90, 6144, 7168, m, split_k.parse_config(row.cells[m].config))
        assert chosen.f_b.kernel == f_b.cells[m].backend


def test_a_row_of_its_own_goes_before_the_packed_one(monkeypatch):
    table = load_table("kimi_k3", SM90)
    row = table.projections[6288, 7168]
    cell = replace(row.cells[1], config=MappingProxyType({**row.cells[1].config, "rows": 64}))
    own = replace(row, n=6144, cells=MappingProxyType({1: cell}))
    changed = replace(table, projections=MappingProxyType({**table.projections, (6144, 7168): own}))
    monkeypatch.setattr("lowlat_gemm.dispatch.load_table", lambda family, arch: changed)
    settings.change(any_device=True)  # other settings, other plans
    assert [branches(SM90, m).qkvg.spec.config.rows for m in (1, 2)] == [64, 48]


def test_what_is_denied_runs_on_torchs_gemm(gpu, ordering, weights):
    settings.restore(Settings(deny=parse_deny("6144x7168")))
    x = tokens(2)
    assert branches(SM90, 2).qkvg is None and len(overlap_units(SM90)) == len({u for m in range(1, 17) for u in branches(SM90, m).units()})
    qkvg = overlap(x, weights)[0]
    assert [one.name for one in ordering.operations] == ["kda", "fused_a", "mm"]
    assert torch.equal(qkvg, x @ weights[0][:6144].T) and ordering.races() == []


# The limit


def test_the_limit_is_the_tables(gpu, ordering, weights, monkeypatch):
    set_limit(monkeypatch, 2)
    assert kda_overlap_limit(0) == 2
    overlap(tokens(2), weights, max_tokens=None)
    with pytest.raises(ValueError, match="3 tokens: the KDA overlap serves 1 to 2 here"):
        overlap(tokens(3), weights, max_tokens=None)
    overlap(tokens(3), weights, max_tokens=3)


def test_without_a_measured_limit_it_is_refused_and_can_be_forced(gpu, ordering, weights, monkeypatch):
    set_limit(monkeypatch, None)
    assert kda_overlap_limit(0).reason is Reason.TOKENS
    with pytest.raises(ValueError, match="nobody has measured for sm90.*; max_tokens = 1 to 16 runs it all the same"):
        overlap(tokens(1), weights, max_tokens=None)
    assert not gpu.calls
    overlap(tokens(1), weights, max_tokens=1)
    set_limit(monkeypatch, 0)
    assert kda_overlap_limit(0) == 0
    with pytest.raises(ValueError, match="never wins here"):
        overlap(tokens(1), weights, max_tokens=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"disabled": True}, Reason.DISABLED),
        ({"batch_invariant": True}, Reason.BATCH_INVARIANT),
    ],
)
def test_switches_refuse_a_limit(gpu, monkeypatch, changes, reason):
    set_limit(monkeypatch, 14)
    settings.restore(Settings(**changes))
    assert kda_overlap_limit(0).reason is reason


def test_another_device_has_no_limit(gpu, monkeypatch):
    set_limit(monkeypatch, 14)
    gpu.devices[1] = device_of(SM90, sm_count=78)
    assert kda_overlap_limit(0) == 14 and kda_overlap_limit(1).reason is Reason.DEVICE_CLASS
    settings.change(any_device=True)
    assert kda_overlap_limit(1) == 14
    gpu.devices[0] = DeviceProperties("A100", (8, 0), 108, 2039.0)
    kda_overlap._limit.cache_clear()
    assert kda_overlap_limit(0).reason is Reason.CAPABILITY


# Arguments


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": lambda: tokens(1)[0]}, r"expected hidden_states .*, found \[7168\]"),
        ({"x": lambda: tokens(1)[:, :7160]}, r"expected hidden_states \[1, 7168\] .* found \[1, 7160\]"),
        ({"x": lambda: tokens(2).half()}, "found .2, 7168. of torch.float16"),
        ({"x": lambda: tokens(2).repeat(1, 2)[:, ::2]}, "inner stride"),
        ({"x": lambda: torch.zeros(2, 7169).bfloat16()[:, :7168]}, "row stride 7169"),
        ({"x": lambda: torch.zeros(1, 7170).bfloat16()[:, 2:]}, "not 16-byte aligned: x"),
        ({"x": lambda: tokens(17)}, "17 tokens: the KDA overlap serves 1 to 16"),
        ({"x": lambda: tokens(1)[:0]}, "0 tokens"),
        ({"packed": lambda: torch.zeros(6284, 7168).bfloat16()}, r"packed_weight \[6288, 7168\] .* found \[6284, 7168\]"),
        ({"packed": lambda: torch.zeros(6288, 7176).bfloat16()[:, :7168]}, "row stride 7176"),
        ({"f_b": lambda: torch.zeros(1536, 144).bfloat16()[:, :128]}, "f_b_weight has row stride 144"),
        ({"f_b": lambda: torch.zeros(128, 1536).bfloat16()}, r"f_b_weight \[1536, 128\]"),
        ({"f_b": lambda: torch.zeros(1536, 128)}, "found .1536, 128. of torch.float32"),
        ({"events": lambda: (Event(),)}, "two events, for fork and join, found 1"),
        ({"aux": lambda: Stream(1)}, "aux_stream of cuda:0, found one of cuda:1"),
        ({"max_tokens": lambda: 17}, "max_tokens of 1 to 16, found 17"),
        ({"max_tokens": lambda: 0}, "max_tokens of 1 to 16, found 0"),
    ],
)
def test_misuse_is_a_value_error_and_launches_nothing(gpu, ordering, weights, changed, message):
    given = {"x": tokens(1), "packed": weights[0], "f_b": weights[1], "aux": None, "events": None, "max_tokens": 16}
    given |= {name: make() for name, make in changed.items()}
    with pytest.raises(ValueError, match=message):
        overlap(given["x"], (given["packed"], given["f_b"]), **{name: given[name] for name in ("aux", "events", "max_tokens")})
    assert not gpu.calls and not ordering.operations


def test_the_current_stream_is_no_aux_stream(ordering, weights):
    with pytest.raises(ValueError, match="aux_stream is the current stream"):
        overlap(tokens(1), weights, aux=ordering.current)


def test_tensors_of_two_devices_and_gradients(gpu, ordering, weights):
    with pytest.raises(ValueError, match="f_b_weight on the CUDA device of hidden_states .cuda:0., found cuda:1"):
        overlap(tokens(1), (weights[0], gpu.place(weights[1].clone(), "cuda:1")))
    with torch.enable_grad(), pytest.raises(ValueError, match="f_b_weight needs a gradient"):
        overlap(tokens(1), (weights[0], torch.nn.Parameter(weights[1])))


# Before capture


class Layer(torch.nn.Module):
    def __init__(self, packed, f_b):
        super().__init__()
        self.in_proj_qkvgfab, self.f_b_proj = torch.nn.Module(), torch.nn.Module()
        self.in_proj_qkvgfab.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.f_b_proj.weight = torch.nn.Parameter(f_b, requires_grad=False)


def test_nothing_compiles_in_a_capture_after_autotune(gpu, ordering, weights, monkeypatch):
    set_limit(monkeypatch, 3)
    gpu.capturing = True
    with pytest.raises(NotCompiledError, match="is not compiled: prepare it before graph capture"):
        overlap(tokens(1), weights, max_tokens=None)
    assert gpu.cache.late == 3, "each counts once"
    assert not ordering.operations and ordering.current.clocks == {ordering.current.cuda_stream: 0}
    gpu.capturing = False
    half = Layer(weights[0], weights[1].half())
    model = torch.nn.ModuleDict({"a": Layer(*weights), "b": Layer(*weights), "fp16": half, "other": torch.nn.Linear(8, 8)})
    assert autotune_kda_qkvg(model) == {"a": 3, "b": 3}
    made = gpu.cache.compiles
    assert made == len(overlap_units(SM90, 3)) > 3
    gpu.capturing = True
    for m in (1, 2, 3):
        overlap(tokens(m), weights, max_tokens=None)
    assert gpu.cache.compiles == made


def test_a_late_kernel_is_counted_and_in_strict_mode_refused(gpu, ordering, weights):
    settings.restore(Settings(strict=True))
    with pytest.raises(NotCompiledError, match="of the KDA overlap was not compiled before: autotune_kda_qkvg does"):
        overlap(tokens(2), weights)
    assert gpu.cache.late == 3 and gpu.cache.compiles == 0 and not ordering.operations
    settings.restore(Settings())
    overlap(tokens(2), weights)
    assert gpu.cache.late == 6 and gpu.cache.compiles == 3
    settings.restore(Settings(strict=True))
    overlap(tokens(2), weights)
    assert gpu.cache.late == 6


def test_autotune_sets_up_torchs_gemm_where_a_branch_runs_it(gpu, ordering, weights):
    settings.restore(Settings(deny=parse_deny("6144x7168@2,1536x128@1")))
    autotune_kda_qkvg(Layer(*weights), max_tokens=2)
    assert [one.name for one in ordering.operations] == ["mm", "mm"]
    assert [weight[1] - weight[0] for _, weight in (one.reads for one in ordering.operations)] == [2 * 1536 * 128, 2 * 6144 * 7168]


def test_autotune_says_where_it_may_not_run(gpu, weights, monkeypatch):
    set_limit(monkeypatch, None)
    layer = Layer(*weights)
    assert autotune_kda_qkvg(layer) == {"": 0} and gpu.cache.compiles == 0
    assert autotune_kda_qkvg(layer, max_tokens=2) == {"": 2} and gpu.cache.compiles == len(overlap_units(SM90, 2))
    with pytest.raises(ValueError, match="found True"):
        autotune_kda_qkvg(layer, max_tokens=True)
