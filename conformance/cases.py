"""Conformance cases, made from the tables: a new table row brings its own cases, no list is kept by hand."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from lowlat_gemm.arch import ARCHES, Arch
from lowlat_gemm.dispatch import Plan, PlanEntry, plan_for
from lowlat_gemm.kda_branches import overlap_units
from lowlat_gemm.kernels import fused_a, kda, skinny, split_k
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.fused_a import FusedAConfig
from lowlat_gemm.kernels.registry import backend, every_backend, is_foreign
from lowlat_gemm.kernels.split_k import SplitKConfig
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.tables import Cell, available_tables, load_table


#: Configs of split_k for what no table reaches: every split and token tile, one and two row warpgroups, both stage
#: sizes, rings of one depth and of two, and prefetch and trigger beyond the ends. Every generation serves each of them.
SPLIT_K_CONFIGS = [
    SplitKConfig(56, 8, 4, 13),
    SplitKConfig(64, 8, 3, 4),
    SplitKConfig(8, 8, 1, 8),
    SplitKConfig(80, 8, 2, 4, k_blocks=2),
    SplitKConfig(48, 16, 2, 6, k_blocks=2),
    SplitKConfig(56, 16, 8, 11),
    SplitKConfig(40, 32, 2, 11),
    SplitKConfig(128, 32, 5, 4),
    SplitKConfig(64, 64, 4, 8, token_stages=4),
    SplitKConfig(96, 64, 1, 8),
    SplitKConfig(56, 64, 6, 5, token_stages=3, prefetch=1, trigger=0),
    SplitKConfig(56, 32, 7, 9, prefetch=99, trigger=99),
    SplitKConfig(24, 8, 1, 2, k_blocks=2),
]

#: Token tiles that wgmma alone takes: SM90 serves these as well.
SPLIT_K_WGMMA_CONFIGS = [
    SplitKConfig(64, 24, 3, 5),
    SplitKConfig(56, 40, 2, 6, token_stages=4),
    SplitKConfig(72, 48, 1, 4, k_blocks=2),
    SplitKConfig(40, 56, 4, 5, token_stages=5),
]

#: Configs of fused_a besides those that the shape chooses: several row warps and tiles, one K warp and many.
FUSED_A_CONFIGS = [
    FusedAConfig(1, 8, 1, 4),
    FusedAConfig(2, 4, 2, 2, trigger=1),
    FusedAConfig(4, 1, 1, 8, trigger=2),
    FusedAConfig(1, 16, 1, 1),
    FusedAConfig(2, 1, 2, 4),
    FusedAConfig(1, 1, 4, 2),
    # As many registers as the predicate takes.
    FusedAConfig(1, 1, 4, 4, trigger=1),
    FusedAConfig(1, 8, 4, 4, trigger=2),
    FusedAConfig(1, 16, 2, 2),
    FusedAConfig(4, 4, 2, 2),
]

#: Shapes outside every table, the last two smaller than a chunk of most configs.
DEFAULT_SHAPES = [(1536, 7168), (100, 1032), (7, 264)]


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
    #: Set for a case that no table has: what would run if one named this config.
    standing: PlanEntry | None = None

    def __str__(self) -> str:
        residual = "-residual" if self.residual else ""
        return f"{self.family}-{self.arch}-{self.n}x{self.k}-m{self.m}{residual}-{self.cell.backend}"

    @property
    def plan(self) -> Plan:
        return plan_for(self.arch, self.n, self.k, (self.family,))

    @property
    def entry(self) -> PlanEntry:
        """This very cell's, also where an optional cell comes before it."""
        entry = self.standing or self.plan.entry(self.m, self.residual)
        return entry if entry is None or entry.otherwise is None else entry.otherwise


def table_cases(arch: Arch) -> list[Case]:
    """Every cell of every table of a generation, in the tables' order."""
    cases = []
    for family, name in available_tables():
        if name == arch.name:
            cells = load_table(family, name).cells()
            cases += [Case(family, arch, key.n, key.k, key.m, key.residual, cell) for key, cell in cells]
    return cases


def optional_count(arch: Arch) -> int:
    """How many optional cells the tables of a generation have: another package's, served where it is and is proven."""
    tables = [load_table(family, name) for family, name in available_tables() if name == arch.name]
    return sum(1 for table in tables for _ in table.optional_cells())


def kernel_cases(arch: Arch) -> list[Case]:
    """The cells whose backend the dispatcher has, also one that its predicate refuses: such a cell is to fail."""
    return [case for case in table_cases(arch) if backend(case.cell.backend, arch) is not None]


