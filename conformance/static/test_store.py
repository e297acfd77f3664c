"""The cache of compiled kernels on disk: shared by processes, whole or absent, never stale, never in the way."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lowlat_gemm.kernels import compiling, store
from lowlat_gemm.kernels.compile_cache import CompileCache, CompileUnit
from lowlat_gemm.kernels.store import ObjectStore, default_folder, key_of

UNIT = CompileUnit("skinny", "sm_90a", "spec")
CONTENT = b"object of the fake compiler"


class FakeCompiled:
    """What the DSL's compile returns, as far as ``make`` looks."""

    def export_to_c(self, *, object_file_path, function_name):
        Path(object_file_path).write_bytes(CONTENT)


@pytest.fixture
def compiles(monkeypatch):
    """Replaces compiler and loader; the list grows by one a compile."""
    made = []
    monkeypatch.setattr(compiling, "compile_now", lambda unit: made.append(unit) or FakeCompiled())
    monkeypatch.setattr(compiling, "_load", lambda path: path.read_bytes())
    return made


@pytest.fixture
def objects(tmp_path):
    return ObjectStore.open(tmp_path / "cache")


def test_the_second_process_loads(objects, compiles):
    first, second = compiling.make(UNIT, objects), compiling.make(UNIT, objects)
    assert (first.compiled, second.compiled, len(compiles)) == (True, False, 1)
    assert first.kernel == second.kernel == CONTENT, "what was compiled is launched from its object too"


@pytest.mark.parametrize("damage", ["truncate", "empty", "other bytes", "no note", "note is no JSON", "note of another"])
def test_a_damaged_object_is_a_miss(objects, compiles, damage):
    compiling.make(UNIT, objects)
    key = key_of(UNIT, compiling.compile_options(UNIT.target))
    path, note = objects.path(key), objects.path(key).with_suffix(".json")
    {
        "truncate": lambda: path.write_bytes(CONTENT[:-3]),
        "empty": lambda: path.write_bytes(b""),
        "other bytes": lambda: path.write_bytes(b"X" + CONTENT[1:]),
        "no note": note.unlink,
        "note is no JSON": lambda: note.write_text("{"),
        "note of another": lambda: note.write_text(json.dumps({"sha256": "0" * 64})),
    }[damage]()
    assert objects.find(key) is None
    made = compiling.make(UNIT, objects)
    assert made.compiled and len(compiles) == 2 and objects.find(key) is not None


def test_an_object_that_does_not_load_is_made_again(objects, compiles, monkeypatch, caplog):
    compiling.make(UNIT, objects)
    loads = iter([OSError("foreign"), CONTENT])

    def load(path):
        result = next(loads)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(compiling, "_load", load)
    assert compiling.make(UNIT, objects).kernel == CONTENT and len(compiles) == 2
    assert "cannot be loaded (foreign)" in caplog.text


KEY_PARTS = {
    "unit": lambda patch: replace(UNIT, spec="other"),
    "target": lambda patch: replace(UNIT, target="sm_100a"),
    "kernel": lambda patch: replace(UNIT, kernel="fused_a"),
    "sources": lambda patch: patch.setattr(store, "source_hash", lambda: "other"),
    "toolchain": lambda patch: patch.setattr(store, "toolchain", lambda: (("nvidia-cutlass-dsl", "9"),)),
    "abi": lambda patch: patch.setattr(store, "ABI", store.ABI + 1),
    "machine": lambda patch: patch.setattr(store.platform, "machine", lambda: "riscv64"),
}


@pytest.mark.parametrize("part", KEY_PARTS)
def test_the_key_changes_with_what_decides_the_code(part, monkeypatch):
    before = key_of(UNIT, "options")
    changed = KEY_PARTS[part](monkeypatch) or UNIT
    assert key_of(changed, "options") != before, f"{part} is not part of the key"
    assert key_of(UNIT, "other options") != before


