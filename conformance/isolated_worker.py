"""The child's side of ``--isolate``: runs the cases that it is given and sends each report over a pipe."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

#: Environment variable that makes a pytest process a child: JSON with the file of node ids and the pipe.
WORKER = "LOWLAT_ISOLATED_WORKER"


def lasting_fault() -> str | None:
    """The CUDA error that this process cannot get rid of (an illegal access, a failed assertion), or None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch has several types for it
        return str(error).splitlines()[0]
    return None


class _Worker:
    def __init__(self, config: pytest.Config, wanted: list[str], pipe: int):
        self.config, self.wanted, self.pipe = config, wanted, pipe
        self.passed, self.fault = True, None

    def _send(self, **message) -> None:
        data = (json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self.pipe, data) :]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        missing = [nodeid for nodeid in self.wanted if nodeid not in by_id]
        if missing:
            raise pytest.UsageError(f"{len(missing)} cases are not collected here, the first is {missing[0]}")
        items[:] = [by_id[nodeid] for nodeid in self.wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.passed, self.fault = True, None
        self._send(start=nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after waivers
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        if report.when == "teardown":
            self.fault = lasting_fault()
            if self.fault and self.passed:
                report.outcome, report.longrepr = "failed", f"{item.nodeid} left a CUDA error behind: {self.fault}"
        self.passed = self.passed and report.passed
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._send(finish=nodeid)
        if self.fault is not None:
            self._send(fault=self.fault)
            os._exit(0)  # nothing can be torn down on a device that answers every call with that error


def pytest_configure(config: pytest.Config) -> None:
    if WORKER in os.environ:
        given = json.loads(os.environ[WORKER])
        wanted = json.loads(Path(given["cases"]).read_text())
        config.pluginmanager.register(_Worker(config, wanted, given["pipe"]), "lowlat-isolated-worker")
