"""The set-up: locks, the environment's making, what bazelw says when it cannot go on, and CI's count."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowlat_gemm.arch import ARCHES

ROOT = Path.cwd()  # pytest's root, with and without Bazel


def load(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_env = load("tools/bazel/make_env.py")
count_tests = load(".ci/count_tests.py")


def test_no_setting_names_a_repository_variable_without_its_value():
    """Bazel 4.2.3 crashes on `--repo_env=NAME` where its server was started without NAME."""
    settings = [line for line in (ROOT / ".bazelrc").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in settings if re.search(r"--repo_env=\w+(\s|$)", line)] == []


# --- one list of GPU generations


def test_the_probe_and_the_platforms_know_every_generation():
    names = {arch.name for arch in ARCHES}
    probe = dict(re.findall(r'"([\d.]+)": "(sm\d+)"', (ROOT / "tools/bazel/gpu.bzl").read_text()))
    assert probe == {f"{arch.capability[0]}.{arch.capability[1]}": arch.name for arch in ARCHES}
    assert set(re.findall(r'"(sm\d+)"', (ROOT / "hw_matrix/platforms/BUILD.bazel").read_text())) == names
    settings = (ROOT / ".bazelrc").read_text()
    for name in names:
        assert f"build:runner-{name} --platforms=//hw_matrix/platforms:runner_{name}\n" in settings
        assert f"test:runner-{name} --config=runner --test_env=LOWLAT_RUNNER_ARCH={name}\n" in settings
        platform = f"@lowlat_remote//:{name}"
        assert f"build:rbe-{name} --config=rbe --platforms={platform} --host_platform={platform}\n" in settings
        assert f"build:rbe-{name} --extra_execution_platforms={platform}\n" in settings
        assert f"test:rbe-{name} --config=runner --test_env=LOWLAT_RUNNER_ARCH={name}\n" in settings


# --- locks


@pytest.mark.parametrize("name", ["base", "cuda", "flashinfer", "serving", "serving_cuda", "torch_cpu"])
def test_every_package_of_a_lock_is_pinned_and_hashed(name):
    text = (ROOT / f"requirements/{name}.lock").read_text()
    entries = [entry for entry in re.split(r"(?m)^(?=\S)", text) if entry and entry[0] != "#"]
    assert entries and "://" not in text
    for entry in entries:
        assert re.match(r"[\w.-]+==[^\s;]+ ", entry) and re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry
    assert len(make_env.names_in(ROOT / f"requirements/{name}.lock")) == len(entries)


@pytest.mark.parametrize(
    ("lock", "source"), [("base", "base"), ("flashinfer", "flashinfer"), ("serving", "serving"), ("serving", "serving_alone")]
)
def test_the_locks_hold_what_was_asked_for(lock, source):
    pins = dict(pin.split("==") for pin in make_env.names_in(ROOT / f"requirements/{lock}.lock"))
    for line in (ROOT / f"requirements/{source}.in").read_text().splitlines():
        if wanted := re.match(r"([\w-]+)(?:\[\w+\])?(?:==(\S+))?", line):
            assert pins[wanted[1]] == (wanted[2] or pins[wanted[1]])


# --- making the environment


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n    numpy==2.4.6 from file:///x/numpy.whl#sha256=1 (from -r l (line 3)):\n"
            "        Expected sha256 aa11\n        Expected     or bb22\n             Got        cc33\n",
            "wrong hash for numpy==2.4.6: the index gave sha256 cc33",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==9 (from versions: none)\n"
            "ERROR: No matching distribution found for torch==9\n",
            "no index that pip can reach has a wheel of torch==9",
        ),
        ("Collecting a\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "No space left"),
        ("Collecting a\nERROR: something new\n", "something new"),
        ("", "pip said nothing"),
    ],
)
def test_a_failed_install_is_one_line(output, message):
    line = make_env.why(output.splitlines())
    assert message in line and "\n" not in line


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """make_env with locks and a cache folder of its own."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    monkeypatch.setattr(make_env, "REQUIREMENTS", tmp_path / "requirements")
    monkeypatch.setattr(sys, "argv", ["make_env.py", "--into", str(tmp_path)])
    monkeypatch.setenv("LOWLAT_BAZEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOWLAT_WITH_FLASHINFER", raising=False)
    return tmp_path


def test_it_is_made_once_and_again_for_another_lock(sandbox, monkeypatch):
    made = []

    def build(env, locks, main, cuda, alone):
        made.append(env)
        env.mkdir(exist_ok=True)
        (env / "versions.txt").write_text("made\n")

    monkeypatch.setattr(make_env, "build", build)
    make_env.main()
    make_env.main()
    assert len(made) == 1 and (sandbox / "python.txt").read_text() == f"{made[0]}/bin/python3\n"
    (made[0] / "versions.txt").unlink()  # as a killed run leaves it
    make_env.main()
    assert made[1] == made[0]
    with open(sandbox / "requirements/base.lock", "a") as lock:
        lock.write("# edited\n")
    make_env.main()
    monkeypatch.setenv("LOWLAT_WITH_FLASHINFER", "1")
    make_env.main()
    assert len(set(made)) == 3


