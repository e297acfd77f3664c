"""A waiver lets one known failure pass, for a reason, until a day; an expired or unused one turns the run red."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from conformance import waivers
from conformance.fakes import GOOD_WAIVER as GOOD
from conformance.fakes import run_pytest
from conformance.fakes import write_waivers as write

DAY = datetime.date(2030, 1, 1)
SAMPLE = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_a(i):
    assert i != 1
"""


def run(folder: Path, *entries: dict, source=SAMPLE, options=(), arch="sm90", **environ):
    file = write(folder / "waivers.toml", *entries)
    return run_pytest(folder, source, f"--arch={arch}", "-rx", *options, LOWLAT_WAIVERS=str(file), **environ)


# --- the reviewed file


def test_the_file_is_sound_and_nothing_in_it_has_expired_or_lost_its_test():
    everything = waivers.load()
    assert [str(one) for one in everything if one.expired(waivers.today())] == []
    for one in everything:
        assert f"def {one.test.split('::')[1].split('[')[0]}(" in Path(one.file).read_text(), one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reason": '""'}, "reason: found '', need a str that is not empty"),
        ({"link": '"http://example.org"'}, "need https://"),
        ({"expires": '"2999-12-31"'}, "expires: found '2999-12-31', need a date"),
        ({"expires": "2999-12-31T00:00:00"}, "need a date"),
        ({"arches": '["sm91"]'}, "unknown arch 'sm91'"),
        ({"arches": "[]"}, "arches: found [], need a list"),
        ({"test": '"test_sample.py"'}, "need file.py::test_name"),
        ({"owner": '"me"'}, "found arches, expires, link, owner"),
        ({"reason": None}, "need test, arches, reason, link, expires"),
    ],
)
def test_what_an_entry_needs(tmp_path, change, message):
    entry = {key: value for key, value in (GOOD | change).items() if value is not None}
    with pytest.raises(waivers.WaiverError) as caught:
        waivers.load(write(tmp_path / "w.toml", GOOD, entry))
    assert message in str(caught.value) and str(caught.value).startswith("w.toml: waiver 2:")


@pytest.mark.parametrize(
    ("pattern", "nodeid", "covered"),
    [
        ("f.py::test_a", "f.py::test_a", True),
        ("f.py::test_a", "f.py::test_a[1]", False),
        ("f.py::test_a[*]", "f.py::test_a[1-x]", True),
        ("f.py::test_a[1*", "f.py::test_a[2]", False),
        ("f.py::test_.", "f.py::test_a", False),
    ],
)
def test_what_a_waiver_covers(pattern, nodeid, covered):
    assert waivers.Waiver(pattern, ("sm90",), "r", "https://l", DAY).covers(nodeid) is covered


def test_the_last_day_is_still_in_force():
    waiver = waivers.Waiver("f.py::test_a", ("sm90",), "r", "https://l", DAY)
    found = [waivers.problems([waiver], ["f.py::test_a"], DAY + datetime.timedelta(days)) for days in (-1, 0, 1)]
    assert found == [[], [], ["waiver of f.py::test_a until 2030-01-01: expired"]]


# --- in a run


def test_a_waived_failure_is_an_expected_one_also_on_a_claiming_runner(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import conformance.plugin\nconformance.plugin.missing_gpu = lambda arch: None\n"
    )
    done = run(tmp_path, GOOD, options=("--record=r.json",), LOWLAT_RUNNER_ARCH="sm90")
    assert done.returncode == 0 and "2 passed, 1 xfailed" in done.stdout, done.stdout
    assert "waived until 2999-12-31: known (https://example.org/1)" in done.stdout
    tests = json.loads((tmp_path / "r.json").read_text())["tests"]
    assert [test["outcome"] for test in tests] == ["passed", "waived", "passed"]


@pytest.mark.parametrize(
    ("entry", "source", "arch", "message"),
    [
        (GOOD, SAMPLE.replace("i != 1", "True"), "sm90", "unused, the case passes: delete the waiver"),
        (GOOD | {"expires": "2020-01-01"}, SAMPLE, "sm90", "until 2020-01-01: expired"),
        (
            GOOD | {"test": '"test_sample.py::test_b"'},
            SAMPLE,
            "sm90",
            "unused, no case of test_sample.py has this name",
        ),
        (GOOD, SAMPLE, "sm100", "assert 1 != 1"),
        (GOOD | {"test": '"test_sample.py::test_a[0]"'}, SAMPLE, "sm90", "assert 1 != 1"),
    ],
    ids=["passes", "expired", "no such case", "another generation", "another case"],
)
def test_everything_else_is_red(tmp_path, entry, source, arch, message):
    done = run(tmp_path, entry, source=source, arch=arch)
    assert done.returncode not in (0, 5) and message in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_waiver_for_a_file_that_is_not_collected_is_no_matter(tmp_path):
    done = run(tmp_path, GOOD | {"test": '"other.py::test_b"'}, source="def test_a(): pass")
    assert done.returncode == 0, done.stdout + done.stderr


def test_filters_and_shards_do_not_make_a_waiver_unused(tmp_path):
    for options, environ in ((("-k", "a[0]"), {}), ((), {"TEST_TOTAL_SHARDS": "3", "TEST_SHARD_INDEX": "0"})):
        done = run(tmp_path, GOOD, options=options, **environ)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_skip_is_never_waived(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import conformance.plugin\nconformance.plugin.missing_gpu = lambda arch: None\n"
    )
    done = run(
        tmp_path,
        GOOD,
        source=SAMPLE.replace("assert i", "i == 1 and pytest.skip('just so'); assert i"),
        LOWLAT_RUNNER_ARCH="sm90",
    )
    assert done.returncode == 1 and "just so" in done.stdout, done.stdout


@pytest.mark.parametrize("bad", ["import time; time.sleep(60)", "import os; os.abort()"])
def test_a_case_that_takes_its_process_along_can_be_waived(tmp_path, bad):
    source = SAMPLE.replace("assert i != 1", f"\n    if i == 1:\n        {bad}")
    done = run(tmp_path, GOOD, source=source, options=("--isolate", "--case-limit=2"))
    assert done.returncode == 0 and "2 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
