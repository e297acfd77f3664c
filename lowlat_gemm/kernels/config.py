"""Reading a kernel's config dataclass from a table's mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

Config = TypeVar("Config")


def config_from(cls: type[Config], kernel: str, values: Mapping[str, int], optional: Mapping[str, int]) -> Config:
    """``cls(**values)``, checked: required entries are integers from 1 on.

    ``optional``: entries that may be missing or None, with the least integer that each may be. Raises ValueError with
    the mapping and what is missing, unknown or out of range.
    """
    known = {field.name for field in fields(cls)}
    given = {key: value for key, value in values.items() if not (key in optional and value is None)}
    unknown, missing = set(given) - known, known - set(optional) - set(given)
    if unknown or missing:
        raise ValueError(f"{kernel} config {dict(values)}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    bad = {key: value for key, value in given.items() if type(value) is not int or value < optional.get(key, 1)}
    if bad:
        raise ValueError(f"{kernel} config {dict(values)}: expected integers, positive where required, found {bad}")
    return cls(**given)
