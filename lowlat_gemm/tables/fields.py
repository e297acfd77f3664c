"""Reading one TOML table against a closed set of keys, with errors that name the place."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .schema import TableError


class Check(NamedTuple):
    """What a field needs, in words, and the test for it."""

    need: str
    holds: Callable[[Any], bool]


POSITIVE_INT = Check("an integer > 0", lambda v: type(v) is int and v > 0)
POSITIVE_NUMBER = Check("a number > 0", lambda v: type(v) in (int, float) and math.isfinite(v) and v > 0)
TEXT = Check("a non-empty string", lambda v: isinstance(v, str) and bool(v.strip()))
DATE = Check("a date such as 2026-11-30", lambda v: type(v) is datetime.date)
TABLE = Check("a table", lambda v: isinstance(v, dict))
LIST = Check("a list of tables", lambda v: isinstance(v, list))
VERSIONS = Check(
    "a table of version strings",
    lambda v: isinstance(v, dict) and bool(v) and all(isinstance(s, str) and s for s in v.values()),
)
#: What a measured cell or limit needs beside its times; a source of kind "measured" can give it for many.
SESSION = {"device": TEXT, "date": DATE, "versions": VERSIONS}


def one_of(names: Iterable[str]) -> Check:
    known = tuple(names)
    return Check(f"one of {', '.join(known) or '(none)'}", lambda v: isinstance(v, str) and v in known)


@dataclass(frozen=True)
class Where:
    """A place in a file, from the outside in."""

    path: str
    parts: tuple[str, ...] = ()

    def at(self, part: str) -> Where:
        return Where(self.path, (*self.parts, part))

    def error(self, what: str, found: str, need: str) -> TableError:
        return TableError(f"{': '.join((self.path, *self.parts, what))}: found {found}, need {need}")

    def check(self, name: str, value: Any, check: Check) -> Any:
        if not check.holds(value):
            raise self.error(name, "nothing" if value is None else shown(value), check.need)
        return value


def shown(value: Any) -> str:
    return str(value) if isinstance(value, datetime.date) else repr(value)


def read(
    where: Where, table: Any, required: Mapping[str, Check], optional: Mapping[str, Check] = {}
) -> dict[str, Any]:
    """The fields of ``table``, all checked: no key is unknown and no required one is missing."""
    if not isinstance(table, dict):
        raise where.error("value", shown(table), "a table")
    known = {**required, **optional}
    for key in table:
        if key not in known:
            raise where.error(f"unknown key {key!r}", shown(table[key]), f"one of {', '.join(known)}")
    for key, check in required.items():
        where.check(key, table.get(key), check)
    for key, check in optional.items():
        if key in table:
            where.check(key, table[key], check)
    return dict(table)
