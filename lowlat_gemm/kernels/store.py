"""Compiled kernels on disk: one object file per key, shared by processes and by runs.

The key is the content: kernel sources, unit, compile options, and the toolchain that made it. So an upgrade never
finds an old object, and nothing needs to be invalidated.

    <folder>/<key>.o     the object, as the DSL exports it
    <folder>/<key>.json  its SHA-256 and what it is, written after the object; without it the object does not count
    <folder>/<key>.lock  held while the object is made; the kernel drops it when its holder dies
    <folder>/*_aot.zip   archives of objects made ahead of time (``archive.py``); some may lie beside this file

What neither the folder nor an archive has is made. A file that is truncated, foreign or unreadable is a miss, so nothing
is flushed to the disk and waited for: what a power cut takes is compiled again. A folder that cannot be written means:
a private folder for as long as the process runs, one warning, and everything else goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .archive import PATTERN, Archive
from .compile_cache import CompileUnit

try:
    import fcntl
except ImportError:  # no advisory locks on this system: processes may compile the same unit at once, and both be right
    fcntl = None

_LOG = logging.getLogger("lowlat_gemm")

#: Raised whenever the calling convention of compiled kernels changes.
ABI = 1
#: What decides the machine code besides our sources.
TOOLCHAIN = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core",
             "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")  # fmt: skip
#: Longest wait for another process that makes the same object; then it is made here as well.
LOCK_TIMEOUT_S = 120.0


def default_folder(environ=os.environ) -> Path | None:
    """``$XDG_CACHE_HOME/lowlat_gemm``, else ``~/.cache/lowlat_gemm``; None where there is no home.

    Never a folder of a known name under /tmp: its objects are executed, and others could write them.
    """
    if root := environ.get("XDG_CACHE_HOME"):
        return Path(root) / "lowlat_gemm"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "lowlat_gemm" if os.path.isabs(home) and home != "/" else None


@functools.lru_cache(maxsize=None)
def toolchain() -> tuple[tuple[str, str], ...]:
    """(distribution, version and hash of its file list) for what makes the machine code.

    The file list (RECORD) holds the hash of every installed file, the native libraries too; a reinstalled build of the
    same version differs in it. Left out is what an installer adds and what differs between environments of the same
    wheels: scripts with the interpreter's path in them, bytecode, and its own notes.
    """
    found = []
    for name in TOOLCHAIN:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        lines = sorted(filter(_is_content, (distribution.read_text("RECORD") or "").splitlines()))
        files = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        found.append((name, f"{distribution.version} {files}"))
    return tuple(found)


def _is_content(line: str) -> bool:
    """Whether a line of a RECORD (path,hash,size) is of a file that a wheel brings into the package folder."""
    path = line.rsplit(",", 2)[0]
    return not path.startswith("../") and ".dist-info/" not in path and not path.endswith(".pyc")


@functools.lru_cache(maxsize=None)
def source_hash(folder: Path = Path(__file__).parent) -> str:
    """SHA-256 over the names and bytes of the Python files in ``folder``: the kernels' own sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def origin() -> dict[str, object]:
    """What decides objects besides the unit: an archive made by another one is of no use here."""
    return {
        "abi": ABI,
        "machine": platform.machine(),
        "python": sys.implementation.cache_tag,
        "sources": source_hash(),
        "toolchain": dict(toolchain()),
    }


