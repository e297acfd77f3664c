"""``split_k`` compiles for every generation without a GPU: products and hand-overs as its config says."""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import pytest
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from conformance.cases import SPLIT_K_CONFIGS, unit_id, written_split_k_units
from conformance.gpu.held_split_k import compile_told
from conformance.machine_code import compiled
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.split_k import HOLD_POINTS, compile_unit, token_columns


def test_every_token_tile_is_compiled(arch):
    assert {unit.spec.config.token_columns for unit in written_split_k_units(arch)} == set(token_columns(arch))


def test_the_products_are_as_the_config_says(arch, split_k_unit):
    unit, made = split_k_unit, compiled(split_k_unit)
    problem = _wgmma_problem(unit, made.code.sass) if arch == SM90 else _tcgen05_problem(unit, made.code.sass, made.ptx)
    assert problem is None, f"{unit_id(unit)}: {problem}"


def _wgmma_problem(unit, sass: str) -> str | None:
    multiplies = 4 * unit.spec.config.k_blocks
    # Two waits in all: inside the loop for the stage before, after it for the last. More means ptxas serialised them.
    if (sass.count("HGMMA"), sass.count("WARPGROUP.DEPBAR")) != (multiplies, 2):
        return (
            f"{sass.count('HGMMA')} wgmmas, {sass.count('WARPGROUP.DEPBAR')} waits for them; expected {multiplies}, 2"
        )


def _tcgen05_problem(unit, sass: str, ptx: str) -> str | None:
    """Products, descriptors and loads as the PTX ISA encodes them (tcgen05: instruction and matrix descriptors)."""
    config, kind = unit.spec.config, {"float16": 0, "bfloat16": 1}[unit.spec.input_dtype]
    multiplies = 4 * config.k_blocks * config.warpgroups
    if sass.count("UTCHMMA") != multiplies:
        return f"{sass.count('UTCHMMA')} products, expected {multiplies}"
    shape = {number for number in map(int, re.findall(r"mov\.b32 \t%r\d+, (\d+);", ptx)) if number >> 24 == 64 // 16}
    expected = 4 << 24 | config.token_columns // 8 << 17 | kind << 10 | kind << 7 | 1 << 4  # M, N, operands, FP32 sums
    if shape != {expected}:
        return f"instruction descriptors {shape}, expected M = 64, N = {config.token_columns}: {expected}"
    # Start and leading offset vary or do not matter; between groups of 8 rows 1024 bytes, fixed bits, 128-byte swizzle.
    descriptors = {word for word in map(int, re.findall(r"or\.b64 \t%rd\d+, %rd\d+, (\d+);", ptx)) if word >> 61 == 2}
    fields = {(word >> 32 & 0x3FFF, word >> 46 & 3) for word in descriptors}
    if fields != ({(64, 1), (0, 1)} if config.token_columns == 8 else {(64, 1)}):
        return f"matrix descriptors {[hex(word) for word in descriptors]}"
    loads = re.findall(r"tcgen05\.ld\.sync\.aligned\.16x256b\.x(\d+)\.b32", ptx)
    if loads != [str(config.token_columns // 8)]:
        return f"loads of tensor memory x{loads}"


def test_sums_lie_in_tensor_memory_as_the_epilogue_takes_them():
    """CuTe's own layouts of a product of 64 rows and of 16x256b loads, against ``split_k_epilogue``'s acc[4 group + q]."""
    found = {}

    @cute.jit
    def layouts():
        for columns, repeat in ((8, tcgen05.Repetition.x1), (64, tcgen05.Repetition.x8)):
            mma = blackwell.make_trivial_tiled_mma(
                BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, tcgen05.CtaGroup.ONE, (64, columns)
            )
            sums = mma.make_fragment_C(mma.partition_shape_C((64, columns)))
            load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld16x256bOp(repeat), Float32), sums[(None, None), 0, 0])
            found[columns] = (str(sums.layout), str(load.layout_dst_tv_tiled), str(load.tiler_mn))

    cute.compile(layouts, options="--gpu-arch=sm_100a")
    # A row's 16s are 32 lanes apart, a lane is 65536; a column is a column.
    assert found[8][0] == "(((16,4),8),1,1):(((65536,2097152),1),0,0)"
    assert found[64][0] == "(((16,4),64),1,1):(((65536,2097152),1),0,0)"
    for columns, (_, loaded, tile) in found.items():
        # Of a tile, row 16 a + b is at 4 b + a, and a column is 64 further on.
        assert tile == f"((4,16):(16,1), {columns}:1)"
        place = _layout(loaded)
        for thread in range(128):
            for value in range(columns // 2):
                column, row = divmod(place(thread, value), 64)
                row = row % 4 * 16 + row // 4
                group, q, lane = value // 4, value % 4, thread % 32
                expected = (16 * (thread // 32) + lane // 4 + 8 * (q // 2), 8 * group + 2 * (lane % 4) + q % 2)
                assert (row, column) == expected, f"{columns} columns, thread {thread}, value {value}"


def _layout(text: str):
    """(thread, value) -> index, of a printed layout of two modes, the first index of each mode running fastest."""
    shape, stride = (ast.literal_eval(part) for part in text.split(":"))

    def offset(index: int, shape, stride) -> int:
        total = 0
        for extent, step in zip(_flat(shape), _flat(stride)):
            total, index = total + index % extent * step, index // extent
        return total

    return lambda thread, value: offset(thread, shape[0], stride[0]) + offset(value, shape[1], stride[1])


def _flat(nested) -> list[int]:
    return [nested] if isinstance(nested, int) else [one for part in nested for one in _flat(part)]


@pytest.mark.parametrize("point", HOLD_POINTS)
def test_each_hold_point_is_in_the_test_build_and_only_there(point, arch):
    """The spin reads the global timer: once in a held build, never in the one that is served."""
    plain = compile_unit(arch, 1536, 7168, 1, SPLIT_K_CONFIGS[0])
    held = compile_unit(arch, 1536, 7168, 1, SPLIT_K_CONFIGS[0], hold=(point, 1))
    with tempfile.TemporaryDirectory() as folder:
        compile_now(held, f"--keep-ptx --dump-dir={folder}")
        found = next(Path(folder).glob("*.ptx")).read_text().count("globaltimer")
    assert compiled(plain).ptx.count("globaltimer") == 0 and found > 0, f"{point}: {found}"


def test_a_build_that_is_told_has_every_hold_point(arch):
    """What is told lies at the address that it was built for; each spin reads the global timer twice."""
    address = 0x7F00_0000_1000
    with tempfile.TemporaryDirectory() as folder:
        compile_told(arch, 512, 1536, SPLIT_K_CONFIGS[0], address, f"--keep-ptx --dump-dir={folder}")
        ptx = next(Path(folder).glob("*.ptx")).read_text()
    assert ptx.count("globaltimer") == 2 * len(HOLD_POINTS) and str(address) in ptx
