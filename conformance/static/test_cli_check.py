"""``lowlat check``: on paper and on a pretended GPU, what it counts, when it fails, and the record of it."""

from __future__ import annotations

import json

import pytest
import torch

from conformance.fakes import clean_settings, cuda, device_of, lowlat, no_gpu, public_world, small  # noqa: F401
from lowlat_cli import checking, environment, record
from lowlat_cli.environment import Gpu
from lowlat_cli.record import Status
from lowlat_gemm.arch import ARCHES, SM90, SM100, SM103
from lowlat_gemm.dispatch import explain

pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")


def _ended(record: dict) -> dict[str, int]:
    return {status: count for status, count in record["counts"].items() if count}


def test_check_on_paper(lowlat, small, no_gpu, tmp_path):
    path = tmp_path / "made" / "record.json"
    code, out, err = lowlat("check", "--record", path)
    assert code == 0 and "no kernel ran: torch sees no CUDA GPU" in out and "0 failed" in out and str(path) in out
    assert "2304x1536" in err and "2304x1536" not in out  # progress is not output
    found = json.loads(path.read_text())
    assert {"schema", "command", "started", "seconds", "commit", "machine", "versions", "counts", "cells"} <= set(found)
    assert found["command"].startswith("lowlat check") and found["machine"]["gpu"] is None and set(found["counts"]) == {s.value for s in Status}
    assert sum(found["counts"].values()) == len(found["cells"])
    for cell in found["cells"]:
        decision = explain(cell["m"], cell["n"], cell["k"], arch=cell["arch"], has_residual=cell["residual"])
        expected = "fallback" if decision.backend is None else "reference" if decision.backend == "skinny" else "backend not built"
        assert cell["status"] == expected and cell["backend"] == decision.backend, (cell, str(decision))
        assert (cell["worst_ulps"] is not None) == (expected == "reference")
    assert {cell["arch"] for cell in found["cells"]} == {arch.name for arch in ARCHES}
    assert {cell["m"] for cell in found["cells"]} == set(range(1, 17))


def test_the_record_has_what_the_design_names(lowlat, small, no_gpu):
    cell = json.loads(lowlat("check", "--arch", "sm90", "--json")[1])["cells"][0]
    assert {"family", "n", "k", "m", "residual", "backend", "config", "status", "reason", "worst_ulps"} <= set(cell)


def test_check_as_json(lowlat, small, no_gpu):
    code, out, _ = lowlat("check", "--arch", "sm90", "--json")
    found = json.loads(out)
    assert code == 0 and _ended(found) == {"reference": 2, "backend not built": 6, "fallback": 8}


@pytest.mark.parametrize("value", [1e4, float("nan"), float("inf")])
def test_a_wrong_result_fails_the_check(lowlat, small, no_gpu, monkeypatch, tmp_path, value):
    real = torch.nn.functional.linear

    def linear(x, weight):
        y = real(x, weight)
        y[1, 77] = value  # the second token: M = 1 stays right
        return y

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    code, out, _ = lowlat("check", "--arch", "sm90", "--record", tmp_path / "r.json")
    assert code == 1 and "1 failed" in out and "FAILED sm90 M=2 N=2304 K=1536" in out and "[1, 77]" in out, out
    found = json.loads(path_text := (tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    failed = [cell for cell in found["cells"] if cell["status"] == "failed"]
    assert found["counts"]["failed"] == len(failed) == 1 and "[1, 77]" in failed[0]["reason"], path_text
    assert float(failed[0]["worst_ulps"]) > 100 or str(failed[0]["worst_ulps"]) in ("nan", "inf")


@pytest.fixture
def on_gpu(monkeypatch, small):
    """``check`` on a pretended H200 beside a GPU that is not served."""
    real = checking._Operands
    with cuda([device_of(SM90), device_of(SM90, name="old", capability=(8, 0))]) as fake, torch.no_grad():
        def operands(shape, tokens, device, seed):
            made = real(shape, tokens, "cpu", seed)
            for tensor in (made.x, made.weight, made.residual):
                fake.place(tensor, device)
            return made

        monkeypatch.setattr(checking, "_Operands", operands)
        monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(i, d, SM90 if d.capability == (9, 0) else None) for i, d in enumerate(fake.devices)], None))
        yield fake


def test_check_on_a_gpu_runs_every_cell_of_a_built_backend(lowlat, on_gpu):
    code, out, _ = lowlat("check", "--json", "--require-gpu")
    found = json.loads(out)
    assert code == 0 and _ended(found) == {"kernel": 2, "backend not built": 6, "fallback": 8}
    assert found["machine"]["gpu"]["name"] == "H200" and len(on_gpu.calls) == 2


def test_check_asks_the_gpu_that_it_runs_on(lowlat, on_gpu):
    on_gpu.devices.reverse()  # the served GPU is not the current one
    code, out, _ = lowlat("check", "--json")
    assert (code, json.loads(out)["counts"]["kernel"]) == (0, 2), out


