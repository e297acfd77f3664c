"""A whole tuning run through the command line, with a real child that computes on the CPU: what is found is what is in
the table; a run that was cut anywhere goes on from its journal; nothing that is asked for is left out in silence."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace

import pytest

from conformance.fake_tune_child import BASELINE_US, FLOOR_US, fake_us
from conformance.fakes import clean_settings, device_of, lowlat  # noqa: F401
from lowlat_cli import environment
from lowlat_cli.environment import Gpu
from lowlat_cli.tuning import command
from lowlat_cli.tuning import run as run_module
from lowlat_cli.tuning.candidates import Candidate
from lowlat_cli.tuning.choose import AS_FAST, ONE_CONFIG_COST, ONE_SPLIT_COST
from lowlat_cli.tuning.jobs import BACK_TO_BACK
from lowlat_gemm import settings
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.split_k import SplitKConfig, token_columns
from lowlat_gemm.kernels.store import ObjectStore
from lowlat_gemm.tables import load_table_file

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """An H200 for the parent, the CPU child for it to start; gives what tells the child what candidates do."""
    plan: dict[str, str] = {}
    monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(SM90), SM90)], None))
    monkeypatch.setattr("lowlat_cli.__main__.missing_packages", lambda: ())
    child = lambda gpu: [sys.executable, "-m", "conformance.fake_tune_child", json.dumps(plan)]  # noqa: E731
    monkeypatch.setattr(command, "child_command", child)
    monkeypatch.setattr(command, "store_in", lambda folder: None)
    monkeypatch.setattr(command.environment, "driver_version", lambda: "1.2.3")
    monkeypatch.setattr(command.Supervisor.__init__, "__kwdefaults__", command.Supervisor.__init__.__kwdefaults__ | {"event_limit_s": 2.0})
    return plan


SHAPE = ("--shape", "48x256", "--family", "toy", "--label", "toy_proj", "--most", "3", "--tokens", "1,4,16,24")


def run(lowlat, tmp_path, *more):
    table, record = tmp_path / "toy_sm90.toml", tmp_path / "record.json"
    code, out, err = lowlat("tune", *SHAPE, "--table", str(table), "--record", str(record), *more)
    return code, out + err, table, record


@pytest.mark.parametrize("kept", [False, True])
def test_only_a_store_that_the_child_finds_is_filled_for_it(lowlat, fake_gpu, tmp_path, monkeypatch, kept):
    filled = []
    monkeypatch.setattr(command, "store_in", lambda folder: ObjectStore(tmp_path, kept=kept))
    monkeypatch.setattr(command, "fill_store", lambda units, store, told: filled.append(store))
    code, text, *_ = run(lowlat, tmp_path, "--tokens", "1")
    assert code == 0 and bool(filled) == kept, text


def test_the_table_holds_what_was_found(lowlat, fake_gpu, tmp_path):
    code, text, path, record = run(lowlat, tmp_path, "--residual", "48x256")
    assert code == 0, text
    table, found = load_table_file(path), json.loads(record.read_text())
    row = table.projections[48, 256]
    assert row.label == "toy_proj" and (table.family, table.device.sm_count) == ("toy", 132)
    assert set(row.cells) == {*range(1, 5), *range(9, 25)}, sorted(row.cells)
    assert set(row.residual_cells) <= set(row.cells) and row.residual_cells
    costs = {False: [], True: []}
    for cell in found["cells"]:
        m, finalists = cell["m"], cell["finalists"]
        assert cell["baseline_us"] == BASELINE_US and cell["floor_us"] == FLOOR_US
        assert all(len(one["us"]) == 2 and len(one["linked_us"]) == 1 for one in finalists), f"M = {m}"
        cells = row.residual_cells if cell["residual"] else row.cells
        winner = Candidate.from_json(cell["winner"] | {"config": dict(cell["winner"]["config"])})
        assert (cells[m].backend, dict(cells[m].config)) == (winner.backend, winner.mapping()), f"M = {m}"
        assert cells[m].provenance.kind == "measured" and cells[m].provenance.baseline_us == BASELINE_US
        assert cells[m].provenance.time_us == pytest.approx(fake_us(winner, BACK_TO_BACK), abs=1e-3)
        costs[cell["residual"]].append(cell["us"] / min(one["us"][0] for one in finalists))
    for ratios in costs.values():  # what one split, one config a class and the linked chain may cost
        assert 1 <= statistics.geometric_mean(ratios) <= ONE_SPLIT_COST * ONE_CONFIG_COST * AS_FAST, ratios
    assert {m for m, cell in row.cells.items() if cell.provenance.kind == "interpolated"} == set(row.cells) - {c["m"] for c in found["cells"]}
    assert found["model"]["split_k"]["classes"] == 3 and "--table" not in found["command"], found["command"]
    assert "geometric mean" in text and "0 more" not in text


def test_what_a_table_names_competes_again(lowlat, fake_gpu, tmp_path, monkeypatch):
    """In its class, at the width of each M, and whatever the model thinks of it."""
    named = Candidate("split_k", SplitKConfig(8, 24, 2, 2, trigger=1))
    make = command.make_request
    monkeypatch.setattr(command, "make_request", lambda *given: replace(make(*given), known={(48, 256): (named,)}))
    code, text, _, record = run(lowlat, tmp_path)
    assert code == 0, text
    finalists = {c["m"]: [Candidate.from_json(one) for one in c["finalists"]] for c in json.loads(record.read_text())["cells"]}
    assert {m for m, found in finalists.items() if named in found} == {17, 24}, finalists


def screened(count: int) -> list[str]:
    """The first candidates that a run of SHAPE looks at."""
    shape = run_module.Shape(48, 256, ("48x256",))
    request = run_module.Request((shape,), (1, 4, 9, 16, 17, 24), token_columns(SM90), 3)
    tuner = run_module.Tuner(request, SM90, device_of(SM90), command.Supervisor([]), command.Journal(None, {}), None)
    return [str(one) for one in next(iter(tuner._screens(shape))).candidates[:count]]


def test_a_slow_a_wrong_and_a_hanging_candidate_are_left_out(lowlat, fake_gpu, tmp_path):
    """The last two named, with the reason; the slow one, which is right, goes no further than its screening."""
    slow, wrong, hangs = screened(3)
    fake_gpu.update({slow: "slow", wrong: "wrong", hangs: "hang"})
    code, said, _, record = run(lowlat, tmp_path)
    found = json.loads(record.read_text())
    reasons = {str(Candidate.from_json(one)): one["reason"] for one in found["excluded"]}
    assert code == 1 and reasons.keys() == {wrong, hangs}
    assert reasons[wrong].startswith("wrong: ") and reasons[hangs] == "hung: nothing for 2 s"
    assert all(f"excluded {name}: {reason}" in said for name, reason in reasons.items())
    went_on = {str(Candidate.from_json(one)) for cell in found["cells"] if cell["m"] <= 4 for one in cell["finalists"]}
    assert went_on and not went_on & {slow, wrong, hangs}, went_on


def test_a_cut_run_goes_on_from_its_journal(lowlat, fake_gpu, tmp_path, monkeypatch):
    fake_gpu.update(zip(screened(2), ("wrong", "die")))
    journal = tmp_path / "journal.jsonl"
    code, said, table, record = run(lowlat, tmp_path, "--journal", str(journal))
    for name, reason in zip(fake_gpu, ("wrong: ", "crashed: ")):
        assert f"excluded {name}: {reason}" in said
    used = {str(Candidate.from_json(cell["winner"])) for cell in json.loads(record.read_text())["cells"]}
    assert code == 1 and used and not used & set(fake_gpu), used
    whole, text = journal.read_text(), table.read_text()
    first = json.loads(record.read_text())
    assert (first["journal_jobs"], first["journal_candidates"]) == (0, 0) and "from the journal" not in said
    jobs = sum('"job"' in line for line in whole.splitlines())
    for cut in (len(whole), len(whole) // 2, len(whole) // 4):
        table.unlink()
        journal.write_text(whole[:cut])
        left = sum('"job"' in line for line in whole[:cut].splitlines()[: whole[:cut].count("\n")])
        measured = []
        supervised = command.Supervisor.run
        with monkeypatch.context() as patch:
            patch.setattr(command.Supervisor, "run", lambda self, job: measured.append(job) or supervised(self, job))
            code, said, _, _ = run(lowlat, tmp_path, "--journal", str(journal))
        assert code == 1 and len(measured) == jobs - left, f"cut at {cut} of {len(whole)}: {len(measured)} jobs, expected {jobs - left}"
        assert table.read_text() == text, f"cut at {cut}"
        found = json.loads(record.read_text())
        assert found["cells"] == first["cells"] and "wrong" in said
        assert (found["journal_jobs"], found["measured_jobs"]) == (left, jobs - left), f"cut at {cut}"
        assert found["journal_candidates"] + found["measured_candidates"] == first["measured_candidates"] > 0
        assert f"from the journal: {found['journal_candidates']} candidates in {left} jobs" in said


def test_time_that_runs_out_is_said(lowlat, fake_gpu, tmp_path):
    code, text, path, record = run(lowlat, tmp_path, "--minutes", "0")
    assert code == 1 and "not reached: 48x256" in text and not path.exists()
    assert json.loads(record.read_text())["not_reached"] == [[48, 256]]


def test_what_cannot_be_carried_out(lowlat, fake_gpu, tmp_path, monkeypatch):
    for options, said in [
        (("--residual", "8x8"), "not among the shapes"),
        (("--tokens", "65"), "a table has 1 to 64"),
        (("--journal", str(tmp_path)), "--journal"),
        (("--family", "kimi_k3", "--table", str(tmp_path / "no" / "such" / "x.toml"), "--shape", "1x1"), "expected NxK"),
    ]:
        code, text, _, _ = run(lowlat, tmp_path, *options)
        assert code == 2 and said in text and text.count("\n") == 1, text
    monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(SM90, sm_count=78), SM90)], None))
    code, _, err = lowlat("tune", "--shape", "48x256", "--tokens", "1")
    assert code == 2 and "78 SMs" in err, err


def test_a_users_own_folder_gets_the_table_and_starts_from_the_packages(lowlat, fake_gpu, tmp_path):
    settings.change(tables=str(tmp_path))
    code, out, err = lowlat("tune", "--shape", "48x256", "--most", "1", "--tokens", "2")
    assert code == 0, out + err
    table = load_table_file(tmp_path / "kimi_k3_sm90.toml")
    assert set(table.projections[48, 256].cells) == {2}
    assert (1536, 7168) in table.projections, "rows of the package's table are not there"
