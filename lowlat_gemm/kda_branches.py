"""KDA's input projections at TP 8 as branches for two streams: shapes, and what each runs by M. Needs no torch.

    qkvg      [M, 6144] = x [M, 7168] @ packed[:6144].T      Q, K, V, G
    fa_beta   [M, 144]  = x           @ packed[6144:].T      F_A 128, beta 12, and 4 rows that pad the packed weight
    f_b       [M, 1536] = fa_beta[:, :128] @ f_b.T

A branch runs the cell that ``[kda_overlap]`` of the Kimi-K3 table has for it, else that of the table's row for its
shape; QKVG, which is all but 2 % of the packed weight, else what that one's row names. Where none of these can run, as
with a kernel that is not built, it is torch's own GEMM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from . import settings as settings_module
from .arch import Arch
from .dispatch import plan_for
from .kernels import kda
from .kernels.compile_cache import CompileUnit
from .kernels.registry import backend, on_device
from .models import projection_shapes
from .settings import Settings
from .tables import MAX_OVERLAP_TOKENS, Cell, Table, TableError, load_table

FAMILY, TP = "kimi_k3", 8


@dataclass(frozen=True)
class Geometry:
    """Extents of the branches: K of x, and rows [0, qkvg) and [qkvg, packed) of the packed weight."""

    hidden: int
    qkvg: int
    packed: int
    f_a: int
    beta: int
    f_b: int

    @property
    def fa_beta(self) -> int:
        """Rows of F_A, beta and padding."""
        return self.packed - self.qkvg

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each branch."""
        return {
            "qkvg": (self.qkvg, self.hidden), "fa_beta": (self.fa_beta, self.hidden), "f_b": (self.f_b, self.f_a),
        }  # fmt: skip


def _geometry() -> Geometry:
    shapes = {shape.name: shape for shape in projection_shapes(FAMILY, TP)}
    packed, f_b = shapes["in_proj_qkvgfab"], shapes["f_b_proj"]
    rows = {row.name: row for row in packed.rows}
    f_a, beta = rows["f_a"], rows["beta"]
    return Geometry(packed.k, f_a.start, packed.n, f_a.stop - f_a.start, beta.stop - beta.start, f_b.n)


GEOMETRY = _geometry()


@dataclass(frozen=True)
class Branches:
    """What each branch runs at one M; None: torch's own GEMM."""

    qkvg: CompileUnit | None
    fa_beta: CompileUnit | None
    f_b: CompileUnit | None

    def units(self) -> list[CompileUnit]:
        return [unit for unit in (self.qkvg, self.fa_beta, self.f_b) if unit is not None]

    def on(self, ordinal: int) -> Branches:
        """The branches for CUDA device ``ordinal``: another package's kernels are prepared for one device."""
        return Branches(*(unit and on_device(unit, ordinal) for unit in (self.qkvg, self.fa_beta, self.f_b)))


def overlap_table(arch: Arch) -> Table:
    """The table that has the generation's ``[kda_overlap]``. TableError where there is no sound one."""
    return load_table(FAMILY, arch)


def branches(arch: Arch, m: int) -> Branches:
    """What the branches run at M = ``m`` of 1 to 16, under the current settings."""
    return _branches(arch, m, settings_module.current())


@functools.lru_cache(maxsize=256)
def _branches(arch: Arch, m: int, settings: Settings) -> Branches:
    return Branches(*(_unit(arch, m, name, settings) for name in GEOMETRY.shapes))


def _unit(arch: Arch, m: int, name: str, settings: Settings) -> CompileUnit | None:
    n, k = GEOMETRY.shapes[name]
    for cell in _cells(arch, m, name):
        kernel = kda if cell.backend == kda.NAME else backend(cell.backend, arch)
        if kernel is None or settings.denied(cell.backend, n, k, m):
            continue
        if kernel is not kda and kernel.unavailable(arch) is not None:
            continue
        try:
            config = kernel.parse_config(cell.config)
        except ValueError:  # dispatch says so
            continue
        if kernel.why_not(arch, n, k, m, config) is None:
            return kernel.compile_unit(arch, n, k, m, config)
    return None


def _cells(arch: Arch, m: int, name: str) -> Iterator[Cell]:
    """What the table offers for a branch, the best first."""
    section = overlap_table(arch).kda_overlap
    cells = {} if section is None else getattr(section, name)
    if m in cells:
        yield cells[m]
    rows = [GEOMETRY.shapes[name], *([(GEOMETRY.packed, GEOMETRY.hidden)] if name == "qkvg" else [])]
    for row in rows:
        plan = plan_for(arch, *row, (FAMILY,))
        entry = None if plan is None else plan.entry(m, False)
        if entry is not None:
            yield entry.cell


def overlap_units(arch: Arch, max_tokens: int = MAX_OVERLAP_TOKENS) -> list[CompileUnit]:
    """Everything that the overlap launches for 1 to ``max_tokens`` tokens, each once; none where there is no table."""
    try:
        overlap_table(arch)
    except TableError:
        return []
    return list(dict.fromkeys(unit for m in range(1, max_tokens + 1) for unit in branches(arch, m).units()))
