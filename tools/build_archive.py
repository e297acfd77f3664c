"""Compiles every kernel that a generation's tables can run into one file, without a GPU.

    python -m tools.build_archive --arch sm90 --out sm90_aot.zip

The same sources and toolchain give the same bytes. In the folder of compiled kernels (LOWLAT_GEMM_CACHE_DIR) or beside
lowlat_gemm/kernels the file is loaded instead of compiling; for other sources or another toolchain it is ignored.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lowlat_gemm import settings
from lowlat_gemm.arch import ARCHES, Arch, parse_arch
from lowlat_gemm.dispatch import plan_for
from lowlat_gemm.kda_branches import overlap_units
from lowlat_gemm.kernels.archive import write_archive
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.compiling import compile_options, fill_store
from lowlat_gemm.kernels.registry import is_foreign
from lowlat_gemm.kernels.store import ObjectStore, key_of, origin
from lowlat_gemm.tables import available_tables, load_table


def units_of(arch: Arch) -> list[CompileUnit]:
    """What the cells of every table of a generation run, and the branches of the KDA overlap, each once, without what other
    packages bring."""
    units = []
    for family, name in available_tables():
        if name == arch.name:
            for n, k in load_table(family, name).projections:
                units += plan_for(arch, n, k, (family,)).units()
    return [unit for unit in dict.fromkeys([*units, *overlap_units(arch)]) if not is_foreign(unit)]


def build(arch: Arch, out: Path) -> int:
    """Writes the archive of ``arch``; returns the number of kernels. RuntimeError names what did not compile."""
    units = units_of(arch)
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore.open(Path(folder))
        if store is None:
            raise RuntimeError(f"objects cannot be kept in {folder}")
        fill_store(units, store)
        objects, missing = {}, []
        for unit in units:
            key = key_of(unit, compile_options(unit.target))
            path = store.find(key)
            if path is None:
                missing.append(repr(unit))
            else:
                objects[key] = (path.read_bytes(), repr(unit))
        if missing:
            raise RuntimeError(f"{len(missing)} of {len(units)} kernels did not compile: {'; '.join(missing)}")
        write_archive(out, origin(), objects)
    return len(objects)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True, choices=[arch.name for arch in ARCHES])
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    settings.restore(settings.Settings())  # the package's tables, whatever the environment says
    try:
        count = build(parse_arch(arguments.arch), arguments.out)
    except RuntimeError as error:
        print(f"build_archive: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {count} kernels for {arguments.arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
