"""KDA's input projections on two streams at every M: parity in eager mode and captured, ten thousand replays with other
inputs, two layers in one graph, events used again, memory of the aux stream, and a launch that raises."""

from __future__ import annotations

import functools

import pytest
import torch

from conformance.gpu.late_writer import compiled_late_writer
from conformance.harness import operands, poisoned
from lowlat_gemm import autotune_kda_qkvg, kda_overlap, run_kda_projection_overlap
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kda_branches import GEOMETRY, branches
from lowlat_gemm.operands import Refusal
from lowlat_gemm.reference import parity, reference_gemm

TOKENS = range(1, 17)
#: Coprime with the number of inputs, so that the replays that are looked at meet each of them.
REPLAYS, SAMPLE, INPUTS = 10_000, 7, 8
ROUNDS = 200
#: Clocks by which the aux stream is held back: longer than the host takes to enqueue what could go wrong meanwhile.
LATE = 3_000_000
LATE_BY_NS = 20_000


@functools.lru_cache(maxsize=2)
def weights(seed: int = 0, kind: str = "random"):
    """The packed weight and F_B's; the packed one's padding rows are random too, for nothing may look at them."""
    packed = operands(GEOMETRY.packed, GEOMETRY.hidden, kind).weight
    f_b = operands(GEOMETRY.f_b, GEOMETRY.f_a, kind).weight
    return (packed, f_b) if seed == 0 else (packed.flip(0).contiguous(), f_b.flip(0).contiguous())


