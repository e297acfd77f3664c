"""Projection objects: parity at every token count that they serve, padded rows, pitches, dtypes, capture, replays."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import CanaryOutput, operands, poisoned
from lowlat_gemm import PreparedProjection, Projection, compile_projection, execute, weight_map
from lowlat_gemm.kernels.split_k import SplitKConfig
from lowlat_gemm.reference import parity, reference_gemm

#: (N, K): GLM-5.3-Flash's dsa_fused_qkv_a, Kimi-K3's f_a at TP 8, and one that ends in every tail of split_k.
SHAPES = [(2048, 4096), (1536, 7168), (104, 1032)]
SPLIT_K_TOKENS = (3, 4, 8, 9, 16, 24, 33, 64)
#: One tactic a token tile, several splits, one and two row warpgroups, and what a config has besides it.
POLICIES = {
    4: (56, 8, 4, 10),
    8: (128, 8, 2, 4),
    16: SplitKConfig(64, 16, 3, 3, k_blocks=2, trigger=2),
    32: (48, 32, 1, 5),
    64: SplitKConfig(64, 64, 2, 6, token_stages=4),
    100: (64, 64, 2, 6),
}
REPLAYS = 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_projection_at_every_token_count_that_it_supports(arch, n, k, dtype):
    data = operands(n, k, "random", dtype=dtype)
    projection = Projection(poisoned(data.weight, k + 16), SPLIT_K_TOKENS)
    served = [m for m in range(1, 65) if projection.supports(m)]
    assert set(served) >= set(SPLIT_K_TOKENS), f"{n}x{k}: {served}"
    if k % 256 == 0:
        assert {1, 2} <= set(served), f"{n}x{k}: skinny is not among {served}"
    made = execute.COMPILE_CACHE.compiles
    for m in served:
        y = projection(poisoned(data.x[:m], k + 8))
        report = parity(y, data.reference(m, False))
        assert report.ok and y.dtype == dtype, f"{n}x{k}, M = {m}: {report}"
    assert execute.COMPILE_CACHE.compiles == made, "a call compiled"


@pytest.mark.parametrize("kind", ["random", "integer"])
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_prepared_projection_at_every_prepared_count(arch, n, k, output_dtype, kind):
    data = operands(n, k, kind, tokens=max(POLICIES))
    prepared = PreparedProjection(poisoned(data.weight, k + 16), POLICIES, output_dtype=output_dtype).prepare()
    for m in POLICIES:
        where = f"{kind} M = {m}, {n}x{k}, {output_dtype}"
        for pitch in (n, n + 8, n + 3):
            if output_dtype is torch.bfloat16:
                canary = CanaryOutput(m, n, output_dtype, "cuda", pitch=pitch)
                out = canary.y
            else:
                canary, out = None, torch.full((m, pitch), float("nan"), device="cuda")[:, :n]
            assert prepared.run(poisoned(data.x[:m], k + 8), out) is out
            report = parity(out, data.reference(m, False))
            assert report.ok, f"{where}, pitch {pitch}: {report}"
            assert canary is None or canary.problem() is None, f"{where}, pitch {pitch}: {canary.problem()}"
            if canary is None and pitch > n:
                beside = out.as_strided((m - 1, pitch - n), (pitch, 1), n)
                assert bool(beside.isnan().all()), f"{where}, pitch {pitch}: written between the rows"
            if kind == "integer":
                want = data.reference(m, False).value.to(output_dtype)
                assert torch.equal(out, want), f"{where}: {int((out != want).sum())} elements differ"


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_a_prepared_residual_also_in_place(arch, output_dtype):
    for n, k in SHAPES:
        data = operands(n, k, "random", tokens=max(POLICIES))
        prepared = PreparedProjection(data.weight, POLICIES, output_dtype=output_dtype, residual=True).prepare()
        for m in POLICIES:
            out = torch.full((m, n), float("nan"), dtype=output_dtype, device="cuda")
            prepared.run(data.x[:m], out, data.residual[:m].to(output_dtype))
            report = parity(out, data.reference(m, True))
            assert report.ok, f"M = {m}, {n}x{k}: {report}"
            for pitch in (n, n + 3):
                into = poisoned(data.residual[:m].to(output_dtype), pitch)
                prepared.run(data.x[:m], into, into)
                assert torch.equal(into, out), f"M = {m}, {n}x{k}, pitch {pitch}: in place differs"


def test_padding_rows_are_input_and_change_no_other_row(arch):
    """Whatever is in them, NaN and infinity too: they come out as NaN, and the tokens' bits are those without them."""
    n, k = SHAPES[1]
    data = operands(n, k, "random")
    prepared = PreparedProjection(data.weight, POLICIES).prepare()
    for m in (8, 16, 32, 64):
        out, again = torch.empty(2, m, n, dtype=torch.bfloat16, device="cuda")
        prepared.run(data.x[:m], out)
        for filler in (0.0, float("nan"), float("inf")):
            padded = data.x[:m].clone()
            padded[m - 3 :] = filler
            prepared.run(padded, again)
            assert torch.equal(again[: m - 3], out[: m - 3]), f"M = {m}: rows of {filler} reached other tokens"
            rows = again[m - 3 :]
            assert bool((rows == 0).all() if filler == 0.0 else (~rows.isfinite()).all()), f"M = {m}, {filler}"


