"""Projection objects on a pretended GPU: what they compile and launch, what each ValueError finds, moving weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lowlat_gemm
from conformance.fakes import bf16, clean_settings, cuda, device_of, execute, fake_table, public_world  # noqa: F401
from conformance.fakes import TOY_CONFIG, run_python, use_table
from lowlat_gemm import PreparedProjection, Projection, compile_projection, settings
from lowlat_gemm.arch import ARCHES, SM90, SM100, SM107, DeviceProperties
from lowlat_gemm.kernels.compile_cache import CompileError
from lowlat_gemm.kernels.split_k import SplitKConfig, default_config, shared_memory_bytes, why_not
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.settings import Settings, parse_deny

N, K = 96, 512
TACTICS = {8: (64, 8, 2, 4), 16: (64, 16, 1, 4), 3: SplitKConfig(48, 8, 4, 6, k_blocks=2)}
pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")


@pytest.fixture
def gpu():
    with torch.no_grad(), cuda([device_of(SM90)] * 2) as fake:
        yield fake


@pytest.fixture
def weight():
    return bf16(N, K, seed=1)


def launched(gpu):
    return [unit for unit, _ in gpu.calls]


# Projection


def test_static_k_kernels_for_one_two_and_four_tokens(gpu, weight):
    projection = Projection(weight)
    assert gpu.cache.compiles == 3 and [m for m in range(-1, 70) if projection.supports(m)] == [1, 2, 4]
    for m in (1, 2, 4):
        x = bf16(m, K, seed=m)
        y = projection(x)
        assert parity(y, reference_gemm(x, weight)).ok and y.dtype == torch.bfloat16 and y.shape == (m, N)
    assert [(unit.kernel, unit.spec.tokens, unit.spec.config.static_k) for unit in launched(gpu)] == [
        ("skinny", m, K) for m in (1, 2, 4)
    ]
    assert gpu.cache.compiles == 3, "a call compiled"


@pytest.mark.parametrize(
    ("n", "k", "served"),
    [
        (96, 512, [1, 2, 4]),
        (97, 512, []),  # N % 4
        (96, 520, []),  # K % (block_size * 8): steps of 2 to 4 elements a thread are not taken
        (96, 128, []),
        (3, 256, [1, 2, 4]),  # three outputs a block
        (1, 256, [1, 2, 4]),
        (96, 8, []),
    ],
)
def test_the_default_skips_what_its_steps_do_not_divide(gpu, n, k, served):
    projection = Projection(bf16(n, k))
    assert [m for m in range(70) if projection.supports(m)] == served


def test_split_k_tokens_take_split_k_where_there_is_a_tactic(gpu, weight):
    projection = Projection(weight, split_k_tokens=(4, 8, 64))
    assert [m for m in range(70) if projection.supports(m)] == [1, 2, 4, 8, 64]
    for m in (2, 4, 8, 64):
        x = bf16(m, K, seed=m)
        assert parity(projection(x), reference_gemm(x, weight)).ok
    kernels = [(unit.kernel, getattr(unit.spec.config, "token_columns", None)) for unit in launched(gpu)]
    assert kernels == [("skinny", None), ("split_k", 8), ("split_k", 8), ("split_k", 64)]


def test_configs_of_the_tables_come_first(gpu, monkeypatch, weight):
    tactic = {"rows": 24, "token_columns": 16, "split": 2, "stages": 3, "trigger": 1}
    cells = {2: ("skinny", TOY_CONFIG), 9: ("split_k", tactic), 10: ("flashinfer", {})}
    use_table(monkeypatch, fake_table(cells, n=N, k=K))
    projection = Projection(weight, split_k_tokens=[9, 10])
    for m in (1, 2, 9, 10):
        projection(bf16(m, K))
    configs = [unit.spec.config for unit in launched(gpu)]
    assert dataclasses.asdict(configs[1]) == {**TOY_CONFIG, "static_k": K}
    assert configs[0].static_k == K and configs[0].block_size == 64, "no cell: the default"
    assert configs[2] == SplitKConfig(**tactic, prefetch=2)
    assert configs[3].rows != 24 and configs[3].token_columns == 16


def test_a_damaged_table_leaves_the_defaults(gpu, monkeypatch, weight):
    def damaged(*names):
        raise lowlat_gemm.projection.TableError("damaged")

    monkeypatch.setattr(lowlat_gemm.projection, "plan_for", damaged)
    assert Projection(weight, [8]).supports(8)


def test_from_sm100_on_split_k_runs_because_it_is_asked_for(weight):
    with torch.no_grad(), cuda(device_of(SM100)) as fake:
        projection = Projection(weight, split_k_tokens=(16,))
        projection(bf16(16, K))
        assert [(unit.kernel, unit.target) for unit in launched(fake)] == [("split_k", "sm_100a")]


@pytest.mark.parametrize("changes", [{"disabled": True}, {"batch_invariant": True}])
def test_switched_off_it_supports_nothing(gpu, weight, changes):
    settings.restore(Settings(**changes))
    projection = Projection(weight, split_k_tokens=(8,))
    assert not any(map(projection.supports, range(70))) and gpu.cache.compiles == 0
    with pytest.raises(ValueError, match="8 tokens; supported are none"):
        projection(bf16(8, K))


def test_the_deny_list_counts(gpu, weight):
    settings.restore(Settings(deny=parse_deny(f"skinny:{N}x{K}@2,split_k")))
    projection = Projection(weight, split_k_tokens=(4, 8))
    assert [m for m in range(70) if projection.supports(m)] == [1, 4]


BAD_WEIGHTS = [
    (lambda: bf16(K), "found torch.bfloat16 .512,"),
    (lambda: bf16(N, K).float(), "found torch.float32 .96, 512."),
    (lambda: bf16(N, K).to(torch.int8), "found torch.int8"),
    (lambda: bf16(0, K), r"found \(0, 512\)"),
    (lambda: bf16(K, N).T, r"strides \(1, 96\)"),
    (lambda: bf16(N, K + 4)[:, :K], "row stride 516"),
    (lambda: bf16(N, K + 8)[:, 4 : K + 4], "starts 8 bytes past"),
    (lambda: bf16(N, K).as_strided((4, K), (8, 1)), "row stride 8 for 512 columns"),
]


@pytest.mark.parametrize(("make", "found"), BAD_WEIGHTS)
def test_a_weight_that_is_none(gpu, make, found):
    for build in (Projection, lambda weight: PreparedProjection(weight, TACTICS)):
        with pytest.raises(ValueError, match=found):
            build(make())


def test_a_device_that_has_no_kernels(weight):
    with pytest.raises(ValueError, match="expected a weight on a CUDA device, found it on cpu"):
        Projection(weight)
    with cuda(DeviceProperties("A100", (8, 0), 108, 2039.0)):
        for build in (Projection, lambda weight: PreparedProjection(weight, TACTICS)):
            with pytest.raises(ValueError, match=r"no kernels for A100 \(compute capability 8.0\)"):
                build(weight)
        with pytest.raises(ValueError, match="no kernels for A100"):
            compile_projection((64, 8, 2, 4), torch.bfloat16, None)


BAD_INPUTS = [
    (lambda gpu: bf16(8, K)[0], "x has 1 dimensions"),
    (lambda gpu: bf16(8, K + 8), "x has K = 520, weight has K = 512"),
    (lambda gpu: bf16(8, K).half(), "x is torch.float16, weight is torch.bfloat16"),
    (lambda gpu: gpu.place(bf16(8, K), "cuda:1"), "x is on cuda:1, weight on cuda:0"),
    (lambda gpu: bf16(8, 2 * K)[:, ::2], r"strides \(1024, 2\)"),
    (lambda gpu: bf16(8, K + 4)[:, :K], "row stride 516"),
    (lambda gpu: bf16(8, K + 8)[:, 4 : K + 4], "starts 8 bytes"),
    (lambda gpu: bf16(5, K), "5 tokens; .* are .*8"),
    (lambda gpu: bf16(0, K), "0 tokens; .* are .*8"),
]


@pytest.mark.parametrize(("make", "found"), BAD_INPUTS)
def test_an_input_that_is_none(gpu, weight, make, found):
    projection, prepared = Projection(weight, [8]), PreparedProjection(weight, TACTICS).prepare()
    x = make(gpu)
    with pytest.raises(ValueError, match=f"projection 96x512: .*{found}"):
        projection(x)
    with pytest.raises(ValueError, match=f"projection 96x512: .*{found}"):
        prepared.run(x, torch.empty(8, N, dtype=torch.bfloat16))
    assert not gpu.calls


@pytest.mark.parametrize("tokens", [0, -1, 1.0, True, "8"])
def test_token_counts_that_are_none(gpu, weight, tokens):
    for build in (lambda: Projection(weight, [tokens]), lambda: PreparedProjection(weight, {tokens: (64, 8, 2, 4)})):
        with pytest.raises(ValueError, match=f"token counts of 1 and more, found {tokens!r}"):
            build()


def test_a_kernel_that_does_not_compile_is_said_at_once(gpu, weight):
    gpu.compile_error = RuntimeError("no such instruction")
    with pytest.raises(CompileError, match="no such instruction"):
        Projection(weight)
    with pytest.raises(CompileError, match="no such instruction"):
        PreparedProjection(weight, TACTICS).prepare()


def test_nothing_compiles_during_capture(gpu, weight):
    gpu.capturing = True
    with pytest.raises(execute.NotCompiledError, match="skinny is not compiled"):
        Projection(weight)
    with pytest.raises(execute.NotCompiledError, match="split_k is not compiled"):
        PreparedProjection(weight, TACTICS).prepare()
    assert gpu.cache.compiles == 0 and gpu.cache.late == 3 + 1, "what was missing counts, of skinny and of the first tactic"
    gpu.capturing = False
    prepared = PreparedProjection(weight, TACTICS).prepare()
    gpu.capturing, made = True, gpu.cache.compiles
    prepared.prepare().run(bf16(8, K), torch.empty(8, N, dtype=torch.bfloat16))
    assert gpu.cache.compiles == made


# PreparedProjection


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prepared_token_counts_run_into_the_callers_output(gpu, dtype, output_dtype):
    weight = bf16(N, K + 8, seed=1).to(dtype)[:, :K]
    prepared = PreparedProjection(weight, TACTICS, output_dtype=output_dtype)
    assert prepared.prepare() is prepared and gpu.cache.compiles == 3
    for m, tactic in TACTICS.items():
        x, out = bf16(m, K, seed=m).to(dtype), torch.full((m, N + 5), float("nan"), dtype=output_dtype)[:, 1 : N + 1]
        assert prepared.run(x, out) is out
        assert parity(out, reference_gemm(x, weight)).ok
        unit = launched(gpu)[-1]
        spec = unit.spec
        names = (spec.input_dtype, spec.output_dtype, spec.residual)
        assert names == (str(dtype)[6:], str(output_dtype)[6:], False)
        wanted = tactic if isinstance(tactic, SplitKConfig) else SplitKConfig(*tactic)
        assert dataclasses.replace(spec.config, prefetch=0) == wanted
    assert gpu.cache.compiles == 3


def test_run_before_prepare(gpu, weight):
    with pytest.raises(ValueError, match=r"8 tokens; prepared are none: call prepare\(\) first"):
        PreparedProjection(weight, TACTICS).run(bf16(8, K), torch.empty(8, N, dtype=torch.bfloat16))


@pytest.mark.parametrize("output_dtype", [torch.float16, torch.int32, None])
def test_output_dtypes_that_are_none(gpu, weight, output_dtype):
    with pytest.raises(ValueError, match=f"output of BF16 or FP32, found {output_dtype}"):
        PreparedProjection(weight, TACTICS, output_dtype=output_dtype)
    with pytest.raises(ValueError, match=f"output of BF16 or FP32, found {output_dtype}"):
        compile_projection((64, 8, 2, 4), output_dtype, "sm90")


@pytest.mark.parametrize(
    ("tactic", "found"),
    [
        ((64, 8, 2), "expected .rows, token columns, split, stages."),
        ((64, 8, 2, 4, 5), "expected .rows"),
        (7, "invalid tactic 7"),
        (None, "invalid tactic None"),
        ((64, 8, 2.0, 4), "split"),
        ((0, 8, 2, 4), "rows"),
        ((60, 8, 2, 4), "rows 60"),
        ((64, 20, 2, 4), "token_columns 20"),
        ((64, 8, 9, 4), "split 9"),
        ((64, 8, 2, 1), "stages 1"),
        ((128, 64, 2, 32), "bytes of shared memory"),
    ],
)
def test_tactics_that_are_none(gpu, weight, tactic, found):
    with pytest.raises(ValueError, match=found):
        PreparedProjection(weight, {8: tactic})
    with pytest.raises(ValueError, match=found):
        compile_projection(tactic, torch.bfloat16, "sm90")


def test_a_tactic_that_the_shape_cannot_have(gpu, weight):
    with pytest.raises(ValueError, match=r"invalid tactic \(64, 8, 5, 4\) for 8 tokens of 96x512: .* only 4 units"):
        PreparedProjection(weight, {8: (64, 8, 5, 4)})
    assert compile_projection((64, 8, 5, 4), torch.bfloat16, "sm90"), "code alone has no shape"
    with pytest.raises(ValueError, match="expected a tactic .* found no policies"):
        PreparedProjection(weight, {})


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda gpu: torch.empty(8, N + 1, dtype=torch.bfloat16), r"found \[8, 97\] of torch.bfloat16 on cuda:0"),
        (lambda gpu: torch.empty(9, N, dtype=torch.bfloat16), r"found \[9, 96\]"),
        (lambda gpu: torch.empty(8 * N, dtype=torch.bfloat16), r"found \[768\]"),
        (lambda gpu: torch.empty(8, N), "of torch.float32"),
        (lambda gpu: gpu.place(bf16(8, N), "cuda:1"), "on cuda:1"),
        (lambda gpu: bf16(N, 8).T, r"strides \(1, 8\)"),
        (lambda gpu: bf16(8, N).as_strided((8, N), (8, 1)), r"strides \(8, 1\)"),
    ],
)
def test_an_output_that_is_none(gpu, weight, make, found):
    prepared = PreparedProjection(weight, TACTICS).prepare()
    with pytest.raises(ValueError, match=found):
        prepared.run(bf16(8, K), make(gpu))
    assert not gpu.calls


def test_an_output_over_an_input(gpu, weight):
    prepared, buffer = PreparedProjection(weight, TACTICS).prepare(), bf16(8, K + N)
    prepared.run(buffer[:, :K], buffer[:, K:])
    with pytest.raises(ValueError, match="the output shares memory with x"):
        prepared.run(buffer[:, :K], buffer[:, K - 1 : K + N - 1])
    with pytest.raises(ValueError, match="the output shares memory with the weight"):
        prepared.run(bf16(8, K), weight[:8, :N])


def test_maps_are_made_once_and_again_where_the_weight_moves(gpu, weight):
    owner = torch.nn.Parameter(weight, requires_grad=False)
    prepared = PreparedProjection(owner, TACTICS).prepare()
    assert sorted(what[-1] for what in gpu.maps) == [48, 64]
    kept = prepared.weight_map(64)
    assert prepared.weight_map(64) is kept and len(gpu.maps) == 2
    owner.data.copy_(bf16(N, K, seed=5))
    assert prepared.weight_map(64) is kept, "written in place"
    owner.data = bf16(N, K, seed=6)
    moved = prepared.weight_map(64)
    assert moved is not kept and gpu.maps[-1][1] == owner.data_ptr()
    x, out = bf16(8, K), torch.empty(8, N, dtype=torch.bfloat16)
    assert parity(prepared.run(x, out), reference_gemm(x, owner.data)).ok, "a launch read the old storage"
    with pytest.raises(ValueError, match="1 to 256 rows"):
        prepared.weight_map(0)


@pytest.mark.parametrize("new", [lambda: bf16(N - 8, K), lambda: bf16(N, K).half()], ids=["shape", "dtype"])
def test_a_weight_that_became_another_is_refused(gpu, weight, new):
    owner = torch.nn.Parameter(weight, requires_grad=False)
    projection, prepared = Projection(owner, [8]), PreparedProjection(owner, TACTICS).prepare()
    owner.data = new()
    for call in (lambda: projection(bf16(8, K)), lambda: prepared.run(bf16(8, K), bf16(8, N)), prepared.prepare):
        with pytest.raises(ValueError, match="the weight is now .* prepared was torch.bfloat16 .96, 512. on cuda:0"):
            call()


def test_one_row_one_column_and_foreign_strides(gpu):
    weight = bf16(1, 3 * K, seed=1).as_strided((1, K), (3, 1))
    x = bf16(1, 2 * K).as_strided((1, K), (5, 1))
    assert parity(Projection(weight)(x), reference_gemm(x, weight)).ok
    out = torch.empty(2, 8, dtype=torch.float32).T[:8, :1]
    prepared = PreparedProjection(weight, {8: (64, 8, 2, 4)}, output_dtype=torch.float32).prepare()
    tall = bf16(8, K, seed=2)
    assert parity(prepared.run(tall, out), reference_gemm(tall, weight)).ok


def test_the_device_of_the_weight_is_entered(gpu):
    weight, x = gpu.place(bf16(N, K), "cuda:1"), gpu.place(bf16(8, K), "cuda:1")
    compiler, made_on = gpu.compiler, []
    gpu.compiler = lambda unit: made_on.append(gpu.current) or compiler(unit)
    prepared = PreparedProjection(weight, TACTICS).prepare()
    assert made_on == [1, 1, 1] and set(gpu.entered) == {1}
    gpu.entered.clear()
    prepared.run(x, gpu.place(torch.empty(8, N, dtype=torch.bfloat16), "cuda:1"))
    assert gpu.entered == [1] and gpu.current == 0
    gpu.entered.clear()
    Projection(weight)
    assert set(gpu.entered) == {1}


def test_a_residual_is_added_where_the_object_was_made_for_one(gpu, weight):
    prepared = PreparedProjection(weight, TACTICS, output_dtype=torch.float32, residual=True).prepare()
    x, residual, out = bf16(8, K), bf16(8, N + 3, seed=3).float()[:, 1 : N + 1], torch.empty(8, N)
    assert prepared.run(x, out, residual) is out and launched(gpu)[-1].spec.residual
    assert parity(out, reference_gemm(x, weight, residual)).ok
    into = residual.clone()
    assert torch.equal(prepared.run(x, into, into), out), "in place"
    with pytest.raises(ValueError, match="shares memory with the residual and is not the same matrix"):
        prepared.run(x, residual[:, :N], residual.as_strided((8, N), (N + 3, 1), 2))
    with pytest.raises(ValueError, match="expected residual .8, 96. of torch.float32 .* found .8, 96. of torch.bfloat16"):
        prepared.run(x, out, residual.bfloat16())
    with pytest.raises(ValueError, match="run without a residual; it was made with residual=True"):
        prepared.run(x, out)
    with pytest.raises(ValueError, match="run with a residual; it was made with residual=False"):
        PreparedProjection(weight, TACTICS).prepare().run(x, bf16(8, N), bf16(8, N))


# compile_projection


def test_one_kernel_for_equal_requests(gpu):
    first = compile_projection((64, 8, 2, 4), torch.bfloat16, "sm90")
    assert compile_projection(SplitKConfig(64, 8, 2, 4), torch.bfloat16, SM90) is first and gpu.cache.compiles == 1
    assert compile_projection((64, 8, 2, 4), torch.bfloat16, None) is first
    others = [
        compile_projection((64, 8, 2, 4), torch.float32, "sm90"),
        compile_projection((64, 8, 2, 4), torch.bfloat16, "sm90", torch.float16),
        compile_projection((64, 8, 2, 4), torch.bfloat16, "sm103"),
    ]
    assert len({first, *others}) == 4 == gpu.cache.compiles
    with pytest.raises(ValueError, match="input of BF16 or FP16, found torch.float32"):
        compile_projection((64, 8, 2, 4), torch.bfloat16, "sm90", torch.float32)
    with pytest.raises(ValueError, match="unknown arch 'sm80'"):
        compile_projection((64, 8, 2, 4), torch.bfloat16, "sm80")


def test_without_the_compiler_the_packages_are_named(tmp_path):
    code = """\
