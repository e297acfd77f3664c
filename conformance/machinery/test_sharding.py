"""Sharding loses no test and runs none twice; a runner that claims a GPU is not green without one."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import plugin
from conformance.fakes import run_pytest as run
from conformance.sharding import Shard, digest, shard_from, shard_of


@given(st.sets(st.text(max_size=8)), st.integers(1, 9), st.randoms(use_true_random=False))
def test_shards_are_a_partition(nodeids: set[str], total: int, rng: random.Random):
    shuffled = list(nodeids)
    rng.shuffle(shuffled)
    shards = [shard_of(shuffled if index else sorted(nodeids), Shard(index, total)) for index in range(total)]
    assert digest(shuffled) == digest(sorted(nodeids))
    assert sorted(nodeid for shard in shards for nodeid in shard) == sorted(nodeids)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_the_tests_of_one_unit_stay_together():
    nodeids = [f"{name}[{unit}]" for name in ("contract", "registers", "loads") for unit in "abcde"] + ["alone"]
    shards = [shard_of(nodeids, Shard(index, 3), lambda nodeid: nodeid[-2:]) for index in range(3)]
    assert sorted(nodeid for shard in shards for nodeid in shard) == sorted(nodeids)
    units = [{nodeid[-2:] for nodeid in shard} for shard in shards]
    assert list(map(len, units)) == [2, 2, 2] and not units[0] & units[1] | units[0] & units[2] | units[1] & units[2]


UNITS = """
import pytest
from lowlat_gemm.kernels.compile_cache import CompileUnit

UNITS = pytest.mark.parametrize("some_unit", [CompileUnit("kernel", "sm_90a", i) for i in range(5)], ids=str)

@UNITS
def test_first(some_unit): pass

@UNITS
@pytest.mark.parametrize("other", [1, 2])
def test_second(some_unit, other): pass
"""


def test_a_shard_has_all_tests_of_its_compile_units(tmp_path):
    """Each process compiles for itself: a unit in two shards would be compiled twice."""
    result = run(tmp_path, UNITS, "-vv", TEST_TOTAL_SHARDS="2", TEST_SHARD_INDEX="0")
    assert result.returncode == 0, result.stdout + result.stderr
    ran = re.findall(r"::test_\w+\[.*spec=(\d)\).* PASSED", result.stdout)
    assert sorted(ran) == ["0"] * 3 + ["2"] * 3 + ["4"] * 3, result.stdout


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_an_index_outside_the_total_is_an_error(index):
    with pytest.raises(ValueError, match="not in 0..2"):
        Shard(index, 3)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Shard(0, 1)),
        ({"LOWLAT_SHARD": "1/3"}, Shard(1, 3)),
        ({"TEST_TOTAL_SHARDS": "2", "TEST_SHARD_INDEX": "1"}, Shard(1, 2)),
        ({"LOWLAT_SHARD": "1/3", "TEST_TOTAL_SHARDS": "2", "TEST_SHARD_INDEX": "1"}, Shard(3, 6)),
    ],
)
def test_machines_and_bazel_shard_together(environ, expected):
    assert shard_from(environ) == expected


@pytest.mark.parametrize("text", ["3/3", "-1/2", "1", "a/b", "1/2/3", "0/0"])
def test_a_machine_shard_that_cannot_be_is_one_clear_line(tmp_path, text):
    result = run(tmp_path, SAMPLE, LOWLAT_SHARD=text)
    assert result.returncode == 4 and f"LOWLAT_SHARD='{text}': expected i/n" in result.stderr, result.stderr


SAMPLE = """
import pytest

@pytest.mark.parametrize("i", range(5))
def test_number(i):
    open(f"ran-{i}", "x")
