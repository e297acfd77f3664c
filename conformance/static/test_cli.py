"""The ``lowlat`` command: what it prints, exit codes (0 good, 1 not as it should be, 2 could not be carried out), bad input."""

from __future__ import annotations

import json
import shutil

import pytest

from conformance.fakes import PACKAGE, clean_settings, device_of, lowlat, no_gpu, public_world, run_python, small  # noqa: F401
from lowlat_cli import environment
from lowlat_cli.environment import Gpu
from lowlat_gemm import settings
from lowlat_gemm.arch import ARCHES, SM90, SM103
from lowlat_gemm.dispatch import explain
from lowlat_gemm.tables import available_tables

pytestmark = pytest.mark.usefixtures("clean_settings", "public_world")

# ---- doctor, plan, explain


def test_doctor(lowlat, no_gpu):
    code, out, err = lowlat("doctor")
    assert code == 1 and err == "" and "problem: torch sees no CUDA GPU" in out and "every GEMM falls back" in out
    code, out, err = lowlat("doctor", "--json")
    report = json.loads(out)
    assert code == 1 and err == "" and report["kernels_can_run"] is False
    assert {"lowlat_gemm", "gpus", "driver", "versions", "settings", "tables", "problems", "notes"} <= set(report)
    assert report["versions"]["torch"] and "torch sees no CUDA GPU" in report["problems"][0]
    assert [(t["family"], t["arch"]) for t in report["tables"]] == available_tables()
    assert all(t["error"] is None and t["cells"] >= t["built"] > 0 for t in report["tables"])


def test_doctor_settings_keep_their_type_in_json(lowlat, no_gpu, monkeypatch):
    monkeypatch.delenv("LOWLAT_GEMM_CACHE_DIR", raising=False)  # a runner may name one for its tests
    found = json.loads(lowlat("doctor", "--json")[1])["settings"]
    assert found["disabled"] is False and found["cache_dir"] is None, found


def test_doctor_is_content_with_a_gpu_that_can_run_kernels(lowlat, monkeypatch):
    monkeypatch.setattr("lowlat_cli.doctor.missing_packages", lambda: ())
    for changes, problem in (({}, None), ({"sm_count": 78}, "78 SMs"), ({"bandwidth_gbs": 3352.0}, "3352 GB/s")):
        monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(SM90, **changes), SM90)], None))
        code, out, _ = lowlat("doctor")
        assert (code, "kernels run here" in out) == ((0, True) if problem is None else (1, False)), out
        assert problem is None or problem in out
    monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(SM90, capability=(12, 0)), None)], None))
    code, out, _ = lowlat("doctor")
    assert code == 1 and "no GPU of a served generation" in out and "not served" in out


def test_doctor_says_what_flashinfer_serves_here(lowlat, monkeypatch):
    for version, arch, said in (
        (None, SM90, "flashinfer is not installed: sm90 needs flashinfer-python >= 0.7.0"),
        ("0.6.18", SM90, "flashinfer 0.6.18 is too old"),
        ("0.7.4", SM90, "0.7.4 serves tinygemm, cutile, cublaslt, cudnn"),
        ("0.7.4", SM103, "0.7.4 serves cute-dsl, tinygemm, cutile, cutlass, cublaslt, cudnn; kept from dispatch: no recorded run"),
    ):
        monkeypatch.setattr("lowlat_gemm.kernels.flashinfer.installed_version", lambda: version)
        monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(arch), arch)], None))
        report = json.loads(lowlat("doctor", "--json")[1])
        assert list(report["flashinfer"]) == [arch.name] and report["flashinfer"][arch.name].startswith(said)
        assert f"flashinfer on {arch}" in lowlat("doctor")[1]
    monkeypatch.setattr(environment, "find_gpus", lambda: ([], "none"))
    serves = json.loads(lowlat("doctor", "--json")[1])["flashinfer"]
    assert list(serves) == [arch.name for arch in ARCHES] and "cute-dsl" in serves["sm103"]


