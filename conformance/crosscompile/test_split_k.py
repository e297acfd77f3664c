"""``split_k`` compiles for every generation without a GPU: shared memory as reckoned, its tensor cores as they should be."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from conformance.cases import SPLIT_K_CONFIGS as CONFIGS
from conformance.machine_code import read_cubin
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.split_k import HOLD_POINTS, compile_unit, shared_memory_bytes


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ".".join(map(str, vars(config).values())))
def test_compiles_without_spills_and_fits(config, residual, arch):
    unit = compile_unit(arch, 1536, 7168, 1, config, residual=residual)
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_now(unit, f"--keep-cubin --keep-ptx --dump-dir={folder}")
        code = read_cubin(next(Path(folder).glob("*.cubin")))
        ptx = next(Path(folder).glob("*.ptx")).read_text()
    assert code.stack_bytes == 0 and code.local_accesses == 0, f"{config}: spills"
    reckoned = shared_memory_bytes(config, residual=residual)
    assert f"constant({reckoned} : i64)" in str(compiled.ir_module), f"{config}: the launch takes other than {reckoned}"
    if arch == SM90:
        _check_wgmma(config, code.sass)
    else:
        _check_tcgen05(config, code.sass, ptx)


def _check_wgmma(config, sass: str) -> None:
    multiplies = 4 * config.k_blocks
    assert sass.count("HGMMA") == multiplies, f"{config}: {sass.count('HGMMA')} wgmmas, expected {multiplies}"
    # Two waits in all: inside the loop for the stage before, after it for the last. More means ptxas serialised them.
    assert sass.count("WARPGROUP.DEPBAR") == 2, f"{config}: ptxas waits between wgmmas"


def _check_tcgen05(config, sass: str, ptx: str) -> None:
    """Products, descriptors and loads as the PTX ISA encodes them (tcgen05: instruction and matrix descriptors)."""
    multiplies = 4 * config.k_blocks * config.warpgroups
    assert sass.count("UTCHMMA") == multiplies, f"{config}: {sass.count('UTCHMMA')} products, expected {multiplies}"
    shape = {number for number in map(int, re.findall(r"mov\.b32 \t%r\d+, (\d+);", ptx)) if number >> 24 == 64 // 16}
    expected = 4 << 24 | config.token_columns // 8 << 17 | 1 << 10 | 1 << 7 | 1 << 4  # M, N, BF16, BF16, FP32 sums
    assert shape == {expected}, f"{config}: instruction descriptors {shape}, expected M = 64, N = {config.token_columns}"
    # Start and leading offset vary or do not matter; between groups of 8 rows 1024 bytes, fixed bits, 128-byte swizzle.
    descriptors = {word for word in map(int, re.findall(r"or\.b64 \t%rd\d+, %rd\d+, (\d+);", ptx)) if word >> 61 == 2}
    strides = {word >> 32 & 0x3FFF for word in descriptors}
    one_group = {0} if config.token_columns == 8 else set()
    assert strides == {64} | one_group and {word >> 46 & 3 for word in descriptors} == {1}, [hex(w) for w in descriptors]
    loads = re.findall(r"tcgen05\.ld\.sync\.aligned\.16x256b\.x(\d+)\.b32", ptx)
    assert loads == [str(config.token_columns // 8)], f"{config}: loads of tensor memory x{loads}"


@pytest.mark.parametrize("point", HOLD_POINTS)
def test_each_hold_point_is_in_the_test_build_and_only_there(point, arch):
    """The spin reads the global timer: once in a held build, never in the one that is served."""
    found = []
    for hold in (None, (point, 1)):
        unit = compile_unit(arch, 1536, 7168, 1, CONFIGS[0], hold=hold)
        with tempfile.TemporaryDirectory() as folder:
            compile_now(unit, f"--keep-ptx --dump-dir={folder}")
            found.append(next(Path(folder).glob("*.ptx")).read_text().count("globaltimer"))
    assert found[0] == 0 and found[1] > 0, f"{point}: {found}"