import torch, lowlat_gemm
try:
    lowlat_gemm.compile_projection((64, 8, 2, 4), torch.bfloat16, "sm90")
except ImportError as error:
    print(error)
"""
    result = run_python("-c", code, folder=tmp_path, hide=("cutlass", "tvm_ffi"))
    assert "not installed: nvidia-cutlass-dsl, apache-tvm-ffi" in result.stdout, result.stderr


@pytest.mark.parametrize(("arch", "unroll"), [(SM90, 2), (SM107, 1)], ids=str)
def test_a_static_k_of_one_chunk_is_cut_in_two_where_it_would_spill(arch, unroll):
    with torch.no_grad(), cuda(device_of(arch)) as fake:
        Projection(bf16(96, 1536))(bf16(4, 1536))
    config = launched(fake)[0].spec.config
    assert (config.step, config.k_unroll, config.static_k) == (768, unroll, 1536)


# split_k's default


@pytest.mark.parametrize("arch", ARCHES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(1536, 7168), (7168, 768), (2112, 7168), (163840, 7168), (100, 1032), (1, 8)])
def test_a_default_is_served_and_fills_the_gpu_once(arch, m, n, k):
    config = default_config(arch, n, k, m, 132)
    assert config is not None and why_not(arch, n, k, m, config) is None
    assert config.token_columns >= min(m, 64)
    assert shared_memory_bytes(config, "float32") <= arch.shared_memory_bytes // 2, "two do not share an SM"
    ctas = -(-n // config.rows) * config.split * -(-m // config.token_columns)
    assert ctas <= 264 or (config.rows, config.split) == (64, 1)
    if n * k > 10_000_000 and ctas <= 264:
        assert ctas > 192, f"{ctas} CTAs leave SMs idle"


def test_no_default_where_nothing_serves():
    assert default_config(SM90, 100, 1031, 8, 132) is None