def written_unit(case: Case) -> CompileUnit | None:
    """What a cell's kernel compiles from, proven or not; None where the kernel is not written, or refuses the cell."""
    written = every_backend().get(case.cell.backend)
    if written is None:
        return None
    config = written.parse_config(case.cell.config)
    if written.why_not(case.arch, case.n, case.k, case.m, config, residual=case.residual) is not None:
        return None
    return written.compile_unit(case.arch, case.n, case.k, case.m, config, residual=case.residual)


@functools.lru_cache(maxsize=None)
def _cells_by_unit(target: str) -> dict[CompileUnit, list[Case]]:
    found: dict[CompileUnit, list[Case]] = {}
    for arch in ARCHES:
        if arch.compile_target == target:
            for case in table_cases(arch):
                found.setdefault(written_unit(case), []).append(case)
    return found


def cells_of_unit(unit: CompileUnit) -> list[Case]:
    """The table cells that run on a compile unit."""
    return _cells_by_unit(unit.target).get(unit, [])


def compile_units(arch: Arch) -> list[CompileUnit]:
    """Everything that the tables of a generation can have compiled, and the defaults of one shape; each once."""
    units = [case.entry.unit for case in kernel_cases(arch) if case.entry.unit is not None]
    return list(dict.fromkeys(units + default_units(arch, DEFAULT_SHAPES[:1], (1, 4, 16))))


def default_units(arch: Arch, shapes: Sequence[tuple[int, int]], fp16_tokens: Container[int]) -> list[CompileUnit]:
    """skinny's default configs for ``shapes``: each M with residual, in BF16, and in FP16 at ``fp16_tokens``."""
    units = []
    for n, k in shapes:
        for m in range(1, skinny.MAX_TOKENS + 1):
            config = skinny.default_config(arch, n, k, m, residual=True)
            for dtype in ("bfloat16", "float16") if m in fp16_tokens else ("bfloat16",):
                units.append(skinny.compile_unit(arch, n, k, m, config, residual=True, dtype=dtype))
    return list(dict.fromkeys(units))


def skinny_units(arch: Arch) -> list[CompileUnit]:
    """skinny's part of ``compile_units``: for what its machine code must be."""
    return [unit for unit in compile_units(arch) if unit.kernel == skinny.NAME]


def split_k_units(arch: Arch) -> list[CompileUnit]:
    """``SPLIT_K_CONFIGS`` with and without residual, and one of them in each of the other dtypes."""

    def unit(config: SplitKConfig, **options) -> CompileUnit:
        return split_k.compile_unit(arch, 1536, 7168, 1, config, **options)

    configs = [one for one in SPLIT_K_CONFIGS + SPLIT_K_WGMMA_CONFIGS if split_k.why_not(arch, 1536, 7168, 1, one, residual=True) is None]
    units = [unit(one, residual=added) for one in configs for added in (False, True)]
    for dtype, output in (("float16", "float16"), ("bfloat16", "float32"), ("float16", "float32")):
        units.append(unit(SPLIT_K_CONFIGS[3], residual=True, dtype=dtype, output_dtype=output))
    return units


def fused_a_units(arch: Arch) -> list[CompileUnit]:
    """``FUSED_A_CONFIGS`` with residual, for up to 8 and for more tokens."""
    units = [
        fused_a.compile_unit(arch, 1536, 7168, m, one, residual=True)
        for one in FUSED_A_CONFIGS
        for m in (8, 16)
        if fused_a.why_not(arch, 1536, 7168, m, one, residual=True) is None
    ]
    return list(dict.fromkeys(units))


#: Rows of a CTA by M of the KDA pair, as vLLM 0.33.0 has them on B300 (kda_overlap in conformance/data): a few of each.
KDA_OUTPUTS = {1: (1, 8), 2: (1, 8), 4: (3, 16), 8: (3, 24), 12: (2, 12), 16: (1, 8)}


def kda_units(arch: Arch) -> list[CompileUnit]:
    """The KDA pair, skinny-N and skinny-K: what the overlap launches, the public figures over M, and FP16."""
    units = [unit for unit in overlap_units(arch) if unit.kernel == kda.NAME]
    for m, (few, many) in KDA_OUTPUTS.items():
        units.append(kda.compile_unit(arch, 144, 7168, m, kda.skinny_n_config(few)))
        units.append(kda.compile_unit(arch, 1536, 128, m, kda.skinny_k_config(many)))
    units = list(dict.fromkeys(units))
    return [*units, kda.compile_unit(arch, 1536, 128, 16, kda.skinny_k_config(8), dtype="float16")]


