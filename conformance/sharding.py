"""Bazel's test sharding for pytest, such that the shards together run every test once.

Each shard collects everything and keeps its part. A shard may come out empty; a collection that is empty before
the parts are taken stays pytest's error. What each shard saw and kept is written to its undeclared outputs, so that
a complete run can be told from one that lost something.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

_COLLECTED = pytest.StashKey[int]()


def shard_of(nodeids: Iterable[str], index: int, total: int) -> list[str]:
    """The node ids that shard ``index`` of ``total`` runs. The same in every shard, whatever order it collected in."""
    if not 0 <= index < total:
        raise ValueError(f"shard index {index} is not in 0..{total - 1}")
    return sorted(nodeids)[index::total]


def shard_from(environ: dict[str, str]) -> tuple[int, int] | None:
    """(index, total) that Bazel gave to this process, or None when it does not shard."""
    total = int(environ.get("TEST_TOTAL_SHARDS") or 1)
    return (int(environ["TEST_SHARD_INDEX"]), total) if total > 1 else None


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_COLLECTED] = len(items)
    collected = sorted(item.nodeid for item in items)
    shard = shard_from(dict(os.environ))
    if shard:
        if status := os.environ.get("TEST_SHARD_STATUS_FILE"):
            Path(status).touch()  # tells Bazel that this runner knows about shards
        mine = set(shard_of(collected, *shard))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
        items[:] = [item for item in items if item.nodeid in mine]
    if folder := os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR"):
        index, total = shard or (0, 1)
        selected = sorted(item.nodeid for item in items)
        report = {"index": index, "total": total, "collected": collected, "selected": selected}
        (Path(folder) / f"tests-{index}-of-{total}.json").write_text(json.dumps(report, indent=1))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    lost_to_other_shards = session.config.stash.get(_COLLECTED, 0) > 0 and shard_from(dict(os.environ))
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and lost_to_other_shards:
        session.exitstatus = pytest.ExitCode.OK
