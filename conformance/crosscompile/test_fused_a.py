"""``fused_a`` compiles for every generation whose table names it, without spills, on tensor cores, weights first."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from conformance.cases import FUSED_A_CONFIGS, table_cases
from conformance.machine_code import read_cubin
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.fused_a import FusedAConfig, compile_unit, register_limit, shared_memory_bytes, why_not

K = 7168
#: As many registers as the predicate takes.
AT_THE_LIMIT = [FusedAConfig(1, 1, 4, 4), FusedAConfig(1, 8, 4, 4), FusedAConfig(1, 16, 2, 2), FusedAConfig(4, 4, 2, 2)]


def _units(arch) -> list:
    cells = [case for case in table_cases(arch) if case.cell.backend == "fused_a"]
    units = [compile_unit(arch, case.n, case.k, case.m, FusedAConfig(), residual=case.residual) for case in cells]
    units += [
        compile_unit(arch, 1536, K, m, one, residual=True)
        for one in [*FUSED_A_CONFIGS, *AT_THE_LIMIT]
        for m in (8, 16)
        if why_not(arch, 1536, K, m, one, residual=True) is None
    ]
    return list(dict.fromkeys(units))


def test_every_unit(arch):
    for unit in _units(arch):
        spec = unit.spec
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_now(unit, f"--keep-cubin --dump-dir={folder}")
            code = read_cubin(next(Path(folder).glob("*.cubin")))
        assert code.stack_bytes == 0 and code.local_accesses == 0, f"{spec}: spills"
        limit = register_limit(spec.config)
        assert code.registers <= limit, f"{spec}: {code.registers} registers, {limit} are there"
        shared = shared_memory_bytes(spec.config, spec.token_groups)
        assert f"constant({shared} : i64)" in str(compiled.ir_module), f"{spec}: the launch takes other than {shared} bytes"
        before = re.findall(r"\b(LDG\.E(?:\.\w+)*|ACQBULK|PREEXIT|HMMA)\b", code.sass)
        before = before[: before.index("ACQBULK")]
        weights = 2 * spec.config.row_tiles * spec.config.unroll
        loads = [word for word in before if word.startswith("LDG")]
        assert before[0] == "PREEXIT" and len(loads) == weights and all(".NA" in word for word in loads), f"{spec}: {before}"
        assert "HMMA" in code.sass, f"{spec}: no tensor core instruction"