def test_sources_and_toolchain_are_hashed_by_content(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = store.source_hash.__wrapped__(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert store.source_hash.__wrapped__(tmp_path) != first

    class Reinstalled:
        version = "4.8.1"

        def __init__(self, record):
            self.read_text = lambda name: record

    found = []
    installers = (
        "../../../bin/run,sha256=ccc,9\nlib.so,sha256=aaa,1\nb.py,sha256=ddd,1\n__pycache__/b.pyc,,",
        "b.py,sha256=ddd,1\nlib.so,sha256=aaa,1\n../../../bin/run,sha256=eee,9\na-1.dist-info/REQUESTED,sha256=fff,0",
    )
    for record in ("lib.so,sha256=aaa,1", "lib.so,sha256=bbb,1", *installers):
        monkeypatch.setattr(store.importlib.metadata, "distribution", lambda name, record=record: Reinstalled(record))
        found.append(store.toolchain.__wrapped__())
    assert found[0] != found[1], "a reinstall of the same version with other libraries is another toolchain"
    assert found[2] == found[3] != found[0], "the same wheels in another environment are the same toolchain"


@pytest.fixture
def no_folder(tmp_path):
    """A folder that cannot be made, also by root, whom permissions do not stop."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


def test_home_missing_or_read_only_means_a_private_folder_and_one_warning(no_folder, compiles, caplog):
    assert default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/lowlat_gemm")
    for folder in (None, no_folder):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lowlat_gemm"):
            objects = ObjectStore.open(folder)
            assert [compiling.make(UNIT, objects).compiled for _ in range(2)] == [True, False]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "LOWLAT_GEMM_CACHE_DIR" in caplog.text and not objects.kept
        assert objects.folder.stat().st_mode & 0o777 == 0o700


def test_a_private_folder_goes_with_its_process_not_with_a_fork_of_it(no_folder):
    code = """
        import os
        objects = ObjectStore.open(folder)
        if os.fork() == 0:
            sys.exit()  # runs what is registered for the exit
        os.wait()
        assert objects.folder.is_dir()
        print(objects.folder, flush=True)
    """
    with _child(code, no_folder, stdout=subprocess.PIPE) as child:
        left = Path(child.stdout.read().decode().strip())
    assert child.wait(timeout=60) == 0 and left.is_absolute() and not left.exists()


def test_no_room_at_all_means_kernels_without_objects(no_folder, compiles, monkeypatch):
    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.tempfile, "mkdtemp", full)
    assert ObjectStore.open(no_folder) is None
    assert isinstance(compiling.make(UNIT, None).kernel, FakeCompiled)


@pytest.mark.parametrize("home", ["/", "", "relative"])
def test_a_home_that_is_none(monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    assert default_folder({}) is None


def test_a_full_disk_costs_the_cache_not_the_kernel(objects, compiles, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    for _ in range(2):
        assert isinstance(compiling.make(UNIT, objects).kernel, FakeCompiled)
    assert caplog.text.count("No space left") == 1


def test_a_lock_that_is_not_released_is_waited_for_and_then_passed(objects, compiles):
    key = key_of(UNIT, compiling.compile_options(UNIT.target))
    with objects.lock(key) as first:
        began = time.monotonic()
        with objects.lock(key, timeout_s=0.1) as second:
            waited = time.monotonic() - began
    assert first and not second and waited >= 0.1
    with objects.lock(key) as third:
        assert third


def _child(code: str, *arguments: object, **options) -> subprocess.Popen:
    prelude = """
        import sys, time
        from pathlib import Path
        from lowlat_gemm.kernels import compiling
        from lowlat_gemm.kernels.compile_cache import CompileUnit
        from lowlat_gemm.kernels.store import ObjectStore
        UNIT, folder = CompileUnit("skinny", "sm_90a", "spec"), Path(sys.argv[1])

        class Compiled:
            def export_to_c(self, *, object_file_path, function_name):
                with open(object_file_path, "wb") as stream:
                    stream.write(b"object of the fake ")
                    stream.flush()
                    (folder / "writing").touch()
                    time.sleep(float(sys.argv[2]))
                    stream.write(b"compiler")

        def compile_now(unit):
            with open(folder / "compiles", "a") as stream:
                stream.write("x")
            return Compiled()

        compiling.compile_now, compiling._load = compile_now, lambda path: path.read_bytes()
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **options)


_MAKE = "assert compiling.make(UNIT, ObjectStore.open(folder / 'cache')).kernel == b'object of the fake compiler'"


def test_sixteen_processes_compile_once(tmp_path):
    children = [_child(_MAKE, tmp_path, 0.2) for _ in range(16)]
    assert [child.wait(timeout=60) for child in children] == [0] * 16
    assert (tmp_path / "compiles").read_text() == "x"


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path):
    killed = _child(_MAKE, tmp_path, 60)
    deadline = time.monotonic() + 30
    while not (tmp_path / "writing").exists():
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    key = key_of(UNIT, compiling.compile_options(UNIT.target))
    assert ObjectStore(tmp_path / "cache").find(key) is None
    assert _child(_MAKE, tmp_path, 0).wait(timeout=30) == 0, "the dead process's lock is in the way"
    assert (tmp_path / "compiles").read_text() == "xx"


