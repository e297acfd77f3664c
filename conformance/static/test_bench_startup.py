"""The start-up benchmark without a GPU: what a start makes ready, what each way has to show, the record, and a real
process that fails."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conformance.fakes import clean_settings, cuda, device_of  # noqa: F401
from lowlat_cli import report
from lowlat_cli.record import make_startup_record, render, write_record
from lowlat_gemm import settings
from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.dispatch import plan_for
from lowlat_gemm.kda_branches import overlap_units
from lowlat_gemm.kernels.archive import write_archive
from lowlat_gemm.kernels.store import origin
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.settings import Settings
from tools import bench_startup
from tools.bench_startup import ARCHIVE, NOTHING, WARM, Wrong
from tools.build_archive import units_of
from tools.startup_set import Ready

pytestmark = pytest.mark.usefixtures("clean_settings")


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_the_ready_set_is_everything_that_the_model_may_launch_and_the_archive_has_it(arch):
    wanted = set(overlap_units(arch))
    for shape in projection_shapes("kimi_k3", 8):
        plan = plan_for(arch, shape.n, shape.k, ("kimi_k3",))
        wanted |= set() if plan is None else set(plan.units())
    units = Ready(arch, "kimi_k3", 8).units
    assert set(units) == wanted and len(units) == len(wanted) and wanted <= set(units_of(arch))


def test_every_kernel_is_launched_once(monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: torch.empty(*shape, dtype=dtype))
    monkeypatch.setattr("tools.startup_set.projection_shapes", lambda model, tp: projection_shapes("kimi_k3", 8)[5:6])
    with torch.no_grad(), cuda([device_of(SM90)]) as fake:
        fake.compiler = lambda unit: lambda x, weight, residual, y, stream: fake.calls.append((unit, residual is not None))
        ready = Ready(SM90, "kimi_k3", 16)
        assert ready.launch_each() == len(ready.units) > 3
    assert [unit for unit, _ in fake.calls] == ready.units
    assert all(added == unit.spec.residual for unit, added in fake.calls)


def found(way, units=5, before=0, after=5, compiles=0, loads=5, late=0, total=1.0, **seconds):
    return {
        "way": way, "units": units, "objects_before": before, "objects_after": after, "compiles": compiles, "loads": loads,
        "late": late, "launched": None, "warnings": "", "total": total, "seconds": seconds or {"kernels": total / 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    "start",
    [found(NOTHING), found(NOTHING, compiles=5, loads=0), found(ARCHIVE), found(WARM, before=5)],
)
def test_a_start_that_does_what_its_way_says(start):
    bench_startup.check(start)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (found(NOTHING, before=5), "nothing: the folder went from 5 objects to 5, of 5"),
        (found(NOTHING, after=4), "nothing: the folder went from 0 objects to 4"),
        (found(NOTHING, loads=4), "nothing: 0 kernels compiled and 4 loaded of 5"),
        (found(ARCHIVE, compiles=1, loads=4), "archive: 1 of 5 kernels were compiled; the start said: nothing"),
        (found(WARM, before=5, compiles=1, loads=4), "warm: 1 of 5 kernels were compiled"),
        (found(WARM), "warm: the folder went from 0 objects to 5"),
        (found(ARCHIVE, late=2), "archive: 2 launches came before their kernel was made"),
    ],
)
def test_a_start_that_does_not_is_no_figure(start, message):
    with pytest.raises(Wrong, match=message):
        bench_startup.check(start)


def test_starts_take_turns_in_folders_of_their_own(monkeypatch, tmp_path):
    seen, archive = [], tmp_path / "made.zip"
    archive.write_bytes(b"archive")

    def run_start(way, arch, folder):
        files = sorted(path.name for path in folder.iterdir())
        (folder / "kernel.o").touch()
        seen.append((way, arch, files))
        return found(way, before=5 if way == WARM else 0)

    monkeypatch.setattr(bench_startup, "run_start", run_start)
    said = []
    starts = bench_startup.run("sm90", archive, 2, said.append)
    turn = [(NOTHING, "sm90", []), (ARCHIVE, "sm90", ["sm90_aot.zip"]), (WARM, "sm90", ["kernel.o"])]
    assert seen == turn * 2 and said == starts and len(starts) == 6


def test_medians_by_way_and_the_record(tmp_path):
    starts = [found(way, total=total, kernels=total / 2) for total in (9.0, 1.0, 2.0) for way in bench_startup.WAYS]
    cells = bench_startup.summary(starts)
    assert [cell["way"] for cell in cells] == list(bench_startup.WAYS)
    assert cells[0]["total"] == 2.0 and cells[0]["totals"] == [1.0, 2.0, 9.0] and cells[0]["seconds"] == {"kernels": 1.0}
    started = datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc)
    record = make_startup_record("python -m tools.bench_startup", {"arch": "sm90", "cores": 2}, cells, None, started, 1.0)
    assert json.loads(render(record))["kind"] == "startup" and json.loads(render(record))["cells"] == cells
    write_record(record, tmp_path / "startup.json")
    assert report.summarise(tmp_path / "startup.json").notes[0] == "nothing: 2.00 s for 5 kernels (kernels 1.00)"
    assert bench_startup.line(starts[0]).startswith("nothing     9.00 s (kernels 4.50)")


def test_a_start_in_this_process(monkeypatch, tmp_path, capsys):
    """The child's part, with a compiler that is pretended: phases, counts, and a kernel that does not compile."""
    settings.restore(Settings(cache_dir=str(tmp_path)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with cuda([device_of(SM90)]) as fake:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        made = bench_startup.start("sm90")
        assert made["units"] == made["compiles"] == len(Ready(SM90, "kimi_k3", 8).units) and made["loads"] == made["late"] == 0
        assert list(made["seconds"]) == ["import", "plans", "kernels"] and made["launched"] is None
        fake.cache.clear()
        fake.compile_error = RuntimeError("no")
        with pytest.raises(Wrong, match="did not compile"):
            bench_startup.start("sm90")


def test_a_process_that_fails_is_said(tmp_path):
    with pytest.raises(Wrong, match="(?s)nothing: a start ended with 1: .*unknown arch 'sm80'"):
        bench_startup.run_start(NOTHING, "sm80", tmp_path)


def test_the_users_switches_are_not_in_a_start(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWLAT_GEMM_DISABLE", "1")
    seen = {}

    def run(command, **options):
        seen.update(options["env"])
        return subprocess.CompletedProcess(command, 0, json.dumps(found(NOTHING)), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert bench_startup.run_start(NOTHING, "sm90", tmp_path)["way"] == NOTHING
    assert {name: value for name, value in seen.items() if name.startswith("LOWLAT_GEMM_")} == {"LOWLAT_GEMM_CACHE_DIR": str(tmp_path)}


def command(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_startup", *map(str, arguments)])
    return bench_startup.main()


def test_what_cannot_be_run_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    assert command(monkeypatch, "--arch", "sm80") == 2 and "unknown arch 'sm80'" in capsys.readouterr().err
    assert command(monkeypatch, "--arch", "sm90", "--rounds", 0) == 2 and "--rounds 0" in capsys.readouterr().err
    other = tmp_path / "other.zip"
    write_archive(other, origin() | {"sources": "others"}, {})
    assert command(monkeypatch, "--arch", "sm90", "--archive", other) == 2 and "is no archive of these sources" in capsys.readouterr().err
    monkeypatch.setattr(bench_startup, "archive_beside_the_kernels", lambda: [Path("kernels/sm90_aot.zip")])
    assert command(monkeypatch, "--arch", "sm90") == 2 and "lies beside the kernels" in capsys.readouterr().err
    monkeypatch.setattr("lowlat_cli.environment.find_gpus", lambda: ([], "torch sees no CUDA GPU"))
    assert command(monkeypatch) == 2 and "torch sees no CUDA GPU; name one with --arch" in capsys.readouterr().err


def test_a_wrong_start_is_exit_code_1_and_leaves_no_record(monkeypatch, capsys, tmp_path):
    whole = tmp_path / "sm90_aot.zip"
    write_archive(whole, origin(), {"key": (b"object", "what")})
    assert bench_startup.archived_kernels(whole) == 1
    monkeypatch.setattr(bench_startup, "run_start", lambda way, arch, folder: found(way, late=1))
    record = tmp_path / "record.json"
    assert command(monkeypatch, "--arch", "sm90", "--archive", whole, "--record", record) == 1
    assert "launches came before" in capsys.readouterr().err and not record.exists()
