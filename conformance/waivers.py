"""Waivers: known failures that a reviewed file names, each with a reason, a link and a day on which it ends.

    [[waiver]]
    test = "conformance/gpu/test_values.py::test_name[case-*]"   # a node id; * stands for anything
    arches = ["sm90"]                                            # the generations of --arch that it is for
    reason = "what is wrong, in a sentence"
    link = "https://..."                                         # where it is followed up
    expires = 2027-01-31                                         # the last day on which it holds

A waived case runs; its failure is an expected one and its cell is recorded as waived. There is no other way not to be
red: a waiver that is expired, is for no collected case of a file that was collected, or is for a case that passes,
fails the run. A skip is never waived: it proves nothing.
"""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowlat_gemm.arch import parse_arch

FILE = Path(__file__).with_name("waivers.toml")
#: Another file, for tests of this one.
FILE_VARIABLE = "LOWLAT_WAIVERS"
_FIELDS = {"test": str, "arches": list, "reason": str, "link": str, "expires": datetime.date}
_IN_FORCE = pytest.StashKey[tuple]()


class WaiverError(ValueError):
    """The file is not what it has to be; the message names the waiver and the field."""


@dataclass(frozen=True)
class Waiver:
    test: str
    arches: tuple[str, ...]
    reason: str
    link: str
    expires: datetime.date

    @property
    def file(self) -> str:
        return self.test.split("::")[0]

    def covers(self, nodeid: str) -> bool:
        pattern = ".*".join(map(re.escape, self.test.split("*")))
        return re.fullmatch(pattern, nodeid) is not None

    def expired(self, today: datetime.date) -> bool:
        return today > self.expires

    def __str__(self) -> str:
        return f"waiver of {self.test} until {self.expires}"


def today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def load(path: Path = FILE) -> tuple[Waiver, ...]:
    """The waivers in a file. Raises WaiverError for what is missing, unknown, empty or of another type."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise WaiverError(f"{path.name}: {error}") from None
    if unknown := set(data) - {"waiver"}:
        raise WaiverError(f"{path.name}: unknown {sorted(unknown)}, expected [[waiver]] alone")
    return tuple(
        _waiver(f"{path.name}: waiver {number}", entry) for number, entry in enumerate(data.get("waiver", []), 1)
    )


def _waiver(where: str, entry: dict) -> Waiver:
    if set(entry) != set(_FIELDS):
        raise WaiverError(f"{where}: found {', '.join(sorted(entry))}; need {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if type(entry[name]) is not kind or not entry[name]:
            raise WaiverError(f"{where}: {name}: found {entry[name]!r}, need a {kind.__name__} that is not empty")
    if not entry["link"].startswith("https://"):
        raise WaiverError(f"{where}: link: found {entry['link']!r}, need https://...")
    if "::" not in entry["test"]:
        raise WaiverError(f"{where}: test: found {entry['test']!r}, need file.py::test_name or more of a node id")
    try:
        arches = tuple(parse_arch(name).name for name in entry["arches"])
    except ValueError as error:
        raise WaiverError(f"{where}: arches: {error}") from None
    return Waiver(**{**entry, "arches": arches})


def problems(waivers: Iterable[Waiver], collected: Iterable[str], day: datetime.date) -> list[str]:
    """What is wrong with waivers in a run that collected these node ids."""
    ids = list(collected)
    files = {nodeid.split("::")[0] for nodeid in ids}
    found = [f"{waiver}: expired" for waiver in waivers if waiver.expired(day)]
    for waiver in waivers:
        if waiver.file in files and not any(map(waiver.covers, ids)):
            found.append(f"{waiver}: unused, no case of {waiver.file} has this name")
    return found


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--arch")
    try:
        everything = load(Path(os.environ.get(FILE_VARIABLE, FILE)))
    except WaiverError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_IN_FORCE] = tuple(waiver for waiver in everything if name in waiver.arches)


@pytest.hookimpl(tryfirst=True)  # before filters and shards
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = problems(config.stash[_IN_FORCE], [item.nodeid for item in items], today())
    if found:
        raise pytest.UsageError("; ".join(found))


def judge(item: pytest.Item, report: pytest.TestReport) -> None:
    """Makes the failure of a waived case an expected one, and its success a failure."""
    waiver = next((one for one in item.config.stash[_IN_FORCE] if one.covers(item.nodeid)), None)
    if waiver is None or report.when == "teardown":
        return
    if report.failed:
        report.outcome, report.wasxfail = "skipped", f"waived until {waiver.expires}: {waiver.reason} ({waiver.link})"
    elif report.when == "call" and report.passed:
        report.outcome, report.longrepr = "failed", f"{waiver}: unused, the case passes: delete the waiver"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    judge(item, report)
    return report


def is_waived(report: pytest.TestReport | pytest.CollectReport) -> bool:
    return getattr(report, "wasxfail", "").startswith("waived until ")
