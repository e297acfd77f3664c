"""``lowlat doctor``: whether kernels can run on this machine, and what stands in the way."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lowlat_gemm
from lowlat_gemm import settings
from lowlat_gemm.dispatch import plan_for
from lowlat_gemm.arch import ARCHES, Arch, parse_arch
from lowlat_gemm.kernels import flashinfer
from lowlat_gemm.kernels.registry import backend, built_backends, missing_packages
from lowlat_gemm.kernels.wheels import mixed_wheels
from lowlat_gemm.kernels.store import default_folder
from lowlat_gemm.operands import Reason
from lowlat_gemm.tables import TableError, available_tables, load_table

from . import environment, plugins


@dataclass(frozen=True)
class TableHealth:
    """One shipped table: how many cells it has and how many of those this build has a kernel for, or its error."""

    family: str
    arch: str
    cells: int
    built: int
    error: str | None


@dataclass(frozen=True)
class Report:
    """``problems``: why kernels do not run here, empty when they do. ``notes``: what is worth knowing besides.

    ``flashinfer``: for each generation that is here, or for all where none is, what the optional backend serves there.
    """

    gpus: list[environment.Gpu]
    driver: str | None
    versions: dict[str, str | None]
    settings: settings.Settings
    cache: str
    plugins: dict[str, str]
    flashinfer: dict[str, str]
    tables: list[TableHealth]
    problems: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "lowlat_gemm": lowlat_gemm.__version__,
            "gpus": [{"ordinal": gpu.ordinal, "arch": gpu.arch and gpu.arch.name, "is": str(gpu)} for gpu in self.gpus],
            "driver": self.driver,
            "versions": self.versions,
            "settings": asdict(self.settings),
            "cache": self.cache,
            "plugins": self.plugins,
            "flashinfer": self.flashinfer,
            "tables": [vars(table) for table in self.tables],
            "kernels_can_run": not self.problems,
            "problems": self.problems,
            "notes": self.notes,
        }


def _table_health(family: str, arch: str) -> TableHealth:
    try:
        cells = [cell for _, cell in load_table(family, arch).cells()]
    except TableError as error:
        return TableHealth(family, arch, 0, 0, str(error))
    built = built_backends(parse_arch(arch))
    return TableHealth(family, arch, len(cells), sum(cell.backend in built for cell in cells), None)


def _nothing_runs(gpu: environment.Gpu, chosen: settings.Settings) -> str | None:
    """Why not one cell of the GPU's tables can run under the settings as they are, or None when some can."""
    if chosen.disabled or missing_packages():
        return None  # said already
    refusals = []
    for family, arch in available_tables():
        if arch == gpu.arch.name:
            try:
                shapes = list(load_table(family, arch).projections)
            except TableError:
                continue  # said already
            plans = [plan_for(gpu.arch, n, k, (family,)) for n, k in shapes]
            if any(plan.units() for plan in plans):
                return None
            refusals += [entry.refusal for plan in plans for entry in plan.entries.values()]
    # A backend that is not built is no news; what else keeps cells from running is.
    refusals.sort(key=lambda refusal: refusal.reason is Reason.BACKEND_NOT_BUILT)
    return f"no cell of the tables for {gpu.arch} can run: {refusals[0]}" if refusals else f"no table for {gpu.arch}"


def _cache(folder: str | None) -> str:
    """Where compiled kernels are kept and how many there are, or that they are not."""
    path = default_folder() if folder is None else Path(folder)
    if path is None:
        return "none: no home folder (set LOWLAT_GEMM_CACHE_DIR)"
    if not path.is_dir():
        return f"{path} (made at the first compile)"
    if not os.access(path, os.W_OK):
        return f"none: {path} cannot be written (set LOWLAT_GEMM_CACHE_DIR)"
    return f"{path} ({sum(1 for _ in path.glob('*.o'))} compiled kernels)"


def _flashinfer(arch: Arch) -> str:
    """What FlashInfer serves on a generation, or why nothing."""
    problem = flashinfer.unavailable(arch)
    if problem is not None:
        return problem
    state = f"{flashinfer.installed_version()} serves {', '.join(flashinfer.kernels_on(arch))}"
    return state if backend(flashinfer.NAME, arch) else f"{state}; kept from dispatch: no recorded run shows it right"


def examine() -> Report:
    """Looks at everything and fails at nothing."""
    gpus, why_no_gpu = environment.find_gpus()
    problems, notes = [], []
    try:
        chosen = settings.read()
    except ValueError as error:
        chosen = settings.current()
        problems.append(f"{error}; the library is off until it is mended")
    if why_no_gpu is not None:
        problems.append(why_no_gpu)
    served = [gpu for gpu in gpus if gpu.arch is not None]
    if gpus and not served:
        problems.append("no GPU of a served generation")
    if missing_packages():
        problems.append(f"kernels cannot be compiled: not installed: {', '.join(missing_packages())}")
    elif mixed := mixed_wheels():
        problems.append(f"kernels are off: {mixed}")
    if chosen.disabled and chosen.problem is None:
        problems.append("switched off by LOWLAT_GEMM_DISABLE")
    tables = [_table_health(family, arch) for family, arch in available_tables()]
    problems += [table.error for table in tables if table.error is not None]
    problems += [why for gpu in served if (why := _nothing_runs(gpu, chosen))]
    for gpu in served:
        for table in tables:
            if table.arch == gpu.arch.name and table.error is None:
                mismatch = load_table(table.family, table.arch).device.mismatch(gpu.properties)
                if mismatch is not None and not chosen.any_device:
                    problems.append(f"{table.family}: {mismatch} (LOWLAT_GEMM_ANY_DEVICE=1 uses the table all the same)")
    if chosen.deny:
        notes.append(f"deny list: {len(chosen.deny)} entries (LOWLAT_GEMM_DENY)")
    if chosen.batch_invariant:
        notes.append("batch-invariant mode: only plans whose bits do not depend on M")
    if chosen.any_device:
        notes.append("tables are used on sibling devices too (LOWLAT_GEMM_ANY_DEVICE)")
    if chosen.strict:
        notes.append("strict: a launch that would compile raises (LOWLAT_GEMM_STRICT)")
    return Report(
        gpus,
        environment.driver_version(),
        environment.versions(),
        chosen,
        _cache(chosen.cache_dir),
        plugins.states(chosen),
        {arch.name: _flashinfer(arch) for arch in dict.fromkeys(gpu.arch for gpu in served) or ARCHES},
        tables,
        problems,
        notes,
    )
