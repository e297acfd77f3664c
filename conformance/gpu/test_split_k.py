"""``split_k`` beyond the tables: tails everywhere, every split and tile, residual, dtypes; and bits that depend on the
split alone. Each config is one compiled kernel that serves every M, N and K here."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import SPLIT_K_CONFIGS as CONFIGS
from conformance.cases import SPLIT_K_WGMMA_CONFIGS as WGMMA_CONFIGS
from conformance.gpu.held_split_k import compiled_held
from conformance.gpu.late_writer import compiled_late_writer
from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.arch import SM90
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.split_k import HOLD_POINTS, SplitKConfig, compile_unit, why_not
from lowlat_gemm.reference import parity

#: N that tiles do not divide, 16-byte words do not divide; K with every kind of tail, and shorter than the ring.
SHAPES = [(1536, 7168), (100, 1032), (17, 1024), (264, 1096), (2304, 1536)]
HELD_LAUNCHES = 100_000
#: Of the kernels with every hold point: each pair of split, rings of one depth or of two, row warpgroups, and token tile.
HELD_CONFIGS = [
    SplitKConfig(80, 64, 2, 2, k_blocks=2),
    SplitKConfig(128, 8, 2, 4),
    SplitKConfig(64, 64, 2, 5, token_stages=3),
    SplitKConfig(64, 16, 4, 4),
    SplitKConfig(40, 8, 4, 3, token_stages=2),
    SplitKConfig(96, 64, 4, 4, token_stages=3),
    SplitKConfig(56, 64, 8, 4),
    SplitKConfig(128, 8, 8, 4, token_stages=3),
]
#: (nanoseconds, replays of ten launches). A millisecond is longer than all else that a launch waits for.
HOLDS = [(3_000, 100), (1_000_000, 2)]
TOKENS = (1, 7, 8, 9, 16, 24, 31, 33, 40, 48, 56, 57, 64, 65, 130)


def _kernel(arch, n, k, config, **options):
    problem = why_not(arch, n, k, 1, config, residual=options.get("residual", False))
    assert problem is None, f"N = {n}, K = {k}, {config}: {problem}"
    return COMPILE_CACHE.get(compile_unit(arch, n, k, 1, config, **options))


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("config", [*CONFIGS, *WGMMA_CONFIGS], ids=lambda config: ".".join(map(str, vars(config).values())))
def test_parity_over_shapes_and_tokens(arch, config, residual):
    if arch != SM90 and config in WGMMA_CONFIGS:
        assert "token_columns" in (why_not(arch, 1536, 7168, 1, config) or ""), f"{config}: served on {arch}, and not tried"
        return
    for n, k in SHAPES:
        compiled = _kernel(arch, n, k, config, residual=residual)
        for kind in ("random", "integer"):
            data = operands(n, k, kind, tokens=max(TOKENS))
            for m in TOKENS:
                where = f"{kind} M = {m}, N = {n}, K = {k}, {config}"
                # Odd pitch: element stores; a multiple of 8: 16-byte stores, where N allows them.
                out = CanaryOutput(m, n, torch.bfloat16, "cuda", pitch=-(-n // 8) * 8 + (m % 2))
                added = poisoned(data.residual[:m], -(-n // 8) * 8 + 8) if residual else None
                launch(compiled, poisoned(data.x[:m], k + 8), poisoned(data.weight, k + 16), added, out.y)
                assert out.problem() is None, f"{where}: {out.problem()}"
                report = parity(out.y, data.reference(m, residual))
                assert report.ok, f"{where}: {report}"
                if kind == "integer":
                    want = data.reference(m, residual).value.bfloat16()
                    assert torch.equal(out.y, want), f"{where}: {int((out.y != want).sum())} elements differ"


@pytest.mark.parametrize("dtype, output_dtype", [("float16", "float16"), ("bfloat16", "float32"), ("float16", "float32")])
def test_other_dtypes(arch, dtype, output_dtype):
    for config in (CONFIGS[0], CONFIGS[8], CONFIGS[3]):
        for residual in (False, True):
            n, k = 1536, 7168
            options = {"residual": residual, "dtype": dtype, "output_dtype": output_dtype}
            compiled = _kernel(arch, n, k, config, **options)
            data = operands(n, k, "random", tokens=64, dtype=getattr(torch, dtype))
            for m in (1, 8, 64):
                y = torch.full((m, n), float("nan"), dtype=getattr(torch, output_dtype), device="cuda")
                added = data.residual[:m].to(y.dtype) if residual else None
                launch(compiled, data.x[:m], data.weight, added, y)
                report = parity(y, data.reference(m, residual))
                assert report.ok, f"{dtype} to {output_dtype}, M = {m}, {config}: {report}"


@pytest.mark.parametrize("split", [1, 2, 3, 4, 8])
def test_bits_depend_on_the_split_alone(arch, split):
    """One token among 300 others, at any M and position, in any tile: the same bits."""
    n, k = 1544, 7176
    data = operands(n, k, "random", tokens=300)
    variants = [
        SplitKConfig(64, 8, split, 4),
        SplitKConfig(56, 16, split, 5, k_blocks=2),
        SplitKConfig(80, 32, split, 4),
        SplitKConfig(48, 64, split, 6, token_stages=3),
    ]
    if arch == SM90:  # widths that wgmma alone takes
        variants += [SplitKConfig(64, 24, split, 4), SplitKConfig(40, 56, split, 5, token_stages=3)]
    wanted = None
    for config in variants:
        compiled = _kernel(arch, n, k, config)
        for m in (300, 128, 65, *range(64, 0, -7), 1):
            y = launch(compiled, data.x[:m], data.weight)
            wanted = y if wanted is None else wanted
            assert torch.equal(y, wanted[:m]), f"M = {m}, {config}: {int((y != wanted[:m]).sum())} elements differ"
        for position in (0, 13, 63, 64, 299):
            y = launch(compiled, data.x[position : position + 1], data.weight)
            assert torch.equal(y[0], wanted[position]), f"token {position} alone, {config}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ".".join(map(str, vars(config).values())))
def test_back_to_back_launches_with_late_inputs(arch, config):
    """x by a kernel that triggers early and writes late, then 500 launches in a row: reruns are bit-equal."""
    n, k, m = 2304, 1536, min(config.token_columns, 16)
    compiled = _kernel(arch, n, k, config)
    data = operands(n, k, "random", tokens=32)
    expected = [launch(compiled, data.x[i : i + m], data.weight) for i in (0, 16)]
    sources = [data.x[i : i + m].contiguous().view(torch.int32).flatten() for i in (0, 16)]
    writer = compiled_late_writer(arch.compile_target)
    x = torch.full((m, k), float("nan"), dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(expected[0])
    stream = torch.cuda.current_stream().cuda_stream
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(100):
        writer(sources[i % 2], x.view(torch.int32).flatten(), 10_000, stream)
        launch(compiled, x, data.weight, None, y)
        different += (y != expected[i % 2]).sum()
    for i in range(500):
        launch(compiled, data.x[16 * (i % 2) : 16 * (i % 2) + m], data.weight, None, y)
        if i % 50 > 47:
            different += (y != expected[i % 2]).sum()
    assert int(different) == 0, f"{config}: {int(different)} elements differ"


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("point", HOLD_POINTS)
def test_a_rank_that_is_held_back_changes_nothing(arch, point, rank):
    """10^5 launches in a row with one rank late at one synchronisation point: no hang, no failure, the same bits."""
    n, k, m, config = 512, 1536, 16, SplitKConfig(64, 16, 4, 4)
    data = operands(n, k, "random", tokens=32)
    expected = [launch(_kernel(arch, n, k, config), data.x[i : i + m], data.weight) for i in (0, 16)]
    held = _kernel(arch, n, k, config, hold=(point, rank))
    y, different = torch.empty_like(expected[0]), torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    launch(held, data.x[:m], data.weight, None, y)
    with torch.cuda.graph(graph):
        for i in range(100):
            launch(held, data.x[16 * (i % 2) : 16 * (i % 2) + m], data.weight, None, y)
    for _ in range(HELD_LAUNCHES // 100):
        y.fill_(float("nan"))
        graph.replay()
        different += (y != expected[1]).sum()
    assert int(different) == 0, f"{point} of rank {rank}: {int(different)} elements differ"


# By point first: tests go round the shards, and so each shard compiles few of the configs.
@pytest.mark.parametrize("config", HELD_CONFIGS, ids=lambda config: ".".join(map(str, vars(config).values())))
@pytest.mark.parametrize("point", HOLD_POINTS)
def test_a_rank_that_is_held_back_in_other_pipelines(arch, point, config):
    """One rank late for microseconds and for a millisecond, at one token and at many: the bits of a kernel that is not
    held, whose config is another one of the same split."""
    n, k = 512, 1536
    held, hold = compiled_held(arch, n, k, config)
    free = _kernel(arch, n, k, next(one for one in CONFIGS if one.split == config.split))
    data = operands(n, k, "random", tokens=128)
    for m in (1, 64):
        inputs = [data.x[:m], data.x[64 : 64 + m]]
        expected = [launch(free, x, data.weight) for x in inputs]
        outputs, graph = [torch.empty_like(y) for y in expected], torch.cuda.CUDAGraph()
        launch(held, inputs[0], data.weight, None, outputs[0])
        with torch.cuda.graph(graph):
            for i in range(10):
                launch(held, inputs[i % 2], data.weight, None, outputs[i % 2])
        for rank in sorted({0, 1, config.split - 1}):
            for nanoseconds, replays in HOLDS:
                hold(point, rank, nanoseconds)
                different = torch.zeros((), dtype=torch.int64, device="cuda")
                for _ in range(replays):
                    for y in outputs:
                        y.fill_(float("nan"))
                    graph.replay()
                    for y, want in zip(outputs, expected):
                        different += (y != want).sum()
                where = f"{point} of rank {rank} for {nanoseconds} ns, M = {m}, {config}"
                assert int(different) == 0, f"{where}: {int(different)} elements differ"
        hold(point, -1, 0)


@pytest.mark.parametrize("n", [100, 104], ids=["elements", "words"])
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3], CONFIGS[8]], ids=lambda config: str(config.split))
def test_small_shapes_for_the_sanitizer(arch, config, n):
    """Every path of the kernel with little work: tails of N, K and M, residual, several stages and token tiles."""
    k, m = 1032, config.token_columns + 3
    data = operands(n, k, "random", tokens=80)
    compiled = _kernel(arch, n, k, config, residual=True)
    out = CanaryOutput(m, n, torch.bfloat16, "cuda", pitch=104)
    added = poisoned(data.residual[:m], 104)
    launch(compiled, data.x[:m], data.weight, added, out.y)
    assert out.problem() is None, f"N = {n}, {config}: {out.problem()}"
    report = parity(out.y, data.reference(m, True))
    assert report.ok, f"N = {n}, {config}: {report}"
