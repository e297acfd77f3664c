"""Cases in a child process with a time limit: a hung or crashed kernel is one failed case, not a lost run.

With ``--isolate`` this process collects, shards, reports and records, and never touches the GPU. A child pytest runs
the cases in order and sends each report as it is made. Three things end a child early, and the next one goes on with
the cases behind:

    silence   no report within the case's limit: the case failed, its Python stack is in the report
    death     a signal or an exit in the middle of a case: the case failed
    fault     a case left a CUDA error behind that every later call would raise: the case failed, whatever it said

One child serves many cases, for a start costs seconds (torch, cutlass, a CUDA context). A child that does not come to
its first case fails all that are left, so the loop ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conformance import waivers
from conformance.isolated_worker import WORKER

#: Seconds for a child to come to the first report of its first case: imports, collection, compiling everything.
START_LIMIT_S = 400.0
#: Seconds for each phase (setup, call, teardown) of a case, unless it is marked ``case_limit(seconds)``.
CASE_LIMIT_S = 60.0
#: Seconds for a child's faulthandler to write the stack, and for a child that is done to end.
GRACE_S = 5.0
#: Seconds after which a killed child is left to itself.
KILL_S = 60.0
#: Lines of a child's own output that a failure shows.
LOG_LINES = 60
#: Children in a row that came through no case: then what kills them is not the case.
BARREN_CHILDREN = 3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Variables that are the parent's business: shards are taken and records written once.
_PARENTS = (
    "LOWLAT_RECORD_DIR", "LOWLAT_SHARD", "TEST_SHARD_INDEX", "TEST_SHARD_STATUS_FILE", "TEST_TOTAL_SHARDS",
    "TEST_UNDECLARED_OUTPUTS_DIR",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowlat_gemm")
    group.addoption("--isolate", action="store_true", help="run the cases in a child process with a time limit")
    group.addoption(
        "--case-limit", type=float, default=CASE_LIMIT_S, metavar="SECONDS", help="limit of a phase of a case"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case_limit(seconds): with --isolate, how long each phase of the case may take")


def _end_with_parent() -> None:
    """In the child: it is killed when its parent ends, so that no case holds the GPU behind a run that is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Child:
    """A child pytest over some of the session's cases, and the messages that it sends."""

    def __init__(self, config: pytest.Config, nodeids: list[str]):
        self.folder = Path(tempfile.mkdtemp(prefix="isolated-"))
        (self.folder / "cases.json").write_text(json.dumps(nodeids))
        self.log = self.folder / "log.txt"
        self._pipe, theirs = os.pipe()
        self._buffer = b""
        options = [f"--basetemp={self.folder}/tmp", "--junitxml=", "-p", "no:cacheprovider"]
        environment = {name: value for name, value in os.environ.items() if name not in _PARENTS}
        environment[WORKER] = json.dumps({"cases": str(self.folder / "cases.json"), "pipe": theirs})
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args), *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, pass_fds=[theirs], start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        os.close(theirs)

    def message(self, limit_s: float) -> dict | None:
        """The next message; None when the child has closed its end. TimeoutError after ``limit_s`` of silence."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                raise TimeoutError
            read = os.read(self._pipe, 1 << 16)
            if not read:
                return None
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def end(self) -> str:
        """Waits for the child or kills it and all that it started; how it ended, in words."""
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGABRT)  # faulthandler writes the stack of every thread
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        self._signal(signal.SIGKILL)
        try:
            code = self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:  # stuck in the driver: the next child will show whether the GPU is usable
            return f"process {self.process.pid} not gone {KILL_S:g} s after SIGKILL"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def close(self) -> None:
        self.end()
        os.close(self._pipe)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session):
    config = session.config
    if not config.getoption("--isolate") or config.option.collectonly or WORKER in os.environ:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    left, barren = {item.nodeid: item for item in session.items}, 0
    while left:
        child = _Child(config, list(left))
        try:
            barren = 0 if _follow(session, child, left, last_try=barren + 1 == BARREN_CHILDREN) else barren + 1
        finally:
            child.close()
    return True


def _follow(session: pytest.Session, child: _Child, left: dict[str, pytest.Item], last_try: bool) -> bool:
    """Takes a child's reports until it ends; what is through, or was lost with the child, is gone from ``left``.

    Whether it came through a case. One that does not on the ``last_try`` takes all that are left with it.
    """
    item, fruitful, reported = None, False, False
    began = time.monotonic()
    while left:
        limit = _limit(item) if reported else START_LIMIT_S
        try:
            message, how = child.message(limit), None
        except TimeoutError:
            message, how = None, f"no report within {limit:g} s, so its process was ended"
        if message is None or "fault" in message:
            if how is not None:
                child.process.send_signal(signal.SIGABRT)
            how = how or f"its process ended with {child.end()}"
            if not fruitful and last_try:
                _lost(session, child, list(left.values()), left, item, how, began)
            elif item is not None:
                _lost(session, child, [item], left, item, how, began)
            return fruitful
        if "start" in message:
            item, began = left[message["start"]], time.monotonic()
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif "report" in message:
            reported, hook = True, session.config.hook
            report = hook.pytest_report_from_serializable(config=session.config, data=message["report"])
            item.ihook.pytest_runtest_logreport(report=report)
        else:
            _through(session, left, item)
            item, fruitful = None, True
    return fruitful


def _limit(item: pytest.Item | None) -> float:
    """Seconds of silence that are allowed at ``item``; between two cases the child may tear fixtures down."""
    if item is None:
        return START_LIMIT_S
    mark = item.get_closest_marker("case_limit")
    return mark.args[0] if mark else item.config.getoption("--case-limit")


def _through(session: pytest.Session, left: dict[str, pytest.Item], item: pytest.Item) -> None:
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    del left[item.nodeid]
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _lost(
    session, child: _Child, lost: list[pytest.Item], left: dict, at: pytest.Item | None, how: str, began: float
) -> None:
    """Reports the cases that a child took with it, ``at`` the one that it was at."""
    child.end()
    text = child.tail()
    for item in lost:
        if item is not at:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        message = f"{item.nodeid}: {how}\n{text}" if item in (at, lost[0]) else f"{item.nodeid}: {how}"
        keywords = {name: 1 for name in item.keywords}
        took = time.monotonic() - began if item is at else 0.0
        report = pytest.TestReport(item.nodeid, item.location, keywords, "failed", message, "call", duration=took)
        waivers.judge(item, report)
        item.ihook.pytest_runtest_logreport(report=report)
        _through(session, left, item)