def test_many_units_go_through_processes_and_come_back(tmp_path, monkeypatch):
    """With the real compiler, where it is installed: objects that worker processes made are loaded, not compiled."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    from conformance.cases import compile_units
    from lowlat_gemm.arch import SM90

    monkeypatch.setattr(compiling, "UNITS_PER_PROCESS", 1)
    objects = ObjectStore.open(tmp_path)
    units = compile_units(SM90)[:2]
    cache = CompileCache(lambda unit: compiling.make(unit, objects))
    seen = []
    problems = compiling.make_all(units, cache, objects, processes=2, progress=lambda *step: seen.append(step))
    assert problems == {} and (cache.compiles, cache.loads) == (0, 2) and all(callable(cache.peek(unit)) for unit in units)
    assert seen == sorted(seen) and (seen[0], seen[-1]) == ((0, 2), (2, 2)) and len(seen) > 3, f"only from here: {seen}"


def test_a_store_is_filled_by_other_processes_alone(tmp_path, monkeypatch):
    """With the real compiler: what is missing is made, once, a unit that does not compile keeps nothing from the rest."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    from conformance.cases import compile_units
    from lowlat_gemm.arch import SM90

    monkeypatch.setattr(compiling, "compile_now", lambda unit: pytest.fail("compiled in this process"))
    objects = ObjectStore.open(tmp_path)
    good = compile_units(SM90)[0]
    seen = []
    compiling.fill_store([good, good, replace(UNIT, spec="bad")], objects, lambda *step: seen.append(step))
    assert objects.find(key_of(good, compiling.compile_options(good.target))) is not None
    assert len(list(tmp_path.glob("*.o"))) == 1 and seen[0] == (0, 2) and seen[-1] == (1, 2)
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda *args, **options: pytest.fail("made again"))
    compiling.fill_store([good], objects)


def test_what_cannot_be_made_is_reported_and_the_rest_is_there(objects, compiles, monkeypatch):
    bad = replace(UNIT, spec="bad")
    real = compiling.compile_now
    monkeypatch.setattr(compiling, "compile_now", lambda unit: real(unit) if unit is not bad else 1 / 0)
    cache = CompileCache(lambda unit: compiling.make(unit, objects))
    problems = compiling.make_all([UNIT, bad, UNIT], cache, objects)
    assert list(problems) == [bad] and "division by zero" in problems[bad]
    assert cache.peek(UNIT) == CONTENT and len(compiles) == 1
    assert compiling.make_all([UNIT, bad], cache, objects) == problems, "what failed before is not there now either"


def test_a_kernel_that_cannot_be_exported_runs_all_the_same(objects, compiles, monkeypatch, caplog):
    def export(self, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeCompiled, "export_to_c", export)
    made = compiling.make(UNIT, objects)
    assert isinstance(made.kernel, FakeCompiled) and "is not kept on disk" in caplog.text


def test_what_a_killed_process_left_is_swept(tmp_path):
    old, fresh = tmp_path / "making-old", tmp_path / "making-fresh"
    for folder in (old, fresh):
        folder.mkdir()
    os.utime(old, (1, 1))
    assert ObjectStore.open(tmp_path) is not None
    assert not old.exists() and fresh.exists(), "another process may be at work in a fresh one"


def test_no_process_to_be_had_means_compiling_here(objects, compiles, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "UNITS_PER_PROCESS", 1)
    monkeypatch.setattr(compiling.sys, "executable", "/nonexistent/python")
    cache = CompileCache(lambda unit: compiling.make(unit, objects))
    units = [replace(UNIT, spec=str(i)) for i in range(4)]
    assert compiling.make_all(units, cache, objects, processes=2) == {}
    assert len(compiles) == 4 and "no compile process" in caplog.text


def test_a_compiler_without_metadata_has_no_disk_cache(monkeypatch, tmp_path):
    """No telling when an object is stale: a copied compiler has no version to put into the key."""
    compiling.store_in.cache_clear()
    assert compiling.store_in(str(tmp_path)) is not None or not store.toolchain()
    monkeypatch.setattr(compiling, "toolchain", lambda: ())
    compiling.store_in.cache_clear()
    assert compiling.store_in(str(tmp_path)) is None
    compiling.store_in.cache_clear()


def test_a_file_system_without_locks_is_no_lock_and_no_wait(objects, compiles, monkeypatch):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(store.fcntl, "flock", unsupported)
    with objects.lock("key", timeout_s=60) as held:
        assert held is False
    assert compiling.make(UNIT, objects).compiled, "without a lock the kernel is made all the same"


def test_the_folder_is_the_users_own(tmp_path):
    """Its objects are executed: nobody else may write them."""
    ObjectStore.open(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