#: Token counts that ``Projection`` has skinny for; named here, since that file needs torch.
SKINNY_TOKENS = (1, 2, 4)

def projection_shapes_by_default() -> list[tuple[int, int]]:
    """(N, K) of what GLM-5.3-Flash runs on ``Projection``: DSA and MTP at TP 1 to 8. No table names them."""
    shapes = [shape for tp in (1, 2, 4, 8) for shape in projection_shapes("glm_5_3_flash", tp)]
    return list(dict.fromkeys((one.n, one.k) for one in shapes if one.name.startswith(("dsa_", "mtp_"))))


def projection_units(arch: Arch) -> list[CompileUnit]:
    """What ``Projection`` compiles: skinny with a static K for the tables' cells, both kernels' defaults elsewhere.

    split_k's default depends on the SM count: that of the device that the generation's table names.
    """
    units = []
    for case in table_cases(arch):
        if case.m in SKINNY_TOKENS and case.cell.backend == skinny.NAME and not case.residual:
            units.append(_static_skinny(arch, case.n, case.k, case.m, skinny.parse_config(case.cell.config)))
    sm_count = load_table("kimi_k3", arch).device.sm_count
    for n, k in projection_shapes_by_default():
        for m in SKINNY_TOKENS:
            units.append(_static_skinny(arch, n, k, m, skinny.default_config(arch, n, k, m)))
        for m in split_k.token_columns(arch):
            config = split_k.default_config(arch, n, k, m, sm_count)
            if config is not None and split_k.why_not(arch, n, k, m, config) is None:
                units.append(split_k.compile_unit(arch, n, k, m, config))
    # FP32 outputs, which ``PreparedProjection`` has besides.
    wide = [unit for unit in units if unit is not None and unit.kernel == split_k.NAME][:2]
    units += [replace(unit, spec=replace(unit.spec, output_dtype="float32")) for unit in wide]
    return list(dict.fromkeys(unit for unit in units if unit is not None))


def _static_skinny(arch: Arch, n: int, k: int, m: int, config: skinny.SkinnyConfig | None) -> CompileUnit | None:
    """skinny compiled for this K; None where the shape has no config, or the predicate refuses it."""
    config = config and skinny.with_static_k(arch, config, k)
    if config is None or skinny.why_not(arch, n, k, m, config) is not None:
        return None
    return skinny.compile_unit(arch, n, k, m, config)


def written_units(arch: Arch) -> list[CompileUnit]:
    """Every kernel and config of a generation that tables, defaults or tests of other configs can have compiled.

    Kernels that are kept from dispatch are among them: what a table will name has to hold the contract before. Another
    package's are not, where it is installed: their code is not ours.
    """
    named = list(filter(None, map(written_unit, table_cases(arch))))
    # Of the test's configs every other one with residual, the rest without: ten minutes of compiling say no more.
    standing = [unit for i, unit in enumerate(split_k_units(arch)) if unit.spec.output_dtype != "bfloat16" or i % 4 in (0, 3)]
    units = [
        *named,
        *compile_units(arch),
        *fused_a_units(arch),
        *standing,
        *kda_units(arch),
        *overlap_units(arch),
        *projection_units(arch),
    ]
    return list(dict.fromkeys(unit for unit in units if not is_foreign(unit)))


def written_split_k_units(arch: Arch) -> list[CompileUnit]:
    """split_k's part of ``written_units``."""
    return [unit for unit in written_units(arch) if unit.kernel == split_k.NAME]


def unit_cases(arch: Arch) -> list[Case]:
    """One case a compile unit, the first: for what depends on the code and not on the shape."""
    by_unit: dict[CompileUnit | None, Case] = {}
    for case in kernel_cases(arch):
        by_unit.setdefault(case.entry.unit, case)
    return list(by_unit.values())


def unit_id(unit: CompileUnit) -> str:
    """A readable test id: ``skinny-sm_90a-128.2.1.8-3-bfloat16``: config, then the rest of the spec; ``-residual``."""
    rest = {name: value for name, value in vars(unit.spec).items() if name not in ("config", "residual")}
    config = ".".join(str(value) for value in vars(unit.spec.config).values() if value is not None)
    words = [unit.kernel, unit.target, config, *(str(value) for value in rest.values() if value is not None)]
    return "-".join(words) + "-residual" * unit.spec.residual
