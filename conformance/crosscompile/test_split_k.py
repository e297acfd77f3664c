"""``split_k`` compiles for SM90 without a GPU, does not spill, and takes the shared memory that its predicate reckons."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from conformance.cases import SPLIT_K_CONFIGS as CONFIGS
from conformance.machine_code import read_cubin
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.split_k import HOLD_POINTS, compile_unit, shared_memory_bytes, why_not


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ".".join(map(str, vars(config).values())))
def test_compiles_without_spills_and_fits(config, residual, arch):
    if arch != SM90:
        assert "not built" in why_not(arch, 1536, 7168, 1, config, residual=residual), f"{arch} needs a test here"
        return
    unit = compile_unit(SM90, 1536, 7168, 1, config, residual=residual)
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_now(unit, f"--keep-cubin --dump-dir={folder}")
        code = read_cubin(next(Path(folder).glob("*.cubin")))
    assert code.stack_bytes == 0 and code.local_accesses == 0, f"{config}: spills"
    reckoned = shared_memory_bytes(config, residual=residual)
    assert f"constant({reckoned} : i64)" in str(compiled.ir_module), f"{config}: the launch takes other than {reckoned}"
    multiplies = 4 * config.k_blocks
    assert code.sass.count("HGMMA") == multiplies, f"{config}: {code.sass.count('HGMMA')} wgmmas, expected {multiplies}"
    # Two waits in all: inside the loop for the stage before, after it for the last. More means ptxas serialised them.
    assert code.sass.count("WARPGROUP.DEPBAR") == 2, f"{config}: ptxas waits between wgmmas"


@pytest.mark.parametrize("point", HOLD_POINTS)
def test_each_hold_point_is_in_the_test_build_and_only_there(point, arch):
    """The spin reads the global timer: once in a held build, never in the one that is served."""
    if arch != SM90:
        assert "not built" in why_not(arch, 1536, 7168, 1, CONFIGS[0]), f"{arch} needs a test here"
        return
    found = []
    for hold in (None, (point, 1)):
        unit = compile_unit(SM90, 1536, 7168, 1, CONFIGS[0], hold=hold)
        with tempfile.TemporaryDirectory() as folder:
            compile_now(unit, f"--keep-ptx --dump-dir={folder}")
            found.append(next(Path(folder).glob("*.ptx")).read_text().count("globaltimer"))
    assert found[0] == 0 and found[1] > 0, f"{point}: {found}"