@pytest.mark.parametrize("variable, reason", [("LOWLAT_GEMM_BATCH_INVARIANT=1", "not batch-invariant"), ("LOWLAT_GEMM_DENY=skinny", "deny list")])
def test_doctor_says_when_not_one_cell_can_run(lowlat, monkeypatch, variable, reason):
    monkeypatch.setattr("lowlat_cli.doctor.missing_packages", lambda: ())
    monkeypatch.setattr(environment, "find_gpus", lambda: ([Gpu(0, device_of(SM90), SM90)], None))
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    settings.restore(None)  # the environment is read again
    try:
        code, out, _ = lowlat("doctor")
    finally:
        settings.restore(None)
    assert code == 1 and "no cell of the tables for sm90 can run" in out and reason in out, out


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_plan(lowlat, arch):
    code, out, err = lowlat("plan", "--arch", arch, "--tp", 8)
    assert code == 0 and err == "" and f"kimi_k3 tp 8 on {arch}" in out and "fused_a (not built)" in out
    code, out, _ = lowlat("plan", "--arch", arch, "--tp", 8, "--json")
    rows = json.loads(out)
    assert code == 0 and {"name", "n", "k", "cells"} <= set(rows[0])
    for row in rows:
        for cell in row["cells"]:
            same = explain(cell["num_tokens"], row["n"], row["k"], arch=arch, has_residual=cell["has_residual"])
            assert cell == json.loads(json.dumps(same.to_json()))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("1", "1536", "7168"), 0), (("7", "1536", "7168"), 1), (("1", "8", "8"), 1), (("0", "1536", "7168"), 1),
     (("1", "1536", "7168", "--residual"), 1), (("1", "1536", "7168", "--dtype", "float16"), 1)],
)  # fmt: skip
def test_explain(lowlat, monkeypatch, arguments, code):
    monkeypatch.setattr("lowlat_gemm.dispatch.missing_packages", lambda: ())
    found, out, err = lowlat("explain", *arguments, "--arch", "sm90")
    assert found == code and err == "" and ("falls back" in out) == (code == 1), out
    found, out, _ = lowlat("explain", *arguments, "--arch", "sm90", "--json")
    decision = json.loads(out)
    assert found == code and decision["runs"] == (code == 0) and (decision["reason"] is None) == (code == 0)
    assert [decision["num_tokens"], decision["n"], decision["k"]] == [int(a) for a in arguments[:3]]


# ---- bad input


BAD = {
    "unknown arch": (("plan", "--arch", "sm80"), "unknown arch 'sm80': known are sm90, sm100, sm103, sm107"),
    "unknown arch to explain": (("explain", 1, 8, 8, "--arch", "H200"), "unknown arch 'H200'"),
    "unknown arch to check": (("check", "--arch", "sm91"), "unknown arch 'sm91'"),
    "unknown model": (("plan", "--model", "llama"), "'llama'"),
    "unknown model to check": (("check", "--model", "llama", "--arch", "sm90"), "'llama'"),
    "a model without a table": (("plan", "--model", "glm_5_3_flash", "--arch", "sm90"), "no table for model family 'glm_5_3_flash' on sm90; there are: kimi_k3 sm90"),
    "tp 0": (("plan", "--tp", 0), "tp is 0"),
    "negative tp": (("plan", "--tp=-8",), "tp is -8"),
    "tp that does not divide": (("plan", "--tp", 7), "not divisible by tp 7"),
    "tp of check": (("check", "--tp", 8, "--tp", 7, "--arch", "sm90"), "not divisible by tp 7"),
    "no GPU": (("check", "--require-gpu"), "torch sees no CUDA GPU"),
    "record in a file": (("check", "--arch", "sm90", "--record", "{file}/record.json"), "{file}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(lowlat, small_unless_tp, no_gpu, tmp_path, name):
    (tmp_path / "file").touch()
    arguments, message = BAD[name]
    code, out, err = lowlat(*(str(a).format(file=tmp_path / "file") for a in arguments))
    lines = [line for line in err.splitlines() if not line.startswith("kimi_k3 tp")]  # not the progress
    assert code == 2 and out == "" and len(lines) == 1, (code, out, err)
    assert lines[0].startswith("lowlat: ") and message.format(file=tmp_path / "file") in lines[0]


@pytest.fixture
def small_unless_tp(request, monkeypatch):
    if "tp" not in request.node.callspec.params["name"] and "model" not in request.node.callspec.params["name"]:
        request.getfixturevalue("small")


@pytest.mark.parametrize("arguments", [("explain", "1", "2"), ("explain", "x", "1", "2"), ("frobnicate",), ("check", "--tp", "x"), ("plan", "--colour")], ids=" ".join)
def test_wrong_usage_is_exit_code_2(lowlat, arguments):
    code, out, err = lowlat(*arguments)
    assert code == 2 and out == "" and "Usage" in err and "Traceback" not in err


# ---- a fresh process, where something is absent or broken


def broken_package(folder, name: str, text: str | None):
    """A copy of the package in which a table is replaced, or absent."""
    copy = folder / "copy" / "lowlat_gemm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "tables" / name
    path.unlink() if text is None else path.write_text(text)
    return folder / "copy"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("format = = 1", ("plan", "--arch", "sm90"), "kimi_k3_sm90.toml: not valid TOML"),
        ("format = 1\n", ("check", "--arch", "sm90"), "kimi_k3_sm90.toml"),
        ("format = = 1", ("check",), "kimi_k3_sm90.toml: not valid TOML"),
        ("format = = 1", ("explain", 1, 1536, 7168, "--arch", "sm90"), "kimi_k3_sm90.toml: not valid TOML"),
        (None, ("plan", "--arch", "sm90"), "no table for model family 'kimi_k3' on sm90; there are: glm_5_3_flash sm90, kimi_k3 sm100"),
    ],
)
def test_a_broken_or_missing_table(tmp_path, text, arguments, message):
    copy = broken_package(tmp_path, "kimi_k3_sm90.toml", text)
    result = run_python("-m", "lowlat_cli", *arguments, folder=tmp_path, path=(copy,))
    assert (result.returncode, result.stdout) == (2, ""), result
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr, result.stderr


