"""The record of a conformance run: each cell that a GPU test judged, in the schema of ``lowlat check``.

Tests hand in their verdict through the fixture ``cell_result``. A run that covers a generation says how many cells
of its tables it judged, out of how many that this build has a kernel for, and fails below all of those it collected.
The record goes to ``--record FILE``, else into the folder LOWLAT_RECORD_DIR, else under Bazel to the undeclared
outputs of the shard (which Bazel loses without `zip`).
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import pytest

from conformance.seed import SEED
from conformance.sharding import shard_from
from lowlat_cli.environment import find_gpus
from lowlat_cli.record import CellResult, Status, command_line, counts, make_record, write_record

_CELLS = pytest.StashKey[list]()
_EXPECTED = pytest.StashKey[list]()
_STARTED = pytest.StashKey[tuple]()
_PROPERTY = "cell"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lowlat_gemm").addoption("--record", type=Path, help="write the JSON record of judged cells here")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "judges_cells: hands in the verdict of each of its cases with `cell_result`")
    config.stash[_CELLS], config.stash[_EXPECTED] = [], []
    config.stash[_STARTED] = (datetime.datetime.now(datetime.timezone.utc), time.monotonic())


def _verdict(case, status: Status, reason: str | None, worst_ulps: float | None) -> CellResult:
    return CellResult(
        case.arch.name, case.n, case.k, case.m, case.residual, status,
        family=case.family,
        backend=case.cell.backend,
        config=dict(case.cell.config),
        reason=reason,
        provenance=case.cell.provenance.kind,
        worst_ulps=worst_ulps,
    )  # fmt: skip


@pytest.fixture
def cell_result(request: pytest.FixtureRequest):
    """``cell_result(case, parity_report)`` puts a cell's verdict into the record."""

    def add(case, report) -> None:
        status = Status.KERNEL if report.ok else Status.FAILED
        result = _verdict(case, status, None if report.ok else str(report), report.worst_ulps)
        # Plain values: a worker process sends them over a wire.
        request.node.user_properties.append((_PROPERTY, vars(result) | {"status": status.value}))

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


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """The cells that this process is to judge: those of the tests that shards and filters have left."""
    judging = [item for item in session.items if item.get_closest_marker("judges_cells")]
    session.config.stash[_EXPECTED] = [item.callspec.params["case"] for item in judging]


def _key(cell) -> tuple:
    return cell.family, cell.n, cell.k, cell.m, cell.residual


def _missing(config: pytest.Config) -> list[CellResult]:
    """Verdicts for the cells that were to be judged and were not: their test ended before it could."""
    judged = {_key(cell) for cell in config.stash[_CELLS]}
    lost = [case for case in config.stash[_EXPECTED] if _key(case) not in judged]
    return [_verdict(case, Status.FAILED, "its test ended before a verdict", None) for case in lost]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput") or config.getoption("--collect-only"):
        return  # pytest-xdist's controller has them all
    ran = bool(config.stash[_CELLS])
    if ran:
        missing = _missing(config)
        config.stash[_CELLS] += missing
        if missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    folder = os.environ.get("LOWLAT_RECORD_DIR") or os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
    path = config.getoption("--record")
    if path is None and folder:
        index, total = shard_from(dict(os.environ)) or (0, 1)
        name = config.getoption("--arch") or "any"
        path = Path(folder) / f"conformance-{name}-{index}-of-{total}.json"
    if path is None or not ran:
        return
    gpus, _ = find_gpus()
    started, clock = config.stash[_STARTED]
    command = command_line("python -m pytest", sys.argv[1:])
    seconds = time.monotonic() - clock
    gpu = gpus[0] if gpus else None
    write_record(make_record(command, config.stash[_CELLS], gpu, started, seconds, SEED), path)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    from conformance.cases import kernel_cases, table_cases
    from lowlat_gemm.arch import parse_arch

    cells, name = config.stash[_CELLS], config.getoption("--arch")
    if not cells or not name:
        return
    arch = parse_arch(name)
    with_kernel, all_cells = len(kernel_cases(arch)), len(table_cases(arch))
    on_kernel = counts(cells)[Status.KERNEL.value]
    terminalreporter.write_line(
        f"{arch}: {on_kernel} of {with_kernel} cells with a kernel ran on it and are right "
        f"({all_cells} in its tables, {all_cells - with_kernel} on backends that are not built)"
    )