def key_of(unit: CompileUnit, options: str) -> str:
    """The content key of a unit compiled with ``options`` by the toolchain that is installed.

    ``repr`` of a unit's spec is part of it: specs are dataclasses of plain values.
    """
    parts = (ABI, platform.machine(), sys.implementation.cache_tag, source_hash(), toolchain(), options,
             unit.kernel, unit.target, repr(unit.spec))  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class ObjectStore:
    """The objects in one folder. Methods never raise for what the file system does; they log and miss.

    ``archives_in``: folders whose archives it takes objects from. ``kept``: whether the objects outlive the process, for
    others to find.
    """

    def __init__(self, folder: Path, archives_in: Sequence[Path] = (), *, kept: bool = True):
        self.folder, self.kept = folder, kept
        self._archives_in = tuple(archives_in)
        self._broken = False

    @classmethod
    def open(cls, folder: Path | None) -> "ObjectStore | None":
        """The store in ``folder``, which is made if need be; with the archives there and beside this file.

        When it cannot be written, with one warning, a store of this process alone, which has the same archives; None
        when there is no room for that either.
        """
        archives_in = [Path(__file__).parent] if folder is None else [folder, Path(__file__).parent]
        if folder is None:
            _LOG.warning("no home folder: compiled kernels are not kept on disk (set LOWLAT_GEMM_CACHE_DIR)")
            return cls._of_this_process(archives_in)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
            _sweep(folder)
        except OSError as error:
            _LOG.warning("compiled kernels are not kept on disk: %s (set LOWLAT_GEMM_CACHE_DIR)", error)
            return cls._of_this_process(archives_in)
        return cls(folder, archives_in)

    @classmethod
    def _of_this_process(cls, archives_in: Sequence[Path]) -> "ObjectStore | None":
        """A store in a new folder that nobody else can read, and that goes when the process ends."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="lowlat-gemm-"))  # of mode 0700
        except OSError:
            return None
        atexit.register(_remove, folder, os.getpid())
        return cls(folder, archives_in, kept=False)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.o"

    def find(self, key: str) -> Path | None:
        """The object of ``key`` if it is there and whole, taken from an archive if need be."""
        return self._kept(key) or self._from_archive(key)

    @functools.cached_property
    def _archives(self) -> list[Archive]:
        paths = [path for folder in self._archives_in for path in sorted(folder.glob(PATTERN))]
        return [archive for path in paths if (archive := Archive.open(path, origin())) is not None]

    def _from_archive(self, key: str) -> Path | None:
        for archive in self._archives:
            found = archive.read(key)
            if found is not None:
                with self.scratch() as folder:
                    if folder is not None:
                        (folder / "kernel.o").write_bytes(found[0])
                        return self.put(key, folder / "kernel.o", found[1])
        return None

    def _kept(self, key: str) -> Path | None:
        try:
            wanted = json.loads(self._note(key).read_text())["sha256"]
            found = hashlib.sha256(self.path(key).read_bytes()).hexdigest()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return self.path(key) if found == wanted else None

    def put(self, key: str, produced: Path, what: str) -> Path | None:
        """Moves the finished object ``produced`` (on this file system) in; None when that could not be done."""
        try:
            note = {"sha256": hashlib.sha256(produced.read_bytes()).hexdigest(), "what": what}
            os.replace(produced, self.path(key))
            self._write(self._note(key), json.dumps(note))
        except OSError as error:
            self._give_up(error)
            return None
        return self.path(key)

    def discard(self, key: str) -> None:
        """Forgets an object that could not be loaded."""
        for path in (self._note(key), self.path(key)):
            with contextlib.suppress(OSError):
                path.unlink()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path | None]:
        """A folder on the store's file system for an object in the making; None when it cannot be had."""
        try:
            folder = tempfile.TemporaryDirectory(dir=self.folder, prefix="making-", ignore_cleanup_errors=True)
        except OSError as error:
            self._give_up(error)
            yield None
            return
        with folder:
            yield Path(folder.name)

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
        """Holds the key's lock; yields False when it could not be had in time, or not at all."""
        if fcntl is None:
            yield False
            return
        try:
            stream = open(self.folder / f"{key}.lock", "a")
        except OSError as error:
            self._give_up(error)
            yield False
            return
        with stream:
            yield _lock(stream, timeout_s)

    def _note(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _write(self, path: Path, text: str) -> None:
        with self.scratch() as folder:
            if folder is not None:
                (folder / "note").write_text(text)
                os.replace(folder / "note", path)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            _LOG.warning("compiled kernels are not kept in %s: %s", self.folder, error)


def _remove(folder: Path, owner: int) -> None:
    """Removes the folder of process ``owner``; a forked child inherits this and leaves it alone."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes what killed processes were making: scratch folders older than a day."""
    for left in folder.glob("making-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def _lock(stream, timeout_s: float) -> bool:
    """Takes an exclusive lock on an open file within ``timeout_s``; it goes with the file, or with the process."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