def test_each_environment_is_made_of_its_own_locks(sandbox, monkeypatch):
    made = {}

    def build(env, locks, main, cuda, alone):
        made[env.name.split("-")[0]] = (list(locks), main, cuda, alone and alone.name)
        env.mkdir()
        (env / "versions.txt").write_text("made\n")

    monkeypatch.setattr(make_env, "build", build)
    monkeypatch.setenv("LOWLAT_WITH_FLASHINFER", "1")
    make_env.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--environment", "serving"])
    make_env.main()
    assert made == {
        "env": (["base", "torch_cpu", "cuda", "flashinfer"], "base", "cuda", None),
        "serving": (["serving", "torch_cpu", "serving_cuda"], "serving", "serving_cuda", "serving_alone.in"),
    }
    assert "/serving-" in (sandbox / "python.txt").read_text()


def test_packages_that_come_alone_may_lack_what_they_ask_for(monkeypatch):
    monkeypatch.setattr(make_env, "ask", lambda python, code: "vllm ray >=2\ntorch triton ==3\n")
    assert make_env.unmet(Path("python"), None) == ["vllm ray >=2", "torch triton ==3"]
    assert make_env.unmet(Path("python"), ROOT / "requirements/serving_alone.in") == ["torch triton ==3"]


def test_the_workspace_names_every_file_that_an_environment_is_made_of():
    text = (ROOT / "WORKSPACE").read_text()
    for lock, cuda, alone in make_env.ENVIRONMENTS.values():
        for name in filter(None, (f"{lock}.lock", f"{cuda}.lock", alone)):
            assert f'"//requirements:{name}"' in text, name


def test_a_failed_one_leaves_nothing_that_looks_made(sandbox, monkeypatch):
    def build(env, *kind):
        env.mkdir()
        raise make_env.Failed("no")

    monkeypatch.setattr(make_env, "build", build)
    with pytest.raises(make_env.Failed, match="^no$"):
        make_env.main()
    assert not list((sandbox / "cache").glob("env-*/"))


def test_a_cache_folder_that_cannot_be_is_one_line(sandbox, monkeypatch):
    (sandbox / "file").write_text("")
    monkeypatch.setenv("LOWLAT_BAZEL_CACHE", str(sandbox / "file" / "cache"))
    with pytest.raises(make_env.Failed, match="cannot write to the cache folder .* set LOWLAT_BAZEL_CACHE"):
        make_env.main()


# --- bazelw


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["test", "//..."], {}, "missing here: bazel-bootstrap zip python3 python3-venv, and there is no apt-get"),
        (["test", "--config=local-python"], {}, "needs LOWLAT_PYTHON="),
        (["test", "--config=rbe-sm100"], {"LOWLAT_REMOTE_IMAGE": "docker://x"}, "LOWLAT_REMOTE_PYTHON=/path/to/python3 in it"),
    ],
)
def test_bazelw_says_what_is_missing(tmp_path, arguments, environ, message):
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(shutil.which(program))
    result = subprocess.run(
        ["bash", ROOT / "tools/bazelw", *arguments], capture_output=True, text=True, env={"PATH": str(tmp_path)} | environ
    )
    assert result.returncode == 1 and message in result.stderr and len(result.stderr.splitlines()) == 1


# --- CI's count


CASE = {"ok": "", "bad": "<failure/>", "err": "<error/>", "skip": "<skipped/>"}


@pytest.mark.parametrize(
    ("targets", "line", "status"),
    [
        ([("PASSED", ["ok", "ok", "skip"]), ("PASSED", ["ok"])], "3 passed, 0 failed, 1 skipped", 0),
        ([("PASSED", ["ok"]), ("FAILED", ["ok", "bad", "err"])], "2 passed, 2 failed, 0 skipped", 1),
        ([("PASSED", ["ok"]), ("TIMEOUT", None)], "1 passed, 1 failed, 0 skipped", 1),
        ([("PASSED", ["ok"]), ("FAILED", ["ok"])], "2 passed, 1 failed, 0 skipped", 1),
        ([("PASSED", ["skip"])], "0 passed, 0 failed, 1 skipped", 1),
        ([], "0 passed, 0 failed, 0 skipped", 1),
    ],
)
def test_the_closing_line(tmp_path, capsys, targets, line, status):
    events = [{"id": {"targetCompleted": {"label": "//gpu"}}, "aborted": {"reason": "SKIPPED"}}]
    for number, (word, cases) in enumerate(targets):
        report = tmp_path / f"{number}.xml"
        if cases is not None:
            report.write_text("<testsuites><testsuite>" + "".join(f"<testcase>{CASE[c]}</testcase>" for c in cases) + "</testsuite></testsuites>")
        output = [{"name": "test.xml", "uri": report.as_uri()}] if cases is not None else []
        key = {"testResult": {"label": f"//t{number}", "run": 1, "shard": 1, "attempt": 1}}
        events.append({"id": key, "testResult": {"status": word, "testActionOutput": output}})
    (tmp_path / "events").write_text("\n".join(map(json.dumps, events)))
    assert count_tests.main(str(tmp_path / "events")) == status
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == line and printed[0] == "not for the GPU of this machine: //gpu"


def test_a_build_that_failed_is_a_failure(tmp_path, capsys):
    event = {"id": {"targetCompleted": {"label": "//a"}}, "aborted": {"reason": "ANALYSIS_FAILURE", "description": "not visible"}}
    (tmp_path / "events").write_text(json.dumps(event))
    assert count_tests.main(str(tmp_path / "events")) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
