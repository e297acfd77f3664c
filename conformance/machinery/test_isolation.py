"""With --isolate a hung, crashed or faulting case is one failure, and every other case still runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

import pytest

from conformance.fakes import inner_environment, run_pytest

SAMPLE = """
import os, signal, time, pytest
from conformance import isolated_worker

@pytest.fixture(scope="session")
def expensive():
    open(f"made-{os.getpid()}", "x")

@pytest.mark.parametrize("i", range(6))
def test_case(i, expensive):
    open(f"ran-{i}", "x")
    if i == 2:
        BAD
"""

BAD = {
    "hangs": ("time.sleep(600)", "no report within 3 s", "in test_case"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended with signal SIGKILL", ""),
    "crashes": ("os.abort()", "its process ended with signal SIGABRT", "in test_case"),
    "exits": ("os._exit(7)", "its process ended with exit code 7", ""),
    "fails": ("assert i == 'broken'", "assert 2 == 'broken'", ""),
    "leaves a fault": (
        "isolated_worker.lasting_fault = lambda: 'an illegal access'; assert i == 3",
        "assert 2 == 3",
        "",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_one_bad_case_is_one_failure(tmp_path, how):
    code, said, stack = BAD[how]
    done = run_pytest(
        tmp_path, SAMPLE.replace("BAD", code), "--isolate", "--case-limit=3", "--junitxml=out.xml", "--record=r.json"
    )
    assert done.returncode == 1 and "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    assert said in done.stdout and stack in done.stdout, done.stdout
    assert sorted(path.name for path in tmp_path.glob("ran-*")) == [f"ran-{i}" for i in range(6)]
    children = 1 if how == "fails" else 2
    assert len(list(tmp_path.glob("made-*"))) == children, "a child serves as many cases as it can"
    outcomes = {test["id"][-2]: test["outcome"] for test in json.loads((tmp_path / "r.json").read_text())["tests"]}
    assert outcomes == {str(i): "failed" if i == 2 else "passed" for i in range(6)}
    cases = list(xml.etree.ElementTree.parse(tmp_path / "out.xml").getroot().iter("testcase"))
    assert [bool(len(case)) for case in cases].count(True) == 1 and len(cases) == 6


def test_a_case_that_passes_and_leaves_a_fault_behind_failed(tmp_path):
    """What it launched went wrong after its last look at the device."""
    source = SAMPLE.replace("BAD", "isolated_worker.lasting_fault = lambda: 'an illegal access'")
    done = run_pytest(tmp_path, source, "--isolate", "--record=r.json")
    assert done.returncode == 1 and "test_case[2] left a CUDA error behind: an illegal access" in done.stdout, done.stdout
    outcomes = [test["outcome"] for test in json.loads((tmp_path / "r.json").read_text())["tests"]]
    assert outcomes == ["passed", "passed", "failed", "passed", "passed", "passed"]
    assert len(list(tmp_path.glob("made-*"))) == 2, "the next case had a new process"


def test_a_limit_of_its_own(tmp_path):
    source = """
import time, pytest

def test_first(): pass

@pytest.mark.case_limit(30)
def test_long(): time.sleep(2)

def test_too_long(): time.sleep(2)
"""
    done = run_pytest(tmp_path, source, "--isolate", "--case-limit=1")
    assert "1 failed, 2 passed" in done.stdout and "test_too_long: no report within 1 s" in done.stdout, done.stdout


def test_children_that_come_to_nothing_fail_all_cases_and_the_run_ends(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import os\nfrom conformance.isolated_worker import WORKER\n"
        "def pytest_collection_finish():\n    if WORKER in os.environ: raise RuntimeError('no such luck')\n"
    )
    done = run_pytest(tmp_path, SAMPLE.replace("BAD", "pass"), "--isolate")
    assert done.returncode == 1 and "6 failed" in done.stdout and "no such luck" in done.stdout, done.stdout


def test_fixtures_shards_properties_and_captured_output_come_through(tmp_path):
    source = """
import os, pytest

@pytest.mark.parametrize("i", range(4))
def test_a(i, tmp_path, record_property):
    record_property("number", i)
    print(f"said {i}")
    assert i != 1 and "TEST_TOTAL_SHARDS" not in os.environ
"""
    shard = {"TEST_TOTAL_SHARDS": "2", "TEST_SHARD_INDEX": "1"}
    done = run_pytest(tmp_path, source, "--isolate", "--junitxml=out.xml", **shard)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout and "said 1" in done.stdout, done.stdout
    assert re.findall(r'name="number" value="(\d)"', (tmp_path / "out.xml").read_text()) == ["1", "3"]


def test_a_run_that_is_killed_takes_its_child_along(tmp_path):
    """As Bazel ends a test that takes too long."""
    (tmp_path / "test_sample.py").write_text(
        "import os, time\ndef test_a():\n    open(f'child-{os.getpid()}', 'x')\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conformance.plugin", "--isolate", "test_sample.py"]
    run = subprocess.Popen(command, cwd=tmp_path, env=inner_environment(), stdout=subprocess.DEVNULL)
    assert wait_for(lambda: list(tmp_path.glob("child-*"))), "the case did not begin"
    child = Path(f"/proc/{next(tmp_path.glob('child-*')).name.removeprefix('child-')}")
    assert child.exists()
    run.kill()
    run.wait()
    assert wait_for(lambda: not child.exists()), "the child lives on"


def wait_for(condition, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize("options", [("-x",), ("--maxfail=1",)])
def test_it_stops_where_it_is_told_to(tmp_path, options):
    done = run_pytest(tmp_path, SAMPLE.replace("BAD", "assert 0"), "--isolate", *options)
    assert done.returncode != 0 and "1 failed, 2 passed" in done.stdout and not (tmp_path / "ran-4").exists(), (
        done.stdout
    )
