"""Test shards for pytest, such that together they run every test once.

A suite may be cut over machines (LOWLAT_SHARD=i/n, from 0) and again by Bazel on each (shard_count). Each shard
collects everything and keeps its part. The tests of one compile unit go to one shard, whose process compiles it once
for all of them. A shard may come out empty; a collection that is empty before the parts are taken stays pytest's error.
What was collected, as a digest, and what this shard kept is in its record (records.py), so that ``hw_matrix merge`` can
tell a complete run from one that lost something.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowlat_gemm.kernels.compile_cache import CompileUnit

#: What the session collected before filters and shards: node ids, sorted.
COLLECTED = pytest.StashKey[list]()
_FILTERED = pytest.StashKey[int]()


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``total``."""

    index: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.total:
            raise ValueError(f"shard index {self.index} is not in 0..{self.total - 1}")


def shard_of(nodeids: Iterable[str], shard: Shard, group: Callable[[str], str] = str) -> list[str]:
    """The node ids that ``shard`` runs. The same in every shard, whatever order it collected in.

    Those of one ``group`` stay together; by default each is its own.
    """
    nodeids = sorted(nodeids)
    mine = set(sorted(set(map(group, nodeids)))[shard.index :: shard.total])
    return [nodeid for nodeid in nodeids if group(nodeid) in mine]


def group_of(item: pytest.Item) -> str:
    """The compile unit that a test is about, else the test itself."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((repr(value) for value in params if isinstance(value, CompileUnit)), item.nodeid)


def shard_from(environ: dict[str, str]) -> Shard:
    """The shard that this process is: 0 of 1 when nothing shards. ValueError for what cannot be read."""
    machine = Shard(0, 1)
    if text := environ.get("LOWLAT_SHARD"):
        try:
            machine = Shard(*map(int, text.split("/")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"LOWLAT_SHARD={text!r}: expected i/n, i from 0 ({error})") from None
    total = int(environ.get("TEST_TOTAL_SHARDS") or 1)
    here = Shard(int(environ["TEST_SHARD_INDEX"]), total) if total > 1 else Shard(0, 1)
    return Shard(machine.index * here.total + here.index, machine.total * here.total)


def digest(nodeids: Iterable[str]) -> str:
    """One word for a set of tests: two shards of one suite have the same for what they collected."""
    return hashlib.sha256("\n".join(sorted(nodeids)).encode()).hexdigest()


def pytest_configure(config: pytest.Config) -> None:
    try:
        shard_from(dict(os.environ))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    config.stash[COLLECTED] = sorted(item.nodeid for item in items)
    result = yield
    config.stash[_FILTERED] = len(items)
    shard = shard_from(dict(os.environ))
    if status := os.environ.get("TEST_SHARD_STATUS_FILE"):
        Path(status).touch()  # tells Bazel that this runner knows about shards
    if shard.total > 1:
        groups = {item.nodeid: group_of(item) for item in items}
        mine = set(shard_of(groups, shard, groups.__getitem__))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
        items[:] = [item for item in items if item.nodeid in mine]
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    lost_to_other_shards = session.config.stash.get(_FILTERED, 0) > 0 and shard_from(dict(os.environ)).total > 1
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and lost_to_other_shards:
        session.exitstatus = pytest.ExitCode.OK