def test_a_wrong_kernel_fails_the_check(lowlat, on_gpu):
    right = on_gpu.compiler

    def compiler(unit):
        kernel = right(unit)

        def wrong(x, weight, residual, out, stream):
            kernel(x, weight, residual, out, stream)
            out[0, 5] = float("nan")

        return wrong

    on_gpu.compiler = compiler
    code, out, _ = lowlat("check")
    assert code == 1 and "2 failed" in out and "[0, 5]: got nan" in out


def test_a_kernel_that_does_not_compile_fails_the_check(lowlat, on_gpu):
    on_gpu.compile_error = KeyError("sm_90a")
    code, out, _ = lowlat("check")
    assert code == 1 and "2 failed" in out and "explain said skinny, the call fell back: backend unavailable" in out


def test_require_gpu_fails_where_no_cell_ran_on_it(lowlat, on_gpu):
    on_gpu.devices[0] = device_of(SM90, sm_count=78)
    code, out, _ = lowlat("check", "--require-gpu")
    assert "device class not measured" in out and code == 1, out


def test_check_for_another_generation_than_the_gpu_is_on_paper(lowlat, on_gpu):
    code, out, _ = lowlat("check", "--arch", SM100)
    assert code == 0 and "no GPU of generation sm100 here: found H200" in out and on_gpu.calls == []
    assert lowlat("check", "--arch", SM100, "--require-gpu")[0] == 2


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    path.write_text("former")

    def broken(found):
        raise TypeError("not JSON")

    monkeypatch.setattr(record, "render", broken)
    with pytest.raises(TypeError):
        record.write_record({}, path)
    assert path.read_text() == "former" and list(tmp_path.iterdir()) == [path]


def test_check_on_a_gpu_without_the_kernel_packages_says_what_to_install(lowlat, on_gpu, monkeypatch):
    from lowlat_cli import __main__ as cli

    monkeypatch.setattr(cli, "missing_packages", lambda: ("nvidia-cutlass-dsl",))
    code, out, err = lowlat("check")
    assert code == 2 and err.splitlines() == ["lowlat: kernels cannot be compiled here: not installed: nvidia-cutlass-dsl"]


def test_a_record_path_that_cannot_be_written_is_said_before_the_run(lowlat, small, no_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "run_check", lambda *args: pytest.fail("it ran"))
    for path in (tmp_path, tmp_path / "file" / "r.json"):
        (tmp_path / "file").write_text("")
        code, _, err = lowlat("check", "--record", path)
        assert code == 2 and len(err.splitlines()) == 1 and str(path) in err, err


def test_under_bazel_run_paths_are_the_users(lowlat, small, no_gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users").mkdir()
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path / "users"))
    assert lowlat("check", "--arch", "sm90", "--record", "r.json")[0] == 0
    assert (tmp_path / "users" / "r.json").exists()


@pytest.mark.parametrize("arguments", [["check", "--record", "/somewhere/r.json", "--json"], ["check", "--json", "--record=/x"]])
def test_a_record_does_not_name_where_it_lies(arguments):
    assert record.command_line("lowlat", arguments) == "lowlat check --json"


@pytest.mark.parametrize("lost", [False, True], ids=["right", "residual lost"])
def test_residual_cells_are_run_with_their_residual(lowlat, on_gpu, monkeypatch, lost):
    monkeypatch.setattr(checking, "model_shapes", lambda model, tps: [checking.Shape(7168, 3584, ("routed_expert_up_proj",))])
    on_gpu.devices[:] = [device_of(SM103)]
    monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, on_gpu.devices[0], SM103)], None))
    right = on_gpu.compiler
    if lost:
        on_gpu.compiler = lambda unit: lambda x, w, residual, out, stream: right(unit)(x, w, None, out, stream)
    code, out, _ = lowlat("check", "--json")
    cells = [cell for cell in json.loads(out)["cells"] if cell["residual"] and cell["backend"]]
    assert [cell["m"] for cell in cells] == [1, 2, 3, 4]
    assert {cell["status"] for cell in cells} == {"failed" if lost else "kernel"} and code == int(lost)


def test_operands_are_fresh_and_a_run_can_be_repeated(lowlat, small, no_gpu):
    def run(*arguments):
        found = json.loads(lowlat("check", "--arch", "sm90", "--json", *arguments)[1])
        return found["seed"], [cell["worst_ulps"] for cell in found["cells"]]

    first, second = run(), run()
    assert first[0] != second[0] and first[1] != second[1]
    assert run("--seed", first[0]) == first


def test_a_shape_that_the_model_has_gets_its_projections_names():
    given = [checking.Shape(3072, 7168, ("3072x7168",)), checking.Shape(1000, 2048, ("1000x2048",))]
    named, other = checking.with_names(given, "kimi_k3")
    assert (named.n, named.k) == (3072, 7168) and all(name.endswith("tp4") for name in named.names), named
    assert other == given[1] and checking.with_names(given, "nobody_knows_it") == given
    (shared,) = checking.with_names([checking.Shape(4096, 2048, ())], "glm_5_3_flash")
    assert shared.names == ("dsa_o_proj tp8", "kda_o_proj tp4", "shared_down tp1")
