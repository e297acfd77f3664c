"""The sanitizer's runner takes a report, a hang and a failed test for what they are."""

from __future__ import annotations

import subprocess

import pytest

from conformance import sanitize

PASSED = "....\n4 passed, 237 deselected in 18.95s\n"
OUTPUTS = {
    "clean": (PASSED + "========= ERROR SUMMARY: 0 errors\n", 0, True),
    "clean racecheck": (PASSED + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, True),
    "errors": ("========= Invalid read\n" + PASSED + "========= ERROR SUMMARY: 3 errors\n", 9, False),
    "hazard": (PASSED + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 9, False),
    "failed test": ("E   wrong\n1 failed, 3 passed in 2s\n========= ERROR SUMMARY: 0 errors\n", 1, False),
    "no test": ("no tests ran in 1s\n========= ERROR SUMMARY: 0 errors\n", 0, False),
    "no summary": (PASSED, 0, False),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outcomes(name, monkeypatch):
    output, code, clean = OUTPUTS[name]
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, code, output, ""))
    outcome = sanitize.run_tool("memcheck", "skinny", "sm90")
    assert sanitize.is_clean(outcome) is clean, outcome
    assert bool(outcome["report"]) is (code != 0), outcome


def test_a_hang_is_not_clean(monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout, output=b"..")

    monkeypatch.setattr(subprocess, "run", hang)
    outcome = sanitize.run_tool("racecheck", "split_k", "sm90")
    assert outcome["errors"] is None and outcome["tests"] == "no test ended" and not sanitize.is_clean(outcome)
