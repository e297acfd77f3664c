"""Archives of kernels made ahead of time: the same bytes again, taken instead of compiling, ignored where foreign."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from dataclasses import replace

import pytest

from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.dispatch import plan_for
from lowlat_gemm.kernels import compiling
from lowlat_gemm.kernels import store as store_module
from lowlat_gemm.kernels.archive import Archive, write_archive
from lowlat_gemm.kernels.skinny import SkinnyConfig, compile_unit
from lowlat_gemm.kernels.store import ObjectStore, key_of, origin
from lowlat_gemm.tables import available_tables, load_table
from tools import build_archive

UNIT = compile_unit(SM90, 64, 1024, 1, SkinnyConfig(64, 2, 1, 8))
KEY = key_of(UNIT, compiling.compile_options(UNIT.target))
OBJECTS = {KEY: (b"object", "what it is"), "a" * 32: (b"other", "another")}


@pytest.fixture
def made_here(monkeypatch):
    """Objects are loaded by name alone, and units that are compiled are listed."""
    compiled = []
    monkeypatch.setattr(compiling, "_load", lambda path: path.read_bytes())

    def compile_now(unit):
        compiled.append(unit)
        raise RuntimeError("compiled")

    monkeypatch.setattr(compiling, "compile_now", compile_now)
    return compiled


def test_equal_objects_give_equal_bytes(tmp_path, monkeypatch):
    write_archive(tmp_path / "a.zip", origin(), OBJECTS)
    monkeypatch.setattr("time.time", lambda: 4e9)
    write_archive(tmp_path / "b.zip", dict(reversed(origin().items())), dict(reversed(OBJECTS.items())))
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    write_archive(tmp_path / "c.zip", origin(), OBJECTS | {KEY: (b"objecu", "what it is")})
    assert (tmp_path / "a.zip").read_bytes() != (tmp_path / "c.zip").read_bytes()


def test_an_archived_kernel_is_loaded_and_kept(tmp_path, made_here):
    write_archive(tmp_path / "sm90_aot.zip", origin(), OBJECTS)
    made = compiling.make(UNIT, ObjectStore.open(tmp_path))
    assert made.kernel == b"object" and not made.compiled and not made_here
    (tmp_path / "sm90_aot.zip").unlink()
    assert compiling.make(UNIT, ObjectStore.open(tmp_path)).kernel == b"object", "it was not kept"


def test_what_the_archive_lacks_is_compiled(tmp_path, made_here):
    write_archive(tmp_path / "sm90_aot.zip", origin(), {"a" * 32: (b"other", "another")})
    with pytest.raises(RuntimeError, match="compiled"):
        compiling.make(UNIT, ObjectStore.open(tmp_path))
    assert made_here == [UNIT]


@pytest.mark.parametrize("name", list(origin()))
def test_a_foreign_archive_is_ignored_with_one_warning(tmp_path, made_here, caplog, name):
    write_archive(tmp_path / "sm90_aot.zip", origin() | {name: "another"}, OBJECTS)
    store = ObjectStore.open(tmp_path)
    with caplog.at_level(logging.WARNING, "lowlat_gemm"):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="compiled"):
                compiling.make(UNIT, store)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f"sm90_aot.zip was made with other {name}; it is ignored" in said[0], said


def test_a_foreign_archive_is_not_told_of_by_compile_processes(tmp_path, made_here, caplog, capfd):
    write_archive(tmp_path / "sm90_aot.zip", origin() | {"abi": "another"}, OBJECTS)
    bad = replace(UNIT, spec="does not compile")
    with caplog.at_level(logging.WARNING, "lowlat_gemm"):
        compiling._make_in_processes([bad, bad], 2, ObjectStore.open(tmp_path), lambda done, total: None)
    assert caplog.text.count("it is ignored") == 1 and "it is ignored" not in capfd.readouterr().err


def test_without_a_folder_kernels_come_from_an_archive_all_the_same(tmp_path, made_here, monkeypatch, caplog):
    """A container with a read-only file system: the archive lies beside the package's files."""
    package = tmp_path / "package"
    package.mkdir()
    write_archive(package / "sm90_aot.zip", origin(), OBJECTS)
    monkeypatch.setattr(store_module, "__file__", str(package / "store.py"))
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "cache"):
        caplog.clear()
        made = compiling.make(UNIT, ObjectStore.open(folder))
        assert made.kernel == b"object" and not made.compiled and not made_here
        assert len(caplog.records) == 1 and "not kept on disk" in caplog.text


def test_a_folder_that_cannot_be_written_gives_its_archives(tmp_path, made_here, monkeypatch):
    write_archive(tmp_path / "sm90_aot.zip", origin(), OBJECTS)

    def read_only(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store_module.tempfile, "TemporaryFile", read_only)
    objects = ObjectStore.open(tmp_path)
    assert objects.folder != tmp_path and compiling.make(UNIT, objects).kernel == b"object" and not made_here


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut"])
def test_a_file_that_is_no_archive_is_ignored(tmp_path, made_here, caplog, content):
    (tmp_path / "sm90_aot.zip").write_bytes(content)
    store = ObjectStore.open(tmp_path)
    assert store.find(KEY) is None and store.find(KEY) is None
    assert [record.getMessage().count("is no archive of kernels") for record in caplog.records] == [1]


def test_a_damaged_object_is_not_taken(tmp_path):
    path = tmp_path / "sm90_aot.zip"
    write_archive(path, origin(), OBJECTS)
    data = path.read_bytes()
    assert data.count(b"object") > 1
    start = data.index(f"{KEY}.o".encode()) + len(f"{KEY}.o")
    path.write_bytes(data[:start] + b"OBJECT" + data[start + 6 :])
    archive = Archive.open(path, origin())
    assert archive.read(KEY) is None and archive.read("a" * 32) == (b"other", "another")


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_every_config_of_every_table_is_in(arch):
    units = set(build_archive.units_of(arch))
    families = [family for family, name in available_tables() if name == arch.name]
    rows = [(family, n, k) for family in families for n, k in load_table(family, arch).projections]
    assert rows and all(units >= set(plan_for(arch, n, k, (family,)).units()) for family, n, k in rows)
    assert {unit.target for unit in units} == {arch.compile_target}


def test_a_build_is_whole_and_the_same_again(tmp_path, monkeypatch):
    """One real kernel, compiled twice in processes of their own."""
    monkeypatch.setattr(build_archive, "units_of", lambda arch: [UNIT])
    digests = []
    for name in ("one.zip", "two.zip"):
        assert build_archive.build(SM90, tmp_path / name) == 1
        digests.append(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == ["manifest.json", f"{KEY}.o"]


def test_a_kernel_that_does_not_compile_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(build_archive, "units_of", lambda arch: [UNIT])
    monkeypatch.setattr(build_archive, "fill_store", lambda units, store: None)
    with pytest.raises(RuntimeError, match="1 of 1 kernels did not compile: .*skinny"):
        build_archive.build(SM90, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