"""


def test_all_shards_together_run_everything_once(tmp_path):
    total = 7  # more than there are tests: two shards are empty, and green
    for index in range(total):
        environ = {"TEST_TOTAL_SHARDS": str(total), "TEST_SHARD_INDEX": str(index)}
        environ |= {
            "TEST_SHARD_STATUS_FILE": str(tmp_path / f"status-{index}"),
            "TEST_UNDECLARED_OUTPUTS_DIR": str(tmp_path),
        }
        result = run(tmp_path, SAMPLE, **environ)  # a test that ran before fails on open(..., "x")
        assert result.returncode == 0, result.stdout + result.stderr
        assert (tmp_path / f"status-{index}").exists()
    assert len(list(tmp_path.glob("ran-*"))) == 5
    records = [json.loads(path.read_text()) for path in tmp_path.glob("tests-*-of-7.json")]
    assert {record["shard"]["index"] for record in records} == set(range(total))
    assert {record["shard"]["digest"] for record in records} == {digest(t["id"] for r in records for t in r["tests"])}


@pytest.mark.parametrize("shards", [{}, {"TEST_TOTAL_SHARDS": "2", "TEST_SHARD_INDEX": "1"}])
@pytest.mark.parametrize(("source", "options"), [("", ()), (SAMPLE, ("-k", "nothing_has_this_name"))])
def test_nothing_collected_is_red(tmp_path, source, options, shards):
    assert run(tmp_path, source, *options, **shards).returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_failure_in_a_shard_is_red(tmp_path):
    result = run(tmp_path, "def test_a(): assert 0\ndef test_b(): pass", TEST_TOTAL_SHARDS="2", TEST_SHARD_INDEX="0")
    assert result.returncode == 1 and "1 failed" in result.stdout


def another_arch() -> str:
    """A generation whose GPU is not here, on any machine."""
    found = plugin.gpus()
    return "sm107" if isinstance(found, str) or found[0] != (10, 7) else "sm90"


@pytest.mark.parametrize("claim", ["environment", "option"])
def test_a_claim_without_the_gpu_is_red(tmp_path, claim):
    arch = another_arch()
    options = ("--require-gpu", f"--arch={arch}") if claim == "option" else ()
    environ = {"LOWLAT_RUNNER_ARCH": arch} if claim == "environment" else {}
    result = run(tmp_path, SAMPLE, *options, **environ)
    assert result.returncode == 1 and f"this runner claims {arch}" in result.stdout + result.stderr
    assert not list(tmp_path.glob("ran-*"))


SKIPS = {
    "mark": "import pytest\n@pytest.mark.skip(reason='just so')\ndef test_a(): pass",
    "call": "import pytest\ndef test_a(): pytest.skip('just so')",
    "module": "import pytest\npytest.skip('just so', allow_module_level=True)",
}


@pytest.mark.parametrize("how", SKIPS)
def test_a_skip_on_a_claiming_runner_is_red(tmp_path, how):
    (tmp_path / "conftest.py").write_text(
        "import conformance.plugin\nconformance.plugin.missing_gpu = lambda arch: None\n"
    )
    result = run(tmp_path, SKIPS[how], LOWLAT_RUNNER_ARCH="sm90")
    assert result.returncode not in (0, 5) and "just so" in result.stdout
    assert "skipped on a runner that claims sm90" in result.stdout
    assert run(tmp_path, SKIPS[how]).returncode in (0, 5)  # without the claim a skip is a skip


@pytest.mark.parametrize(("options", "message"), [(("--arch=sm91",), "sm103"), (("--require-gpu",), "needs --arch")])
def test_bad_options_are_one_clear_line(tmp_path, options, message):
    result = run(tmp_path, SAMPLE, *options)
    assert result.returncode == 4 and message in result.stderr and "Traceback" not in result.stderr


def test_the_report_header_and_the_arch_fixture(tmp_path):
    result = run(tmp_path, "def test_a(arch): assert arch.name == 'sm100'", "--arch=sm100", "-v")
    assert result.returncode == 0 and "arch: sm100" in result.stdout
