"""What ``lowlat tune`` does between its options and its output."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lowlat_gemm import settings
from lowlat_gemm.arch import Arch
from lowlat_gemm.kernels.compiling import fill_store, store_in
from lowlat_gemm.kernels.split_k import token_columns
from lowlat_gemm.tables import TableError, available_tables, load_table, load_table_file
from lowlat_gemm.tables.loader import table_folders

from .. import environment
from ..checking import Shape
from ..environment import Gpu
from .candidates import Candidate, with_class_starts
from .journal import Journal, run_key
from .outcome import Outcome, Request
from .run import Tuner
from .supervise import Supervisor
from .table_writer import Session, new_head, write_table


def child_command(gpu: Gpu) -> list[str]:
    return [sys.executable, "-m", "lowlat_cli.tuning.worker", str(gpu.ordinal)]


def table_path(family: str, arch: Arch, given: Path | None) -> Path:
    """Where the table goes: ``given``, else the folder of LOWLAT_GEMM_TABLES, else that of the package."""
    return table_folders()[0] / f"{family}_{arch}.toml" if given is None else given


def starting_text(path: Path, family: str, gpu: Gpu) -> str:
    """What a table that is not there yet begins with: the library's table of the family, or a head alone.

    ValueError where the table is of another family, generation or device class.
    """
    known = (family, gpu.arch.name) in available_tables()
    source = path if path.exists() else Path(load_table(family, gpu.arch).path) if known else None
    if source is None:
        return new_head(family, gpu.arch, gpu.properties)
    table = load_table_file(source)
    if (table.family, table.arch) != (family, gpu.arch.name):
        raise ValueError(f"{source} is the table of {table.family} on {table.arch}, not of {family} on {gpu.arch}")
    if mismatch := table.device.mismatch(gpu.properties):
        raise ValueError(f"{source}: {mismatch}; write to another with --table or LOWLAT_GEMM_TABLES")
    return source.read_text(encoding="utf-8")


def make_request(
    shapes: Sequence[Shape],
    tokens: Iterable[int],
    residual: Sequence[Shape],
    arch: Arch,
    most: int,
    minutes: float | None,
) -> Request:
    """``residual``: besides the shapes that a table has with one. ValueError for token counts that no table has."""
    wanted = {(shape.n, shape.k) for shape in shapes}
    known: dict[tuple[int, int], dict[Candidate, None]] = {}
    added = {(shape.n, shape.k) for shape in residual}
    for family, name in available_tables():
        for key, cell in load_table(family, name).cells() if name == arch.name else ():
            if (key.n, key.k) in wanted:
                if key.residual:
                    added.add((key.n, key.k))
                try:
                    candidate = Candidate.from_json({"backend": cell.backend, "config": dict(cell.config)})
                except (KeyError, ValueError):  # of a backend or a config that this build does not have
                    continue
                known.setdefault((key.n, key.k), {})[candidate] = None
    if unasked := added - wanted:
        names = ", ".join(f"{n}x{k}" for n, k in sorted(unasked))
        raise ValueError(f"--residual {names}: not among the shapes to tune")
    widths = token_columns(arch)
    return Request(
        tuple(dict.fromkeys(shapes)), tuple(with_class_starts(tokens, widths)), widths, most, frozenset(added),
        {key: tuple(found) for key, found in known.items()}, minutes,
    )  # fmt: skip


def tune(request: Request, gpu: Gpu, journal_path: Path | None, progress) -> Outcome:
    """Measures what ``request`` asks for. Raises TuneError when nothing can be measured."""
    store = store_in(settings.current().cache_dir)
    journal = Journal(journal_path, run_key(gpu.arch, gpu.properties, environment.versions()))
    search = os.pathsep.join(filter(None, sys.path))
    try:
        with Supervisor(
            child_command(gpu), environment=os.environ | {"PYTHONPATH": search}, on_excluded=journal.exclude
        ) as supervisor:

            def compile_ahead(units, told) -> None:
                if store is not None and store.kept:  # else the child compiles what it measures
                    fill_store(units, store, told)

            return Tuner(request, gpu.arch, gpu.properties, supervisor, journal, compile_ahead, progress).run()
    finally:
        journal.close()


def write(outcome: Outcome, path: Path, start: str, gpu: Gpu, label: str | None) -> str | None:
    """Writes the table with the rows of ``outcome``; its path, or None where there is nothing to write."""
    versions = {name: version for name, version in environment.versions().items() if version is not None}
    driver = environment.driver_version()
    versions |= {"driver": driver} if driver else {}
    commit = environment.commit()
    note = "lowlat tune: two passes, cold weights, back-to-back launches"
    note += f"; commit {commit[:12]}" if commit else ""
    session = Session(gpu.properties.name, datetime.date.today(), versions, note)
    rows = outcome.rows
    if label is not None:
        rows = [type(row)(**vars(row) | {"label": label}) for row in rows]
    try:
        return None if write_table(path, start, rows, session) is None else str(path)
    except TableError as error:
        raise ValueError(f"the table would not load, nothing was written: {error}") from None
