"""Conformance cases, made from the tables: a new table row brings its own cases, no list is kept by hand."""

from __future__ import annotations

from dataclasses import dataclass

from lowlat_gemm.arch import Arch
from lowlat_gemm.dispatch import Plan, plan_for
from lowlat_gemm.kernels import skinny
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.tables import Cell, available_tables, load_table


@dataclass(frozen=True)
class Case:
    """One cell of one table."""

    family: str
    arch: Arch
    n: int
    k: int
    m: int
    residual: bool
    cell: Cell

    def __str__(self) -> str:
        residual = "-residual" if self.residual else ""
        return f"{self.family}-{self.arch}-{self.n}x{self.k}-m{self.m}{residual}-{self.cell.backend}"

    @property
    def plan(self) -> Plan:
        return plan_for(self.arch, self.n, self.k, (self.family,))


def table_cases(arch: Arch) -> list[Case]:
    """Every cell of every table of a generation, in the tables' order."""
    cases = []
    for family, name in available_tables():
        if name == arch.name:
            cells = load_table(family, name).cells()
            cases += [Case(family, arch, key.n, key.k, key.m, key.residual, cell) for key, cell in cells]
    return cases


def kernel_cases(arch: Arch) -> list[Case]:
    """The cells that this build has a kernel for."""
    return [case for case in table_cases(arch) if case.plan.entry(case.m, case.residual).unit is not None]


def compile_units(arch: Arch) -> list[CompileUnit]:
    """Everything that the tables of a generation and the defaults can have compiled, each once."""
    units = [case.plan.entry(case.m, case.residual).unit for case in kernel_cases(arch)] + default_units(arch)
    return list(dict.fromkeys(units))


def default_units(arch: Arch) -> list[CompileUnit]:
    """What shapes outside every table compile: skinny's default config, each M with residual, FP16 at some."""
    n, k = 1536, 7168
    units = []
    for m in range(1, skinny.MAX_TOKENS + 1):
        config = skinny.default_config(arch, n, k, m, residual=True)
        dtypes = ("bfloat16", "float16") if m in (1, 4, 16) else ("bfloat16",)
        units += [skinny.compile_unit(arch, n, k, m, config, residual=True, dtype=dtype) for dtype in dtypes]
    return units


def unit_cases(arch: Arch) -> list[Case]:
    """One case a compile unit, the first: for what depends on the code and not on the shape."""
    by_unit: dict[CompileUnit, Case] = {}
    for case in kernel_cases(arch):
        by_unit.setdefault(case.plan.entry(case.m, case.residual).unit, case)
    return list(by_unit.values())


def unit_id(unit: CompileUnit) -> str:
    """A readable test id: ``skinny-sm_90a-m3-bfloat16-128.2.1.8``, ``-residual`` where it has one."""
    spec = unit.spec
    config = ".".join(str(value) for value in vars(spec.config).values() if value is not None)
    return f"{unit.kernel}-{unit.target}-m{spec.tokens}-{spec.input_dtype}-{config}" + ("-residual" * spec.residual)
