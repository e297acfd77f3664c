"""``fused_a`` beyond what every cell is tried with: pitches, tails, dtypes, late inputs, equal bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.cases import FUSED_A_CONFIGS, table_cases
from conformance.gpu.late_writer import compiled_late_writer
from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.fused_a import TRIGGERS, FusedAConfig, compile_unit, parse_config, resolved, why_not
from lowlat_gemm.reference import parity

SHAPES = [(100, 7168), (17, 1056), (8, 2048)]


def _kernel(arch, n, k, m, config, **options):
    problem = why_not(arch, n, k, m, config, residual=options.get("residual", False))
    assert problem is None, f"N = {n}, K = {k}, M = {m}, {config}: {problem}"
    return COMPILE_CACHE.get(compile_unit(arch, n, k, m, config, **options))


def _check(arch, n, k, m, config, residual=False, dtype="bfloat16"):
    where = f"{dtype} M = {m}, N = {n}, K = {k}, {config}"
    compiled = _kernel(arch, n, k, m, config, residual=residual, dtype=dtype)
    for kind in ("random", "integer"):
        data = operands(n, k, kind, tokens=max(16, m), dtype=getattr(torch, dtype))
        # An odd pitch of y: element stores; a multiple of 8: stores of whole words.
        out = CanaryOutput(m, n, data.x.dtype, "cuda", pitch=-(-n // 8) * 8 + m % 2)
        added = poisoned(data.residual[:m], n + 3) if residual else None
        # The slice of a packed projection that F_B really reads has such a pitch.
        launch(compiled, poisoned(data.x[:m], k + 6160), poisoned(data.weight, k + 8), added, out.y)
        assert out.problem() is None, f"{where}: {out.problem()}"
        report = parity(out.y, data.reference(m, residual))
        assert report.ok, f"{where} {kind}: {report}"
        if kind == "integer":
            assert torch.equal(out.y, data.reference(m, residual).value.to(out.y.dtype)), f"{where}: integers differ"


def test_the_tables_cells(arch):
    """With layouts that the cells' own parity tests do not have: pitches of x, weight and y."""
    cells = [case for case in table_cases(arch) if case.cell.backend == "fused_a"]
    assert cells
    for case in cells:
        _check(arch, case.n, case.k, case.m, parse_config(case.cell.config), case.residual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("config", FUSED_A_CONFIGS, ids=lambda config: ".".join(map(str, vars(config).values())))
def test_tails_and_residual(arch, config, dtype):
    for n, k in SHAPES:
        for m in (1, 2, 7, 8, 9, 16, 17, 30, 33, 64):
            if why_not(arch, n, k, m, config, residual=True) is None:
                _check(arch, n, k, m, config, residual=True, dtype=dtype)


@pytest.mark.parametrize("config", [FusedAConfig(2, 1, 2, 4, 1), FusedAConfig(1, 1, 4, 4, 2), FusedAConfig(1, 4, 1, 1), FusedAConfig()],
                         ids=lambda config: ".".join(map(str, vars(config).values())))
def test_one_short_k(arch, config):
    """K = 128: all weights are in registers before the wait. Tails of N; both kinds of store, up to 64 tokens."""
    for n in (1536, 100, 17):
        for m in (1, 2, 8, 15, 16, 31, 32, 63, 64):
            if why_not(arch, n, 128, m, config) is None:
                _check(arch, n, 128, m, config)
                _check(arch, n, 128, m, config, residual=True)


@pytest.mark.parametrize("n", [100, 104], ids=["elements", "words"])
@pytest.mark.parametrize("k", [128, 416])
@pytest.mark.parametrize("config", [FusedAConfig(2, 1, 2, 4, 2), FusedAConfig(1, 4, 1, 1, 1)],
                         ids=lambda config: ".".join(map(str, vars(config).values())))
def test_small_shapes_for_the_sanitizer(arch, config, k, n):
    """Every path of the kernel with little work: one and two token groups, K in one piece and in a loop, both stores."""
    data = operands(n, k, "random")
    for m in (5, 11):
        compiled = _kernel(arch, n, k, m, config, residual=True)
        out = CanaryOutput(m, n, torch.bfloat16, "cuda", pitch=104)
        launch(compiled, data.x[:m], data.weight, data.residual[:m], out.y)
        assert out.problem() is None, f"M = {m}, N = {n}, K = {k}, {config}: {out.problem()}"
        report = parity(out.y, data.reference(m, True))
        assert report.ok, f"M = {m}, N = {n}, K = {k}, {config}: {report}"


@pytest.mark.parametrize("k", [128, 7168])
def test_bits_do_not_depend_on_m_or_position(arch, k):
    n, data = 2112, operands(2112, k, "random", tokens=300)
    wanted = launch(_kernel(arch, n, k, 300, FusedAConfig()), data.x, data.weight)
    for m in (*range(1, 65), 65, 128, 300):
        y = launch(_kernel(arch, n, k, m, FusedAConfig()), data.x[:m], data.weight)
        assert torch.equal(y, wanted[:m]), f"M = {m}: {int((y != wanted[:m]).sum())} elements differ"
    alone = _kernel(arch, n, k, 1, FusedAConfig())
    for position in (*range(64), 299):
        assert torch.equal(launch(alone, data.x[position : position + 1], data.weight)[0], wanted[position]), position


@pytest.mark.parametrize("k_warps", [1, 2, 8])
@pytest.mark.parametrize("k", [128, 416, 7168])
def test_bits_depend_on_the_warps_over_k_alone(arch, k, k_warps):
    """What ``registry`` says of the configs of one row: tiles, blocks in flight and triggers change no bit."""
    n, data = 200, operands(200, k, "random", tokens=64)
    configs = [
        config
        for row_warps, row_tiles, unroll, trigger in ((1, 1, 1, 0), (2, 2, 1, 1), (1, 4, 1, 2), (2, 1, 2, 0), (1, 1, 4, 1))
        for config in [FusedAConfig(row_warps, k_warps, row_tiles, unroll, trigger)]
        if why_not(arch, n, k, 64, config) is None and why_not(arch, n, k, 1, config) is None
    ]
    assert len(configs) >= 2 or k // 32 < k_warps, configs
    for m in (1, 8, 9, 64):
        results = [launch(_kernel(arch, n, k, m, config), data.x[:m], data.weight) for config in configs]
        for config, y in zip(configs[1:], results[1:]):
            assert torch.equal(y, results[0]), f"K = {k}, M = {m}: {config} and {configs[0]} differ"


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_waits_for_a_predecessor_that_triggers_early_and_writes_late(arch, trigger):
    for n, k, m in ((1536, 128, 4), (2112, 7168, 12)):
        compiled = _kernel(arch, n, k, m, replace(resolved(FusedAConfig(), k), trigger=trigger))
        data = operands(n, k, "random")
        sources = [data.x[i : i + m].contiguous() for i in (0, 16 - m)]
        expected = [launch(compiled, source, data.weight) for source in sources]
        words = [source.view(torch.int32).flatten() for source in sources]
        writer, stream = compiled_late_writer(arch.compile_target), torch.cuda.current_stream().cuda_stream
        x, y = torch.full_like(sources[0], float("nan")), torch.empty_like(expected[0])
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(200):
            writer(words[i % 2], x.view(torch.int32).flatten(), 20_000, stream)
            launch(compiled, x, data.weight, None, y)
            different += (y != expected[i % 2]).sum()
        assert int(different) == 0, f"{n}x{k}: {int(different)} elements saw an old x"
