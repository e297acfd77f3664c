"""The record of a conformance run, one JSON file a shard: where and what ran, every test, every judged cell.

Tests hand in the verdict on a cell through the fixtures ``cell_result`` (ran on the GPU) and ``unit_result`` (compiled,
or followed in a model). A cell that was to be judged and was not is recorded as failed and fails the run, as does a
test that was selected and never reported. The record goes to ``--record FILE``, else into the folder
LOWLAT_RECORD_DIR, else under Bazel to the undeclared outputs of the shard (which Bazel loses without `zip`).
``hw_matrix merge`` joins the records of all shards.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import pytest

from conformance import waivers
from conformance.isolated_worker import WORKER
from conformance.seed import SEED
from conformance.sharding import COLLECTED, digest, shard_from
from lowlat_cli.environment import find_gpus
from lowlat_cli.record import CellResult, Status, command_line, counts, make_record, write_record

_CELLS = pytest.StashKey[list]()
_TESTS = pytest.StashKey[dict]()
_EXPECTED = pytest.StashKey[dict]()
_STARTED = pytest.StashKey[tuple]()
_PROPERTY = "cell"

#: What becomes of a test. A closed set; the worst of its phases counts.
OUTCOMES = ("passed", "skipped", "waived", "failed", "not run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lowlat_gemm").addoption("--record", type=Path, help="write the JSON record of judged cells here")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "judges_cells: hands in the verdict of each of its cases with `cell_result`")
    config.stash[_CELLS], config.stash[_TESTS], config.stash[_EXPECTED] = [], {}, {}
    config.stash[_STARTED] = (datetime.datetime.now(datetime.timezone.utc), time.monotonic())
    config.pluginmanager.register(_Collector(config), "lowlat-cell-collector")


def _verdict(case, status: Status, reason: str | None, report=None) -> CellResult:
    return CellResult(
        case.arch.name, case.n, case.k, case.m, case.residual, status,
        family=case.family,
        backend=case.cell.backend,
        config=dict(case.cell.config),
        reason=reason,
        provenance=case.cell.provenance.kind,
        worst_ulps=None if report is None else report.worst_ulps,
        worst_share=None if report is None else report.worst_share,
    )  # fmt: skip


def _hand_in(request: pytest.FixtureRequest, result: CellResult) -> None:
    # Plain values: a worker process sends them over a wire.
    request.node.user_properties.append((_PROPERTY, vars(result) | {"status": result.status.value}))


@pytest.fixture
def cell_result(request: pytest.FixtureRequest):
    """``cell_result(case, parity_report)`` puts the verdict on a cell that ran on the GPU into the record."""

    def add(case, report) -> None:
        status = Status.KERNEL if report.ok else Status.FAILED
        _hand_in(request, _verdict(case, status, None if report.ok else str(report), report))

    return add


@pytest.fixture
def unit_result(request: pytest.FixtureRequest):
    """``unit_result(unit, status, report=None)`` says of all cells with that compile unit what was shown without a GPU:
    ``Status.COMPILED``, or ``Status.MODEL`` with its parity report."""
    from conformance.cases import cells_of_unit

    def add(unit, status: Status, report=None) -> None:
        assert status in (Status.COMPILED, Status.MODEL), status
        for case in cells_of_unit(unit):
            _hand_in(request, _verdict(case, status, None, report))

    return add


def _outcome(report: pytest.TestReport) -> str:
    return "waived" if waivers.is_waived(report) else report.outcome


class _Collector:
    """Gathers what tests handed in, from child processes too."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tests = self.config.stash[_TESTS]
        outcome, seconds = tests.get(report.nodeid, ("passed", 0.0))
        worst = max(outcome, _outcome(report), key=OUTCOMES.index)
        tests[report.nodeid] = (worst, seconds + report.duration)
        if report.when == "call":
            for value in (value for key, value in report.user_properties if key == _PROPERTY):
                status = Status(value["status"])
                if status is Status.FAILED and worst == "waived":
                    status = Status.WAIVED
                value = value | {"status": status, "seconds": round(report.duration, 3)}
                self.config.stash[_CELLS].append(CellResult(**value))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What this process is to run and to judge: the tests that shards and filters have left."""
    tests = {item.nodeid: None for item in session.items}
    for item in session.items:
        if item.get_closest_marker("judges_cells"):
            tests[item.nodeid] = item.callspec.params["case"]
    session.config.stash[_EXPECTED] = tests


def _key(cell) -> tuple:
    return cell.family, cell.n, cell.k, cell.m, cell.residual


def _missing(config: pytest.Config) -> list[CellResult]:
    """Verdicts for the cells that were to be judged and were not: their test ended before it could."""
    judged = {_key(cell) for cell in config.stash[_CELLS]}
    lost = []
    for nodeid, case in config.stash[_EXPECTED].items():
        outcome = config.stash[_TESTS].get(nodeid, ("not run",))[0]
        if case is not None and outcome != "skipped" and _key(case) not in judged:
            status = Status.WAIVED if outcome == "waived" else Status.FAILED
            lost.append(_verdict(case, status, "its test ended before a verdict"))
    return lost


def _tests(config: pytest.Config) -> list[dict]:
    ran = config.stash[_TESTS]
    found = [(nodeid, *ran.get(nodeid, ("not run", 0.0))) for nodeid in sorted({*config.stash[_EXPECTED], *ran})]
    return [{"id": nodeid, "outcome": outcome, "seconds": round(seconds, 3)} for nodeid, outcome, seconds in found]


def _path(config: pytest.Config) -> Path | None:
    folder = os.environ.get("LOWLAT_RECORD_DIR") or os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
    if config.getoption("--record") is not None or not folder:
        return config.getoption("--record")
    shard = shard_from(dict(os.environ))
    return Path(folder) / f"{_suite(config)}-{shard.index}-of-{shard.total}.json"


def _suite(config: pytest.Config) -> str:
    """What was collected, by folder and generation: ``gpu_sm90``, ``static``. A folder may hold records of several."""
    files = {Path(nodeid.split("::")[0]) for nodeid in config.stash.get(COLLECTED, [])}
    names = "+".join(sorted({file.parent.name or "tests" for file in files})) or "nothing"
    return "_".join(filter(None, (names, config.getoption("--arch"))))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    from conformance import plugin  # which loads this file

    config = session.config
    if hasattr(config, "workerinput") or WORKER in os.environ or config.getoption("--collect-only"):
        return  # the process that started this one has them all
    missing = _missing(config)
    config.stash[_CELLS] += missing
    tests = _tests(config)
    incomplete = any(cell.status is Status.FAILED for cell in missing) or any(t["outcome"] == "not run" for t in tests)
    if incomplete and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = _path(config)
    collected = config.stash.get(COLLECTED, [])
    if path is None or not (collected or tests):
        return
    # The driver says without torch that there is none: torch takes seconds, and many a session has not imported it.
    gpus = [] if isinstance(plugin.gpus(), str) else find_gpus()[0]
    started, clock = config.stash[_STARTED]
    command = command_line("python -m pytest", sys.argv[1:])
    seconds = time.monotonic() - clock
    record = make_record(command, config.stash[_CELLS], gpus[0] if gpus else None, started, seconds, SEED)
    shard = shard_from(dict(os.environ))
    record["kind"], record["suite"] = "conformance shard", _suite(config)
    record["arch"] = config.getoption("--arch")
    record["shard"] = {
        "index": shard.index,
        "total": shard.total,
        "collected": len(collected),
        "digest": digest(collected),
    }
    write_record(record | {"tests": tests}, path)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    from conformance.cases import kernel_cases, table_cases
    from lowlat_gemm.arch import parse_arch

    cells, name = config.stash[_CELLS], config.getoption("--arch")
    if not cells or not name:
        return
    arch = parse_arch(name)
    with_kernel, all_cells, found = len(kernel_cases(arch)), len(table_cases(arch)), counts(_last_verdicts(cells))
    if found["compiled"] or found["model"]:
        without_gpu = f"{found['compiled']} compile-checked, {found['model']} model-checked"
        terminalreporter.write_line(f"{arch}: of {all_cells} cells in its tables {without_gpu}")
    else:
        terminalreporter.write_line(
            f"{arch}: {found['kernel']} of {with_kernel} cells with a kernel ran on it and are right "
            f"({all_cells} in its tables, {all_cells - with_kernel} on backends that are not built)"
        )


def _last_verdicts(cells: list[CellResult]) -> list[CellResult]:
    """One verdict a cell: in a run without a GPU a model says more than a compile, whichever came first."""
    order = (Status.COMPILED, Status.MODEL)
    found: dict[tuple, CellResult] = {}
    for cell in sorted(cells, key=lambda cell: order.index(cell.status) if cell.status in order else len(order)):
        found[_key(cell)] = cell
    return list(found.values())
