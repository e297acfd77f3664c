"""Making kernels: compile or load, in this process or in several.

``make`` goes through the store on disk where there is one. Starting a server compiles many units, and the compiler is
not thread-safe: ``make_all`` spreads them over processes, which hand their objects over through the store.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .compile_cache import CompileCache, CompileError, CompileUnit, Made
from .registry import is_foreign, kernel_module
from .store import ObjectStore, default_folder, key_of, toolchain

_LOG = logging.getLogger("lowlat_gemm")

#: Name of the exported function in every object.
_ENTRY = "lowlat_gemm_kernel"
#: Seconds between two looks at what other processes have made.
POLL_S = 0.25
#: Units below which another process is not worth its start (importing the compiler takes seconds, a unit a fraction).
UNITS_PER_PROCESS = 8


def compile_options(target: str) -> str:
    """Options of ``cute.compile`` for a compile target such as "sm_90a"."""
    return f"--gpu-arch={target} --enable-tvm-ffi"


def compile_now(unit: CompileUnit, extra_options: str = "") -> Any:
    """Compiles ``unit`` now, past every cache; ``extra_options`` (dump folders, say) go to the compiler as they are."""
    import cutlass.cute as cute

    return _module_of(unit).compile_kernel(unit, cute.compile, f"{compile_options(unit.target)} {extra_options}".rstrip())


def _module_of(unit: CompileUnit):
    return importlib.import_module(f".{kernel_module(unit.kernel, unit.target)}", __package__)


@functools.lru_cache(maxsize=8)
def store_in(folder: str | None) -> ObjectStore | None:
    """The object store in ``folder``, by default the user's cache folder, else in a private one; None where none can be had."""
    if not toolchain():
        return None  # a compiler that was copied here without its metadata: no telling when an object is stale
    return ObjectStore.open(default_folder() if folder is None else Path(folder))


def _load(path: Path) -> Callable:
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _ENTRY)


def _find(store: ObjectStore, key: str) -> Callable | None:
    path = store.find(key)
    if path is None:
        return None
    try:
        return _load(path)
    except Exception as error:  # whole, yet not loadable: of another machine perhaps
        _LOG.warning("compiled kernel %s cannot be loaded (%s): it is made again", path.name, error)
        store.discard(key)
        return None


def _export(compiled, produced: Path, store: ObjectStore, key: str, unit: CompileUnit) -> Path | None:
    """Puts a compiled kernel into the store; None, with a warning, when it cannot be: the kernel is in hand all the same."""
    try:
        compiled.export_to_c(object_file_path=str(produced), function_name=_ENTRY)
    except Exception as error:  # the DSL raises many types, a full disk among the causes
        _LOG.warning("compiled kernel %s is not kept on disk: %s", key, error)
        return None
    return store.put(key, produced, repr(unit))


def make(unit: CompileUnit, store: ObjectStore | None) -> Made:
    """Loads ``unit`` from ``store`` or compiles it and puts it there. Raises what the compiler raises.

    A kernel that was just compiled is loaded from its object all the same, so that every run launches the same thing.
    Another package's kernel is prepared by it, and kept by it or not.
    """
    if is_foreign(unit):
        return Made(_module_of(unit).prepare(unit), compiled=True)
    if store is None:
        return Made(compile_now(unit), compiled=True)
    key = key_of(unit, compile_options(unit.target))
    kernel = _find(store, key)
    if kernel is not None:
        return Made(kernel, compiled=False)
    with store.lock(key) as held:
        kernel = _find(store, key) if held else None
        if kernel is not None:
            return Made(kernel, compiled=False)
        compiled = compile_now(unit)
        with store.scratch() as folder:
            path = None if folder is None else _export(compiled, folder / "kernel.o", store, key, unit)
        kernel = None if path is None else _find(store, key)
        return Made(kernel or compiled, compiled=True)


def make_all(
    units: Iterable[CompileUnit],
    cache: CompileCache,
    store: ObjectStore | None,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[CompileUnit, str]:
    """Brings ``units`` into ``cache``, in several processes where that pays; returns what could not be made, and why,
    now or before.

    ``store``: the one that ``cache`` makes kernels through; without one, each unit is compiled in this process.
    ``processes``: at most so many, by default one a core but one. ``progress(done, total)`` is called as units finish, in
    another process or in this one.
    """
    units = list(dict.fromkeys(units))
    problems = {unit: problem for unit in units if (problem := cache.failed(unit)) is not None}
    wanted = [unit for unit in units if cache.peek(unit) is None and unit not in problems]
    most = max(1, (os.cpu_count() or 2) - 1) if processes is None else processes
    finished = 0

    def tell(done: int) -> None:
        nonlocal finished
        finished = max(finished, done)
        progress(finished, len(wanted))

    tell(0)
    if store is not None:
        missing = _missing(wanted, store)
        count = min(most, len(missing) // UNITS_PER_PROCESS)
        if count > 1:  # for few units another process is not worth its start
            _make_in_processes(missing, count, store, lambda made, of: tell(len(wanted) - of + made))
    for done, unit in enumerate(wanted, 1):
        try:
            cache.get(unit)
        except CompileError as error:
            problems[unit] = str(error)
        tell(done)
    return problems


def fill_store(
    units: Iterable[CompileUnit], store: ObjectStore, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Compiles what of ``units`` the store lacks in one process a core and loads none of it: for a caller whose kernels
    run in another process. What does not compile is found out, and said, by who loads it.
    """
    missing = _missing(dict.fromkeys(units), store)
    progress(0, len(missing))
    # Even one unit goes to a process of its own: the caller need not import the compiler.
    _make_in_processes(missing, min(os.cpu_count() or 2, -(-len(missing) // UNITS_PER_PROCESS)), store, progress)


def _missing(units: Iterable[CompileUnit], store: ObjectStore) -> list[CompileUnit]:
    ours = (unit for unit in units if not is_foreign(unit))
    return [unit for unit in ours if store.find(key_of(unit, compile_options(unit.target))) is None]


def _make_in_processes(
    units: Sequence[CompileUnit], count: int, store: ObjectStore, progress: Callable[[int, int], None]
) -> None:
    """Has ``count`` processes put ``units`` into ``store``. What one fails to make is left to the caller."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", f"{__package__}.worker", str(store.folder)]
    workers = []
    for index in range(count):
        try:
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            workers.append(worker)
            worker.stdin.write(pickle.dumps(list(units[index::count])))
            worker.stdin.close()
        except OSError as error:
            _LOG.warning("no compile process (%s); its kernels are compiled here", error)
    while any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)
        progress(len(units) - len(_missing(units, store)), len(units))
    for worker in workers:
        if worker.wait():
            _LOG.warning("a compile process ended with %d; its kernels are compiled here", worker.returncode)
