"""Every environment variable that the library listens to, read once and kept in one place.

| variable | default | meaning |
|---|---|---|
| ``LOWLAT_GEMM_DISABLE`` | 0 | 1: every call falls back to the caller's own GEMM |
| ``LOWLAT_GEMM_DENY`` | empty | comma-separated list of what must not run: a backend (``skinny``), a shape (``1536x7168``), a shape at one M (``1536x7168@4``), or a backend on one of those (``skinny:1536x7168``) |
| ``LOWLAT_GEMM_ANY_DEVICE`` | 0 | 1: use a generation's table on sibling devices that it was not measured on |
| ``LOWLAT_GEMM_BATCH_INVARIANT`` | 0 | 1: only plans whose bits do not depend on M; ``VLLM_BATCH_INVARIANT=1`` means the same |
| ``LOWLAT_GEMM_STRICT`` | 0 | 1: a launch that would compile raises, in a CUDA graph capture and outside |
| ``LOWLAT_GEMM_TABLES`` | none | folder of tables of one's own; they come before those of the package |
| ``LOWLAT_GEMM_NO_PLUGIN`` | 0 | 1: the hooks into vLLM and SGLang install nothing; direct calls are not touched by it |
| ``LOWLAT_GEMM_CACHE_DIR`` | ``~/.cache/lowlat_gemm`` | folder of compiled kernels |
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace

from .backends import BACKEND_NAMES

_LOG = logging.getLogger("lowlat_gemm")

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}
_DENY_ITEM = re.compile(r"(?:(?P<backend>[a-z_]+)(?::(?=\d)|$))?(?:(?P<n>\d+)x(?P<k>\d+)(?:@(?P<m>\d+))?)?")


@dataclass(frozen=True)
class DenyItem:
    """One entry of the deny list; a None field matches everything."""

    backend: str | None
    n: int | None
    k: int | None
    m: int | None

    def matches(self, backend: str, n: int, k: int, m: int) -> bool:
        wanted = ((self.backend, backend), (self.n, n), (self.k, k), (self.m, m))
        return all(mine is None or mine == theirs for mine, theirs in wanted)


@dataclass(frozen=True)
class Settings:
    disabled: bool = False
    deny: tuple[DenyItem, ...] = ()
    any_device: bool = False
    batch_invariant: bool = False
    strict: bool = False
    no_plugin: bool = False
    cache_dir: str | None = None
    tables: str | None = None
    #: What could not be read of the environment; the library is then off, for guessing could run what was denied.
    problem: str | None = None

    def denied(self, backend: str, n: int, k: int, m: int) -> bool:
        return any(item.matches(backend, n, k, m) for item in self.deny)


def _flag(environ, name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={environ[name]!r}: expected 1 or 0")


def _path(environ, name: str) -> str | None:
    """A path; a ``~`` that no shell has expanded is the home folder."""
    value = environ.get(name)
    return os.path.expanduser(value) if value else None


def _folder(environ, name: str) -> str | None:
    value = _path(environ, name)
    if value is not None and not os.path.isdir(value):
        raise ValueError(f"{name}={value!r}: expected a folder")
    return value


def parse_deny(text: str) -> tuple[DenyItem, ...]:
    """The deny list of a ``LOWLAT_GEMM_DENY`` value. Raises ValueError naming the entry that cannot be read."""
    items = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _DENY_ITEM.fullmatch(entry)
        if match is None or (match["backend"] is not None and match["backend"] not in BACKEND_NAMES):
            raise ValueError(
                f"LOWLAT_GEMM_DENY entry {entry!r}: expected BACKEND, NxK, NxK@M or BACKEND:NxK[@M] "
                f"with BACKEND in {', '.join(BACKEND_NAMES)}"
            )
        numbers = (None if match[key] is None else int(match[key]) for key in ("n", "k", "m"))
        items.append(DenyItem(match["backend"], *numbers))
    return tuple(items)


def read(environ=os.environ) -> Settings:
    """The settings that ``environ`` asks for. Raises ValueError naming the variable and the value."""
    return Settings(
        disabled=_flag(environ, "LOWLAT_GEMM_DISABLE"),
        deny=parse_deny(environ.get("LOWLAT_GEMM_DENY", "")),
        any_device=_flag(environ, "LOWLAT_GEMM_ANY_DEVICE"),
        # vLLM's own variable: whatever it takes for yes is yes here.
        batch_invariant=_flag(environ, "LOWLAT_GEMM_BATCH_INVARIANT")
        or environ.get("VLLM_BATCH_INVARIANT", "").strip().lower() not in _FALSE,
        strict=_flag(environ, "LOWLAT_GEMM_STRICT"),
        no_plugin=_flag(environ, "LOWLAT_GEMM_NO_PLUGIN"),
        cache_dir=_path(environ, "LOWLAT_GEMM_CACHE_DIR"),
        tables=_folder(environ, "LOWLAT_GEMM_TABLES"),
    )


_current: Settings | None = None


def current() -> Settings:
    """The process's settings: the environment as it was at the first call, plus ``change``."""
    global _current
    if _current is None:
        try:
            _current = read()
        except ValueError as error:  # a typing error in a variable must not take a server down at start-up
            _LOG.error("%s; every GEMM falls back until it is mended", error)
            _current = Settings(disabled=True, problem=str(error))
    return _current


def change(**fields) -> Settings:
    """Replaces fields of the process's settings and returns the former ones; ``restore`` puts those back.

    Plans that already exist follow: they are keyed by the settings they were made under.
    """
    global _current
    before = current()
    _current = replace(before, **fields)
    return before


def restore(settings: Settings | None) -> None:
    """Sets the process's settings; None means: read the environment again at the next use."""
    global _current
    _current = settings
