"""Parent and child of a tuning run: planted slow, wrong, hanging and dying candidates, each through a real process."""

from __future__ import annotations

import json
import os
import sys

import pytest

from conformance.fake_tune_child import BASELINE_US, FLOOR_US, fake_us
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.jobs import BACK_TO_BACK, LINKED, Job
from lowlat_cli.tuning.supervise import Supervisor, TuneError
from lowlat_gemm.kernels.split_k import SplitKConfig

ONE, TWO, THREE = (Candidate("split_k", SplitKConfig(16, 8, 1, stages)) for stages in (4, 5, 6))
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def job(*candidates: Candidate, **changes) -> Job:
    fields = dict(stage="final", n=24, k=64, m=3, residual=False, turn=1, max_tokens=4, replays=2)
    return Job(**fields | {"chains": (BACK_TO_BACK, LINKED), "candidates": candidates} | changes)


def supervisor(plan: dict[Candidate, str], **options) -> Supervisor:
    text = json.dumps({str(candidate): does for candidate, does in plan.items()})
    command = [sys.executable, "-m", "conformance.fake_tune_child", text]
    return Supervisor(command, environment=ENVIRONMENT, **{"event_limit_s": 2.0} | options)


@pytest.mark.parametrize("residual", [False, True])
def test_right_candidates_are_timed(residual):
    with supervisor({}) as child:
        result = child.run(job(ONE, TWO, residual=residual))
    for one in (ONE, TWO):
        want = {chain: pytest.approx(fake_us(one, chain), abs=1e-4) for chain in (BACK_TO_BACK, LINKED)}
        assert result.times[one] == want, one
    assert (result.floor_us, result.baseline_us) == (FLOOR_US, BASELINE_US)
    assert set(result.others) - {"floor"} == ({"addmm", "mm + add"} if residual else {"mm"})
    assert not child.excluded and child.restarts == 0


REASONS = {
    "wrong": ("wrong: 1 of 72 elements outside the bound", 0),
    "racy": ("wrong: other bits in a chain", 0),
    "hang": ("hung: nothing for 2 s", 1),
    "hang in turn": ("hung: nothing for 2 s", 2),
    "die": ("crashed: the process ended with -6", 1),
    "raise": ("crashed: RuntimeError: CUDA error: an illegal memory access", 1),
}


@pytest.mark.parametrize("does", REASONS)
def test_a_bad_candidate_is_excluded_with_its_reason_and_the_others_are_timed(does):
    told = []
    with supervisor({TWO: does}, on_excluded=lambda one, reason, at: told.append((one, reason))) as child:
        result = child.run(job(ONE, TWO, THREE))
        again = child.run(job(ONE, TWO, THREE, m=1))
    reason, restarts = REASONS[does]
    assert list(child.excluded) == [TWO] and child.excluded[TWO].startswith(reason), child.excluded
    assert told == list(child.excluded.items())
    assert set(result.times) == set(again.times) == {ONE, THREE}, f"{does}: timed {[*map(str, result.times)]}"
    assert child.restarts == restarts


def test_a_slow_candidate_is_right_and_never_the_best():
    with supervisor({TWO: "slow"}) as child:
        result = child.run(job(ONE, TWO))
    assert result.times[TWO][BACK_TO_BACK] == 99 > result.times[ONE][BACK_TO_BACK] and not child.excluded


def test_two_bad_candidates_in_one_group():
    with supervisor({ONE: "die", THREE: "hang"}) as child:
        result = child.run(job(ONE, TWO, THREE))
    assert set(result.times) == {TWO} and set(child.excluded) == {ONE, THREE}


def test_a_child_that_fails_without_a_candidate_is_an_error():
    with supervisor({}) as child, pytest.raises(TuneError, match="ended with"):
        child._command = [sys.executable, "-c", "raise SystemExit(3)"]
        child.run(job())


def test_a_job_is_the_same_after_json():
    one = job(ONE, TWO)
    assert Job.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.identity != job(TWO, ONE).identity and one.identity == job(ONE, TWO).identity
