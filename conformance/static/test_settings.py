"""Every environment variable: what it sets, what a bad value does, and the deny-list grammar."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat_gemm import settings
from lowlat_gemm.backends import BACKEND_NAMES
from lowlat_gemm.settings import DenyItem, Settings, parse_deny

FLAGS = {
    "LOWLAT_GEMM_DISABLE": "disabled",
    "LOWLAT_GEMM_ANY_DEVICE": "any_device",
    "LOWLAT_GEMM_BATCH_INVARIANT": "batch_invariant",
    "VLLM_BATCH_INVARIANT": "batch_invariant",
    "LOWLAT_GEMM_STRICT": "strict",
    "LOWLAT_GEMM_NO_PLUGIN": "no_plugin",
}
#: vLLM's own variable takes more for yes.
OURS = [name for name in FLAGS if not name.startswith("VLLM")]
BAD = {name: "maybe" for name in OURS} | {"LOWLAT_GEMM_DENY": "skiny", "LOWLAT_GEMM_TABLES": "/no/such/folder"}


@pytest.fixture
def environment(monkeypatch):
    """An environment without our variables, and settings that are read again at the next use."""
    for name in (*FLAGS, "LOWLAT_GEMM_DENY", "LOWLAT_GEMM_CACHE_DIR", "LOWLAT_GEMM_TABLES"):
        monkeypatch.delenv(name, raising=False)
    before = settings._current
    settings.restore(None)
    yield monkeypatch
    settings.restore(before)


def test_nothing_set_is_the_default():
    assert settings.read({}) == Settings()


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_a_flag_that_is_on(name, value):
    assert settings.read({name: value}) == Settings(**{FLAGS[name]: True})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["", "0", "False", "no", " off "])
def test_a_flag_that_is_off(name, value):
    assert settings.read({name: value}) == Settings()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("value", ["2", "-1", "maybe", "1 0", "01"])
def test_a_flag_that_cannot_be_read(name, value):
    with pytest.raises(ValueError) as error:
        settings.read({name: value})
    assert name in str(error.value) and repr(value) in str(error.value)


def test_the_cache_folder():
    assert settings.read({"LOWLAT_GEMM_CACHE_DIR": "/a/b"}).cache_dir == "/a/b"
    assert settings.read({"LOWLAT_GEMM_CACHE_DIR": ""}).cache_dir is None


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        (" , ,", []),
        ("skinny", [("skinny", None, None, None)]),
        ("1536x7168", [(None, 1536, 7168, None)]),
        ("1536x7168@4", [(None, 1536, 7168, 4)]),
        ("skinny:1536x7168", [("skinny", 1536, 7168, None)]),
        (" fused_a:1536x7168@16 , split_k ", [("fused_a", 1536, 7168, 16), ("split_k", None, None, None)]),
    ],
)
def test_the_deny_grammar(text, items):
    assert parse_deny(text) == tuple(DenyItem(*item) for item in items)


@pytest.mark.parametrize(
    "entry",
    ["cute", "skinny:", ":1536x7168", "skinny1536x7168", "1536", "1536x", "x7168", "@4", "1536x7168@", "skinny@4",
     "skinny:@4", "-1x8", "1536 x 7168", "1536x7168@-1", "1536X7168", "skinny;fused_a", "1536x7168@1@2", "a" * 200],
)  # fmt: skip
def test_a_deny_entry_that_cannot_be_read_is_named(entry):
    with pytest.raises(ValueError) as error:
        parse_deny(f"skinny,{entry},1x8")
    assert repr(entry) in str(error.value) and "LOWLAT_GEMM_DENY" in str(error.value)


def text_of(item: DenyItem) -> str:
    shape = "" if item.n is None else f"{item.n}x{item.k}" + ("" if item.m is None else f"@{item.m}")
    return ":".join(filter(None, (item.backend, shape)))


@st.composite
def deny_items(draw) -> DenyItem:
    backend = draw(st.sampled_from([None, *BACKEND_NAMES]))
    number = st.integers(0, 10**7)
    if backend is not None and draw(st.booleans()):
        return DenyItem(backend, None, None, None)
    return DenyItem(backend, draw(number), draw(number), draw(st.none() | number))


@given(st.lists(deny_items(), max_size=5), st.sampled_from([",", ", ", " ,", ",,"]))
def test_a_deny_list_round_trips(items, comma):
    assert parse_deny(comma.join(map(text_of, items))) == tuple(items)


@given(st.text(alphabet="skinyfuedplt_abh:x@0123456789, -", max_size=30))
def test_any_text_is_read_or_refused_by_name(text):
    try:
        items = parse_deny(text)
    except ValueError as error:
        assert "LOWLAT_GEMM_DENY" in str(error)
    else:
        # Nothing that was written is dropped, and nothing is denied that was not asked for.
        assert len(items) == len([part for part in text.split(",") if part.strip()])
        assert all(item.backend or item.n is not None for item in items)


@pytest.mark.parametrize(
    ("entry", "denied"),
    [
        ("skinny", {("skinny", 8, 16, 1), ("skinny", 8, 16, 2), ("skinny", 16, 8, 1)}),
        ("8x16", {("skinny", 8, 16, 1), ("skinny", 8, 16, 2), ("fused_a", 8, 16, 1)}),
        ("8x16@1", {("skinny", 8, 16, 1), ("fused_a", 8, 16, 1)}),
        ("skinny:8x16@1", {("skinny", 8, 16, 1)}),
        ("skinny:8x16", {("skinny", 8, 16, 1), ("skinny", 8, 16, 2)}),
    ],
)
def test_what_an_entry_denies(entry, denied):
    calls = [("skinny", 8, 16, 1), ("skinny", 8, 16, 2), ("skinny", 16, 8, 1), ("fused_a", 8, 16, 1), ("split_k", 1, 8, 1)]
    chosen = Settings(deny=parse_deny(entry))
    assert {call for call in calls if chosen.denied(*call)} == denied


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_switches_the_library_off_with_one_line(environment, caplog, name):
    environment.setenv(name, BAD[name])
    with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
        found = settings.current()
        assert settings.current() is found
    assert found.disabled and name in found.problem and BAD[name] in found.problem
    assert [record.levelname for record in caplog.records] == ["ERROR"], caplog.text
    assert name in caplog.text and BAD[name] in caplog.text


@pytest.mark.parametrize("name", BAD)
def test_doctor_shows_a_bad_value(environment, name):
    from lowlat_cli.doctor import examine

    environment.setenv(name, BAD[name])
    report = examine()
    assert [problem for problem in report.problems if name in problem and BAD[name] in problem], report.problems
    assert report.settings.disabled


def test_the_environment_is_read_once(environment):
    environment.setenv("LOWLAT_GEMM_STRICT", "1")
    assert settings.current().strict
    environment.setenv("LOWLAT_GEMM_STRICT", "0")
    assert settings.current().strict
    settings.restore(None)
    assert not settings.current().strict


def test_change_and_restore(environment):
    environment.setenv("LOWLAT_GEMM_ANY_DEVICE", "1")
    before = settings.change(disabled=True)
    assert before == Settings(any_device=True) and settings.current() == Settings(any_device=True, disabled=True)
    inner = settings.change(disabled=False, strict=True)
    assert inner.disabled and settings.current() == Settings(any_device=True, strict=True)
    settings.restore(before)
    assert settings.current() is before


def test_change_of_an_unknown_field_is_refused(environment):
    with pytest.raises(TypeError, match="colour"):
        settings.change(colour="red")
    assert settings.current() == Settings()


def test_the_documented_variables_are_those_that_are_read():
    class Recorder(dict):
        def __init__(self):
            self.asked = set()

        def get(self, name, default=None):
            self.asked.add(name)
            return default

    environ = Recorder()
    settings.read(environ)
    documented = {word.split("=")[0] for word in settings.__doc__.split("``") if word.startswith(("LOWLAT_", "VLLM_"))}
    assert environ.asked == documented


@pytest.mark.parametrize("value", ["2", "-1", "enabled"])
def test_what_vllm_takes_for_yes_does_not_switch_us_off(value):
    assert settings.read({"VLLM_BATCH_INVARIANT": value}) == Settings(batch_invariant=True)


def test_a_folder_of_tables(tmp_path):
    assert settings.read({"LOWLAT_GEMM_TABLES": str(tmp_path)}) == Settings(tables=str(tmp_path))
    assert settings.read({"LOWLAT_GEMM_TABLES": ""}) == Settings()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="LOWLAT_GEMM_TABLES=.*file.*: expected a folder"):
        settings.read({"LOWLAT_GEMM_TABLES": str(tmp_path / "file")})


def test_a_home_folder_that_no_shell_has_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tables").mkdir()
    found = settings.read({"LOWLAT_GEMM_CACHE_DIR": "~/cache", "LOWLAT_GEMM_TABLES": "~/tables"})
    assert (found.cache_dir, found.tables) == (str(tmp_path / "cache"), str(tmp_path / "tables")) and found.problem is None