def tokens(m: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(100 * seed + m)
    return torch.randn(m, GEOMETRY.hidden, generator=generator, device="cuda").bfloat16()


class Layer:
    """One layer's weights with a stream and two events that all its calls share."""

    def __init__(self, seed: int = 0, kind: str = "random"):
        self.packed, self.f_b = weights(seed, kind)
        self.aux, self.events = torch.cuda.Stream(), (torch.cuda.Event(), torch.cuda.Event())

    def __call__(self, x):
        return run_kda_projection_overlap(x, self.packed, self.f_b, self.aux, self.events, max_tokens=16)

    def alone(self, arch, x):
        """The same kernels one after the other on the current stream: what every bit has to be."""
        chosen, m = branches(arch, x.shape[0]), x.shape[0]

        def product(unit, x, weight):
            if unit is None:
                return x @ weight.T
            return launch(COMPILE_CACHE.get(unit), x, weight)

        fa_beta = product(chosen.fa_beta, x, self.packed[GEOMETRY.qkvg :])
        g1 = product(chosen.f_b, fa_beta[:, : GEOMETRY.f_a], self.f_b)
        qkvg = product(chosen.qkvg, x, self.packed[: GEOMETRY.qkvg])
        assert g1.shape[0] == m
        return qkvg, g1, fa_beta[:, GEOMETRY.f_a : GEOMETRY.f_a + GEOMETRY.beta]


def f_a_of(beta) -> torch.Tensor:
    """F_A [M, 128], which lies before beta in the rows that beta is a view of."""
    return beta.as_strided((beta.shape[0], GEOMETRY.f_a), (GEOMETRY.fa_beta, 1), beta.storage_offset() - GEOMETRY.f_a)


def judge(layer: Layer, x, outputs, where: str) -> None:
    """Every product against FP64; F_B's input is F_A as it was rounded."""
    qkvg, g1, beta = outputs
    m, f_a = x.shape[0], f_a_of(outputs[2])
    assert qkvg.shape == (m, GEOMETRY.qkvg) and g1.shape == (m, GEOMETRY.f_b) and beta.shape == (m, GEOMETRY.beta), where
    rows = GEOMETRY.qkvg, GEOMETRY.qkvg + GEOMETRY.f_a
    for name, y, a, w in (
        ("QKVG", qkvg, x, layer.packed[: rows[0]]),
        ("F_A", f_a, x, layer.packed[rows[0] : rows[1]]),
        ("beta", beta, x, layer.packed[rows[1] : rows[1] + GEOMETRY.beta]),
        ("F_B", g1, f_a, layer.f_b),
    ):
        report = parity(y, reference_gemm(a, w))
        assert report.ok, f"{where}, {name}: {report}"


def poison(*outputs) -> None:
    for y in outputs:
        y.fill_(float("nan"))


@pytest.mark.parametrize("kind", ["random", "integer"])
@pytest.mark.parametrize("m", TOKENS)
def test_parity_in_eager_mode_and_captured(arch, m, kind):
    layer = Layer(kind=kind)
    x = operands(GEOMETRY.packed, GEOMETRY.hidden, kind).x[:m].clone()
    # What the allocator gives out next is full of NaN: an element that nobody writes is seen.
    poison(*(torch.empty(m, n, dtype=x.dtype, device="cuda") for n in (GEOMETRY.qkvg, GEOMETRY.fa_beta, GEOMETRY.f_b)))
    judge(layer, x, layer(x), f"{kind} M = {m}, eager")
    judge(layer, x, layer(poisoned(x, GEOMETRY.hidden + 8)), f"{kind} M = {m}, eager, rows with a pitch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer(x)
    for seed in (1, 2):
        x.copy_(x.flip(1))
        poison(*outputs, f_a_of(outputs[2]))
        graph.replay()
        judge(layer, x, outputs, f"{kind} M = {m}, replay {seed}")


@pytest.mark.parametrize("m", TOKENS)
def test_ten_thousand_replays_of_two_layers_with_changing_inputs(arch, m):
    """Two layers in one graph, the second on what the first computed, with the same stream and events: every replay
    that is looked at has the bits of the same kernels one after the other."""
    first, second = Layer(0), Layer(1)
    second.aux, second.events = first.aux, first.events

    def both(run_first, run_second, x):
        outputs = run_first(x)
        between = torch.cat([outputs[0][:, : GEOMETRY.hidden - GEOMETRY.f_b], outputs[1]], dim=1)
        return *outputs, *run_second(between)

    inputs = [tokens(m, seed) for seed in range(INPUTS)]
    alone = functools.partial(both, functools.partial(first.alone, arch), functools.partial(second.alone, arch))
    wanted = [alone(x) for x in inputs]
    x = inputs[0].clone()
    both(first, second, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = both(first, second, x)
    different = torch.zeros(len(outputs), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        x.copy_(inputs[replay % INPUTS])
        sampled = replay % SAMPLE == 0
        if sampled:
            poison(*outputs)
        graph.replay()
        if sampled:
            different += torch.stack([(y != want).sum() for y, want in zip(outputs, wanted[replay % INPUTS])])
    counts = different.tolist()
    assert not any(counts), f"M = {m}: elements that differ over {REPLAYS} replays, by output of the two layers: {counts}"


def words(tensor) -> torch.Tensor:
    return tensor.view(torch.int32).flatten()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_between_kernels_of_programmatic_launch(arch, m, captured):
    """In front a kernel that lets its dependents start at once and writes x 20 us later, also for the other stream;
    behind the join one that may start as early, and copies what both branches wrote."""
    layer, inputs = Layer(), [tokens(m, seed) for seed in range(4)]
    wanted = [layer.alone(arch, x) for x in inputs]
    writer = compiled_late_writer(arch.compile_target)
    source, x = inputs[0].clone(), torch.full_like(inputs[0], float("nan"))
    copies = [torch.empty_like(y) for y in wanted[0][:2]]

    def step():
        stream = torch.cuda.current_stream().cuda_stream
        writer(words(source), words(x), LATE_BY_NS, stream)
        outputs = layer(x)
        for y, copy in zip(outputs, copies):
            writer(words(y), words(copy), 0, stream)
        return outputs[2]

    beta, run = step(), step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            beta = step()
        run = graph.replay
    different = torch.zeros(3, dtype=torch.int64, device="cuda")
    for turn in range(ROUNDS):
        source.copy_(inputs[turn % 4])
        poison(x, *copies)
        result = run()
        got = (*copies, beta if captured else result)
        different += torch.stack([(y != want).sum() for y, want in zip(got, wanted[turn % 4])])
    counts = different.tolist()
    assert not any(counts), f"M = {m}: QKVG, F_B, beta differ in {counts} elements of {ROUNDS} turns"


def test_one_stream_and_pair_of_events_in_graphs_and_eager_calls_in_turns(arch):
    layer = Layer()
    graphs = {}
    for m in (1, 5, 16):
        x = tokens(m)
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs[m] = (x, graph, [layer(x), layer(x)])
    for turn in range(20):
        for m, (x, graph, outputs) in graphs.items():
            new = tokens(m, turn)
            want, eager = layer.alone(arch, new), layer(new)
            x.copy_(new)
            poison(*outputs[0], *outputs[1])
            graph.replay()
            for got in (eager, *outputs):
                for y, wanted in zip(got, want):
                    assert torch.equal(y, wanted), f"M = {m}, turn {turn}: {int((y != wanted).sum())} elements differ"


@pytest.mark.parametrize("m", [1, 8, 16])
def test_memory_is_not_given_away_while_the_aux_stream_uses_it(arch, m):
    """Outputs and input are dropped at once and their memory is filled with NaN, while the aux stream is held back."""
    layer, inputs = Layer(), [tokens(m, seed) for seed in range(INPUTS)]
    wanted = [layer.alone(arch, x) for x in inputs]
    sizes = [(m, n) for n in (GEOMETRY.hidden, GEOMETRY.qkvg, GEOMETRY.fa_beta, GEOMETRY.f_b)]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for turn in range(ROUNDS):
        x = inputs[turn % INPUTS].clone()
        with torch.cuda.stream(layer.aux):
            torch.cuda._sleep(LATE if turn < 20 else 0)
        outputs = layer(x)
        del x
        kept = [y.clone() for y in outputs]
        del outputs
        for _ in range(3):
            poison(*[torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes])
        for y, want in zip(kept, wanted[turn % INPUTS]):
            different += (y != want).sum()
    assert int(different) == 0, f"M = {m}: {int(different)} elements of {ROUNDS} calls were overwritten"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_memory_that_is_allocated_between_fork_and_join(arch, monkeypatch, captured):
    """Somebody else's tensors on the main stream, of the same sizes, while both branches run: they are other memory."""
    layer, x, real = Layer(), tokens(8), kda_overlap.launch
    want = layer.alone(arch, x)

    def launch_beside(kernel, x, weight, residual, y):
        if torch.cuda.current_stream() != layer.aux:
            poison(*[torch.empty(8, n, dtype=x.dtype, device="cuda") for n in (GEOMETRY.qkvg, GEOMETRY.fa_beta, GEOMETRY.f_b)])
        return real(kernel, x, weight, residual, y)

    monkeypatch.setattr(kda_overlap, "launch", launch_beside)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = layer(x)
        graph.replay()  # cudaMallocAsync's memory of a graph is there from its first replay on
        poison(*outputs)
        graph.replay()
    else:
        outputs = layer(x)
    for name, y, wanted in zip(("QKVG", "F_B", "beta"), outputs, want):
        assert torch.equal(y, wanted), f"{name}: {int((y != wanted).sum())} elements differ"


def test_a_launch_that_raises_leaves_no_work_that_is_not_joined(arch):
    """A capture ends all the same, and the next call with the same stream and events is right."""
    layer, x, real, launched = Layer(), tokens(4), kda_overlap.launch, []

    def launch_once(kernel, x, weight, residual, y):
        launched.append(kernel)
        if len(launched) == 2:
            raise RuntimeError("F_B")
        return real(kernel, x, weight, residual, y)

    layer(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kda_overlap, "launch", launch_once)
        with torch.cuda.graph(graph):  # raises for work that was not joined
            with pytest.raises(RuntimeError, match="F_B"):
                layer(x)
    graph.replay()
    for y, want in zip(layer(x), layer.alone(arch, x)):
        assert torch.equal(y, want)


def test_qkvg_does_not_wait_for_the_other_branch(arch):
    """With the aux stream held back, QKVG is done while the other branch is not."""
    layer, x, done, real = Layer(), tokens(4), torch.cuda.Event(), kda_overlap.launch
    layer(x)

    def launch_and_note(kernel, x, weight, residual, y):
        result = real(kernel, x, weight, residual, y)
        if weight.shape[0] == GEOMETRY.qkvg:
            done.record()
        return result

    torch.cuda.synchronize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kda_overlap, "launch", launch_and_note)
        with torch.cuda.stream(layer.aux):
            torch.cuda._sleep(100 * LATE)
        layer(x)
    if branches(arch, 4).qkvg is not None:
        done.synchronize()
        assert not layer.events[1].query(), "the aux stream was not held back, or QKVG waited for it"


def test_autotune_makes_every_kernel(arch):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, weight in zip(("in_proj_qkvgfab", "f_b_proj"), weights()):
                setattr(self, name, torch.nn.Linear(1, 1, bias=False))
                getattr(self, name).weight = torch.nn.Parameter(weight, requires_grad=False)

    assert autotune_kda_qkvg(Module(), max_tokens=16) == {"": 16}
    made, layer = (COMPILE_CACHE.compiles, COMPILE_CACHE.late), Layer()
    for m in TOKENS:
        x, graph = tokens(m), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x)
    assert (COMPILE_CACHE.compiles, COMPILE_CACHE.late) == made, "a capture compiled"
    limit = kda_overlap.kda_overlap_limit(torch.cuda.current_device())
    assert isinstance(limit, Refusal) or 0 <= limit <= 16
