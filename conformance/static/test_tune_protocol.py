"""Parent and child of a tuning run: planted slow, wrong, hanging and dying candidates, each through a real process."""

from __future__ import annotations

import json
import os
import sys

import pytest

from conformance.fake_tune_child import BASELINE_US, FLOOR_US, fake_us
from conformance.fakes import device_of, execute
from lowlat_cli import measure
from lowlat_cli.environment import Gpu
from lowlat_cli.tuning import worker
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.jobs import BACK_TO_BACK, LINKED, Job
from lowlat_cli.tuning.supervise import Supervisor, TuneError
from lowlat_gemm.arch import SM90
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


#: What a candidate does -> how its reason begins, by the token ring's depth that names it.
REASONS = {
    "wrong": "wrong: 1 of 72 elements outside the bound",
    "racy": "wrong: other bits in a chain",
    "hang": "hung: nothing for 2 s",
    "hang in turn": "hung: nothing for 2 s",
    "die": "crashed: the process ended with -6",
    "raise": "crashed: RuntimeError: CUDA error: an illegal memory access",
}


def test_right_candidates_are_timed_and_a_slow_one_is_one_of_them():
    with supervisor({TWO: "slow"}) as child:
        for residual, baselines in ((False, {"mm"}), (True, {"addmm", "mm + add"})):
            result = child.run(job(ONE, TWO, residual=residual))
            want = {chain: pytest.approx(fake_us(ONE, chain), abs=1e-4) for chain in (BACK_TO_BACK, LINKED)}
            assert result.times == {ONE: want, TWO: {BACK_TO_BACK: 99, LINKED: 99}}
            assert (result.floor_us, result.baseline_us) == (FLOOR_US, BASELINE_US)
            assert set(result.others) - {"floor"} == baselines
    assert not child.excluded and child.restarts == 0


def test_bad_candidates_are_excluded_with_their_reasons_and_the_others_are_timed():
    """All kinds in one group, so that the group is taken up again after each."""
    bad = {Candidate("split_k", SplitKConfig(24, 8, 1, 3 + index)): does for index, does in enumerate(REASONS)}
    told = []
    with supervisor(bad, on_excluded=lambda one, reason, at: told.append((one, reason))) as child:
        result = child.run(job(ONE, *bad, TWO))
        again = child.run(job(ONE, *bad, m=1))
    for one, does in bad.items():
        assert child.excluded.get(one, "").startswith(REASONS[does]), f"{does}: {child.excluded.get(one)}"
    assert set(child.excluded) == set(bad) and told == list(child.excluded.items())
    assert set(result.times) == {ONE, TWO} and set(again.times) == {ONE}
    assert child.restarts == 5  # the one that hangs in turn is looked for among all: once more


def test_a_child_that_fails_without_a_candidate_is_an_error():
    with supervisor({}) as child, pytest.raises(TuneError, match="ended with"):
        child._command = [sys.executable, "-c", "raise SystemExit(3)"]
        child.run(job())


def test_a_job_is_the_same_after_json():
    one = job(ONE, TWO)
    assert Job.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.identity != job(TWO, ONE).identity and one.identity == job(ONE, TWO).identity


def test_the_gpus_bench_keeps_one_shape_and_launches_what_was_compiled(monkeypatch):
    """The wiring to ``measure`` and ``execute``, without a GPU."""
    made, launched = [], []
    gpu = Gpu(0, device_of(SM90), SM90)
    monkeypatch.setattr(worker.torch.cuda, "set_device", lambda ordinal: None)
    monkeypatch.setattr(worker, "find_gpus", lambda: ([gpu], None))
    monkeypatch.setattr(measure, "ShapeCopies", lambda shape, gpu, tokens: made.append((shape.n, shape.k, tokens)) or object())
    monkeypatch.setattr(execute, "COMPILE_CACHE", type("C", (), {"get": staticmethod(lambda unit: unit)}))
    monkeypatch.setattr(execute, "launch", lambda *operands: launched.append(operands))
    bench = worker.GpuBench(0)
    first = bench.copies(24, 64, 8)
    assert bench.copies(24, 64, 8) is first and bench.copies(24, 128, 8) is not first and made == [(24, 64, 8), (24, 128, 8)]
    bench.kernel(ONE, 24, 64, 3, True)("x", "w", "r", "y")
    assert launched == [(ONE.unit(SM90, 24, 64, 3, True), "x", "w", "r", "y")] and launched[0][0].spec.residual


def test_linked_chains_where_the_link_can_stand():
    assert worker.chains_for(1536, 7168) == (BACK_TO_BACK, LINKED) == worker.chains_for(8, 16384)
    assert worker.chains_for(1537, 7168) == worker.chains_for(1536, 16392) == (BACK_TO_BACK,)