def test_doctor_goes_on_past_a_broken_table(tmp_path):
    copy = broken_package(tmp_path, "kimi_k3_sm103.toml", "format = = 1")  # sm107 inherits from it
    result = run_python("-m", "lowlat_cli", "doctor", "--json", folder=tmp_path, path=(copy,))
    report = json.loads(result.stdout)
    assert result.returncode == 1 and result.stderr == ""
    assert {t["arch"] for t in report["tables"] if t["error"]} == {"sm103", "sm107"}
    assert sum("not valid TOML" in problem for problem in report["problems"]) == 2


SMALL_CHECK = """\
import sys
from lowlat_cli import __main__ as cli, checking
checking.model_shapes = lambda model, tps: [checking.Shape(2304, 1536, ("q_b_proj tp8",))]
sys.argv = ["lowlat", "check", "--arch", "sm90", *sys.argv[1:]]
cli.main()
"""


def test_without_cutlass_routing_still_works_and_doctor_says_so(tmp_path):
    hide = ("cutlass", "tvm_ffi")
    result = run_python("-c", SMALL_CHECK, "--json", folder=tmp_path, hide=hide)
    assert result.returncode == 0 and json.loads(result.stdout)["counts"]["reference"] >= 2, result.stderr
    result = run_python("-m", "lowlat_cli", "doctor", folder=tmp_path, hide=hide)
    assert result.returncode == 1 and "not installed: nvidia-cutlass-dsl, apache-tvm-ffi" in result.stdout
    result = run_python("-m", "lowlat_cli", "explain", 1, 1536, 7168, "--arch", "sm90", folder=tmp_path, hide=hide)
    assert result.returncode == 1 and "backend unavailable: not installed: nvidia-cutlass-dsl" in result.stdout


def test_a_cutlass_that_cannot_be_imported_is_a_compile_error(tmp_path):
    (tmp_path / "stub" / "cutlass").mkdir(parents=True)
    (tmp_path / "stub" / "cutlass" / "__init__.py").write_text("raise RuntimeError('libs-base and libs-cu13 are mixed')")
    code = """\
import sys
sys.path.insert(0, sys.argv[1])
from lowlat_gemm import plan_for, parse_arch
from lowlat_gemm.execute import COMPILE_CACHE
from lowlat_gemm.kernels.compile_cache import CompileError
try:
    COMPILE_CACHE.get(plan_for(parse_arch("sm90"), 1536, 7168).units()[0])
except CompileError as error:
    print(error)
"""
    result = run_python("-c", code, tmp_path / "stub", folder=tmp_path)
    assert result.returncode == 0 and "libs-base and libs-cu13 are mixed" in result.stdout, result.stderr


def test_without_torch(tmp_path):
    def run(*arguments):
        return run_python(*arguments, folder=tmp_path, hide=("torch",))

    result = run("-c", SMALL_CHECK)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("kimi_k3 tp")]
    assert result.returncode == 2 and len(errors) == 1 and "torch" in errors[0], result.stderr
    result = run("-m", "lowlat_cli", "plan", "--arch", "sm90")
    assert result.returncode == 0 and "fused_a" in result.stdout, result.stderr
    result = run("-m", "lowlat_cli", "doctor", "--json")
    assert result.returncode == 1 and "torch cannot be imported" in json.loads(result.stdout)["problems"][0]


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_its_own_packages_the_command_says_which(tmp_path, module):
    result = run_python("-m", "lowlat_cli", "plan", folder=tmp_path, hide=(module,))
    assert result.returncode == 2 and result.stdout == "", result
    assert len(result.stderr.splitlines()) == 1 and f"{module} is not installed" in result.stderr


def test_doctor_says_where_compiled_kernels_are(lowlat, no_gpu, tmp_path, monkeypatch):
    (tmp_path / "a.o").write_text("")
    monkeypatch.setenv("LOWLAT_GEMM_CACHE_DIR", str(tmp_path))
    assert json.loads(lowlat("doctor", "--json")[1])["cache"] == f"{tmp_path} (1 compiled kernels)"
    monkeypatch.setenv("LOWLAT_GEMM_CACHE_DIR", str(tmp_path / "later"))
    assert json.loads(lowlat("doctor", "--json")[1])["cache"] == f"{tmp_path / 'later'} (made at the first compile)"