@pytest.mark.parametrize("m", [8, 64])
def test_replays_follow_their_inputs(arch, m):
    """Both objects in one graph, a thousand replays: each equals the eager launch on the same input, bit for bit."""
    n, k = SHAPES[1]
    data = operands(n, k, "random")
    projection = Projection(data.weight, [m])
    prepared = PreparedProjection(data.weight, POLICIES).prepare()
    inputs = [data.x[:m].clone(), data.x[:m].flip(0).contiguous() * 2, data.x[-m:].contiguous() - 1]
    eager = [(projection(x), prepared.run(x, torch.empty(m, n, dtype=x.dtype, device="cuda"))) for x in inputs]
    x, out = torch.zeros_like(inputs[0]), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    made, graph = execute.COMPILE_CACHE.compiles, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = projection(x)
        prepared.run(x, out)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        x.copy_(inputs[replay % len(inputs)])
        y.fill_(float("nan"))
        out.fill_(float("nan"))
        graph.replay()
        for got, want in zip((y, out), eager[replay % len(inputs)]):
            different += (got != want).sum()
    assert int(different) == 0, f"M = {m}: {int(different)} elements of {REPLAYS} replays differ"
    assert execute.COMPILE_CACHE.compiles == made, "the capture compiled"


def test_a_weight_that_moves_is_read_where_it_is(arch):
    n, k = SHAPES[0]
    data = operands(n, k, "random")
    owner = torch.nn.Parameter(data.weight.clone(), requires_grad=False)
    projection, prepared = Projection(owner), PreparedProjection(owner, POLICIES).prepare()
    first_map = prepared.weight_map(64)
    owner.data = data.weight.flip(0).contiguous()
    reference = reference_gemm(data.x[:4], owner.data)
    assert parity(projection(data.x[:4]), reference).ok
    out = torch.empty(4, n, dtype=torch.bfloat16, device="cuda")
    assert parity(prepared.run(data.x[:4], out), reference).ok
    assert not torch.equal(prepared.weight_map(64), first_map), "the map is still of the old storage"
    with pytest.raises(ValueError, match="5 tokens"):
        projection(data.x[:5])


def test_the_driver_encodes_a_map(arch):
    """That the driver takes every weight that is accepted; what TMA loads through a map is not looked at here."""
    for n, k in (*SHAPES, (1, 8)):
        weight = poisoned(operands(n, k, "random").weight, k + 16)
        maps = [weight_map(weight, rows) for rows in (1, 56, 256)]
        assert all(one.shape == (128,) and one.data_ptr() % 64 == 0 and bool(one.any()) for one in maps)
        assert torch.equal(maps[0], weight_map(weight, 1)) and not torch.equal(maps[0], maps[1])


def test_compiled_code_has_no_weight_in_it(arch):
    """One kernel for two weights and shapes."""
    kernel = compile_projection(POLICIES[8], torch.bfloat16, arch)
    assert compile_projection(SplitKConfig(*POLICIES[8]), torch.bfloat16, arch.name) is kernel
    for n, k in SHAPES[:2]:
        data = operands(n, k, "random")
        y = torch.full((8, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        kernel(data.x[:8], data.weight, None, y, torch.cuda.current_stream().cuda_stream)
        assert parity(y, data.reference(8, False)).ok, f"{n}x{k}"
