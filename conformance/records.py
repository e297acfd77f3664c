"""The record of a conformance run: each cell that a GPU test judged, in the schema of ``lowlat check``.

Tests hand in their verdict through the fixture ``cell_result``. The record goes to ``--record FILE``, else into the
folder LOWLAT_RECORD_DIR, else under Bazel to the undeclared outputs of the shard (which Bazel loses without `zip`).
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import pytest

from conformance.sharding import shard_from
from lowlat_cli.environment import find_gpus
from lowlat_cli.record import CellResult, Status, counts, make_record, write_record

_CELLS = pytest.StashKey[list]()
_STARTED = pytest.StashKey[tuple]()
_PROPERTY = "cell"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lowlat_gemm").addoption("--record", type=Path, help="write the JSON record of judged cells here")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CELLS] = []
    config.stash[_STARTED] = (datetime.datetime.now(datetime.timezone.utc), time.monotonic())


@pytest.fixture
def cell_result(request: pytest.FixtureRequest):
    """``cell_result(case, parity_report)`` puts a cell's verdict into the record."""

    def add(case, report) -> None:
        result = CellResult(
            case.arch.name, case.n, case.k, case.m, case.residual,
            Status.KERNEL if report.ok else Status.FAILED,
            family=case.family,
            backend=case.cell.backend,
            config=dict(case.cell.config),
            reason=None if report.ok else str(report),
            provenance=case.cell.provenance.kind,
            worst_ulps=report.worst_ulps,
        )  # fmt: skip
        # Plain values: a worker process sends them over a wire.
        request.node.user_properties.append((_PROPERTY, vars(result) | {"status": result.status.value}))

    return add


class _Collector:
    """Gathers what tests handed in, from worker processes too."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            values = [value for key, value in report.user_properties if key == _PROPERTY]
            self.config.stash[_CELLS] += [CellResult(**value | {"status": Status(value["status"])}) for value in values]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Collector(session.config), "lowlat-cell-collector")


def pytest_sessionfinish(session: pytest.Session) -> None:
    cells = session.config.stash[_CELLS]
    path = session.config.getoption("--record")
    folder = os.environ.get("LOWLAT_RECORD_DIR") or os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
    if path is None and folder:
        index, total = shard_from(dict(os.environ)) or (0, 1)
        name = session.config.getoption("--arch") or "any"
        path = Path(folder) / f"conformance-{name}-{index}-of-{total}.json"
    if path is None or not cells:
        return
    gpus, _ = find_gpus()
    started, clock = session.config.stash[_STARTED]
    command = " ".join(["python -m pytest", *sys.argv[1:]])
    write_record(make_record(command, cells, gpus[0] if gpus else None, started, time.monotonic() - clock), path)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    cells = config.stash[_CELLS]
    if cells:
        found = ", ".join(f"{count} {status}" for status, count in counts(cells).items() if count)
        terminalreporter.write_line(f"cells judged on the GPU: {len(cells)} ({found})")
