"""``runners.toml``: which machines serve which generation."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowlat_gemm.arch import ARCHES, Arch

FILE = Path(__file__).with_name("runners.toml")
_FIELDS = {"count": int, "labels": list, "gpu": str, "shards": int, "minutes": int, "toolchain": dict, "exec": dict}


class RunnersError(ValueError):
    """The file is not what it has to be; the message names generation and field."""


@dataclass(frozen=True)
class Runner:
    """The machines of one generation. ``count`` 0: there is none, and the generation claims no hardware."""

    arch: Arch
    count: int
    labels: tuple[str, ...]
    gpu: str
    shards: int
    minutes: int
    toolchain: Mapping[str, str]
    exec_properties: Mapping[str, str]

    @property
    def claims_hardware(self) -> bool:
        return self.count > 0

    def toolchain_problem(self, found: Mapping[str, str | None], without: Collection[str] = ()) -> str | None:
        """Which of the versions ``found`` (driver included) is not what this runner is to have, or None."""
        for name, wanted in self.toolchain.items():
            version = found.get(name)
            if name in without:
                continue
            if version is None or not f"{version}.".startswith(f"{wanted}."):
                return f"{name} is {version}, {FILE.name} has {wanted}"
        return None


def load_runners(path: Path = FILE) -> dict[str, Runner]:
    """Generation -> its runner, in the order of ``ARCHES``. Raises RunnersError."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RunnersError(f"{path.name}: {error}") from None
    names = [arch.name for arch in ARCHES]
    if set(data) != set(names):
        raise RunnersError(f"{path.name}: found {', '.join(sorted(data))}; need exactly {', '.join(names)}")
    return {arch.name: _runner(arch, data[arch.name], path.name) for arch in ARCHES}


def _runner(arch: Arch, entry: dict, file: str) -> Runner:
    where = f"{file}: {arch.name}"
    if set(entry) != set(_FIELDS):
        raise RunnersError(f"{where}: found {', '.join(sorted(entry))}; need {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind or (name != "count" and not entry[name]):
            raise RunnersError(f"{where}: {name}: found {entry[name]!r}, need a {kind.__name__} that is not empty")
    for name, least in (("count", 0), ("shards", 1), ("minutes", 1)):
        if entry[name] < least:
            raise RunnersError(f"{where}: {name}: found {entry[name]}, need {least} or more")
    texts = [*entry["labels"], *entry["toolchain"].values(), *entry["exec"].values()]
    if bad := [text for text in texts if not isinstance(text, str) or not text]:
        raise RunnersError(f"{where}: found {bad[0]!r}, need text")
    fields = {name: value for name, value in entry.items() if name not in ("exec", "labels")}
    return Runner(arch, labels=tuple(entry["labels"]), exec_properties=entry["exec"], **fields)
