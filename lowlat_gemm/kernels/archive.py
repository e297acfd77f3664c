"""Compiled kernels made ahead of time, in one file that a store takes objects from instead of compiling.

    manifest.json    {"format", "origin": what made the objects, "objects": {key: {"sha256", "what"}}}
    <key>.o          the objects, by key

Equal objects and origin give equal bytes: members are stored as they are, in the order of their keys, without times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("lowlat_gemm")

FORMAT = 1
#: Names of archives, in the folder of a store or of this package.
PATTERN = "*_aot.zip"
_MANIFEST = "manifest.json"


def write_archive(path: Path, origin: Mapping[str, Any], objects: Mapping[str, tuple[bytes, str]]) -> None:
    """Writes ``objects`` (key -> bytes of the object, what it is), which ``origin`` made."""
    notes = {key: {"sha256": hashlib.sha256(data).hexdigest(), "what": what} for key, (data, what) in objects.items()}
    manifest = json.dumps({"format": FORMAT, "origin": origin, "objects": notes}, indent=1, sort_keys=True).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [(_MANIFEST, manifest), *((f"{key}.o", objects[key][0]) for key in sorted(objects))]:
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, data)


class Archive:
    """An archive that this process may use."""

    def __init__(self, path: Path, notes: Mapping[str, Any]):
        self.path, self._notes = path, notes

    @classmethod
    def open(cls, path: Path, origin: Mapping[str, Any]) -> "Archive | None":
        """The archive at ``path``; None, with one warning, where it is not readable or ``origin`` did not make it."""
        try:
            with zipfile.ZipFile(path) as archive:
                manifest = json.loads(archive.read(_MANIFEST))
            made_by, notes = dict(manifest["origin"]), dict(manifest["objects"])
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            _LOG.warning("%s is no archive of kernels (%s); its kernels are compiled", path, error)
            return None
        if manifest.get("format") != FORMAT or made_by != origin:
            others = sorted(name for name in {*made_by, *origin} if made_by.get(name) != origin.get(name))
            what = ", ".join(others) or "format"
            _LOG.warning("%s was made with other %s; it is ignored and kernels are compiled", path, what)
            return None
        return cls(path, notes)

    def __len__(self) -> int:
        """How many kernels it has."""
        return len(self._notes)

    def read(self, key: str) -> tuple[bytes, str] | None:
        """The object of ``key`` and what it is; None where there is none that is whole."""
        note = self._notes.get(key)
        if note is None:
            return None
        try:
            with zipfile.ZipFile(self.path) as archive:
                data = archive.read(f"{key}.o")
            return (data, note["what"]) if hashlib.sha256(data).hexdigest() == note["sha256"] else None
        except (OSError, KeyError, TypeError, zipfile.BadZipFile):
            return None
