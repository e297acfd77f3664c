"""Whether the installed compiler is of one piece.

Two wheels that claim one path with different content leave whichever was unpacked last, so equal version lists mean
different compilers on two machines (NVIDIA/cutlass#3170, #3259). Such a compiler is not used.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata

from .store import TOOLCHAIN


@functools.lru_cache(maxsize=None)
def mixed_wheels() -> str | None:
    """Which two installed distributions of the compiler claim one file with different content; None when none do."""
    owners: dict[str, tuple[str, str]] = {}
    for name in TOOLCHAIN:
        try:
            record = importlib.metadata.distribution(name).read_text("RECORD")
        except importlib.metadata.PackageNotFoundError:
            continue
        for path, digest, *_ in csv.reader((record or "").splitlines()):
            other, other_digest = owners.setdefault(path, (name, digest))
            if digest and other_digest and digest != other_digest:
                return f"{other} and {name} both claim {path} with different content: uninstall both, install one"
    return None
