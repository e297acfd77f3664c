"""What is broken on purpose turns the run red: a kernel, a table row, a list of shards, a waiver.

The GPU suite itself runs here, on a stand-in for a GPU (conformance/stand_in_gpu.py): with right kernels it is green.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conformance.cases import kernel_cases
from conformance.fakes import GOOD_WAIVER, inner_environment, write_waivers
from conformance.stand_in_gpu import FAULTS
from lowlat_gemm.arch import SM90

#: The smallest cell of the SM90 tables with a kernel, and the smallest standing case. Of some size: at 8 rows and one token
#: the last of K may be so small that nobody misses it.
CELL = min(
    (case for case in kernel_cases(SM90) if case.n >= 512 and case.m >= 4),
    key=lambda case: (case.n * case.k, case.m, case.residual),
)
STANDING = "standing-sm90-104x1032-m5-residual-skinny"
PARITY = "conformance/gpu/test_parity.py"
RANDOM = f"{PARITY}::test_random_operands_are_within_the_bound[{CELL}]"
INTEGERS = f"{PARITY}::test_integer_operands_match_bit_for_bit[{CELL}]"
RERUNS = f"{PARITY}::test_dispatcher_runs_it_and_reruns_are_bit_equal[{CELL}]"

#: fault of every kernel -> a test that finds it, and what it says
FOUND_BY = {
    "drops the last of K": (RANDOM, "elements outside the bound"),
    "leaves an element": (RANDOM, "1 elements of y not written, 0 elements around it overwritten"),
    "writes beside y": (INTEGERS, "0 elements of y not written, 1 elements around it overwritten"),
    "reads beside x": (RANDOM, "elements outside the bound"),
    "rounds between halves of K": (
        f"conformance/gpu/test_corners.py::test_halves_of_k_that_cancel_to_small_values[{STANDING}]",
        "outside the bound",
    ),
    "differs from run to run": (RERUNS, "the dispatcher ran something else"),
    "hangs": (RANDOM, "no report within 5 s"),
    "aborts": (RANDOM, "its process ended with signal SIGABRT"),
}  # fmt: skip


def suite(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    """The GPU suite of SM90 on the stand-in, as a runner that claims the generation runs it."""
    options = [
        "-q",
        "-c",
        "pyproject.toml",
        "--rootdir=.",
        "-p",
        "conformance.plugin",
        "-p",
        "conformance.stand_in_gpu",
    ]
    options += ["-p", "no:cacheprovider", "--arch=sm90", "--require-gpu", *arguments]
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, capture_output=True, text=True, env=inner_environment() | environ, timeout=300)


def record_of(folder) -> dict:
    return json.loads((folder / "record.json").read_text())


def test_right_kernels_are_green(tmp_path):
    tests = list(dict.fromkeys(test for test, _ in FOUND_BY.values()))
    done = suite(*tests, f"--record={tmp_path}/record.json")
    assert done.returncode == 0 and f"{len(tests)} passed" in done.stdout, done.stdout + done.stderr
    assert record_of(tmp_path)["machine"]["gpu"] is None, "a stand-in must never look like hardware in a record"


#: GPU tests that pick rows of the tables by what they are: another table, and their row may be one of another kind.
PICKS_ROWS = [
    "conformance/gpu/test_dispatch.py::test_switches",
    "conformance/gpu/test_dispatch.py::test_a_sibling_device_is_declined_unless_told_otherwise",
    "conformance/gpu/test_corners.py::test_no_token_launches_nothing_and_leaves_no_error",
    "conformance/gpu/test_corners.py::test_each_split_adds_the_residual_once",
    "conformance/gpu/test_torch_op.py::test_a_graph_of_the_compiled_operator_follows_its_input",
]


def test_tests_that_pick_rows_of_the_tables_find_them():
    done = suite(*PICKS_ROWS)
    assert done.returncode == 0 and f"{len(PICKS_ROWS)} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel(tmp_path, fault):
    test, said = FOUND_BY[fault]
    isolated = ("--isolate", "--case-limit=5") if fault in ("hangs", "aborts") else ()
    done = suite(test, f"--record={tmp_path}/record.json", *isolated, LOWLAT_STAND_IN_FAULT=fault)
    assert done.returncode == 1 and "1 failed" in done.stdout and said in done.stdout, done.stdout + done.stderr
    record = record_of(tmp_path)
    assert [one["outcome"] for one in record["tests"]] == ["failed"]
    if test == RANDOM:
        assert [cell["status"] for cell in record["cells"]] == ["failed"], record["cells"]


_BROKEN_ROW = """
from dataclasses import replace
import conformance.cases
from lowlat_gemm import dispatch
from lowlat_gemm.tables import load_table
from lowlat_gemm.tables.schema import frozen

table = load_table({family!r}, "sm90")
spec = table.projections[{n}, {k}]
config = dict(block_size=7, outputs_per_block=1, k_unroll=1, vector_width=8)
cell = replace(spec.cells[{m}], backend="skinny", config=frozen(config))
spec = replace(spec, cells=frozen({{**spec.cells, {m}: cell}}))
broken = replace(table, projections=frozen({{**table.projections, ({n}, {k}): spec}}))
for module in (dispatch, conformance.cases):
    module.load_table = lambda family, arch: broken if str(arch) == "sm90" else load_table(family, arch)
"""


def test_a_broken_table_row(tmp_path, monkeypatch):
    """A config that the kernel's predicate refuses: the cell falls back for users, and fails the suite."""
    (tmp_path / "broken_row.py").write_text(_BROKEN_ROW.format(family=CELL.family, n=CELL.n, k=CELL.k, m=CELL.m))
    monkeypatch.syspath_prepend(tmp_path)
    test = RANDOM.replace(CELL.cell.backend, "skinny")
    done = suite("-p", "broken_row", test, f"--record={tmp_path}/record.json")
    assert done.returncode == 1 and "config not valid for this shape: " in done.stdout, done.stdout + done.stderr
    assert [(cell["status"], cell["reason"]) for cell in record_of(tmp_path)["cells"]] == [
        ("failed", "its test ended before a verdict")
    ]


@pytest.mark.parametrize(
    "change", [{}, {"expires": "2020-01-01"}, {"arches": '["sm100"]'}], ids=["unused", "expired", "elsewhere"]
)
def test_a_broken_waiver(tmp_path, change):
    """With a wrong kernel a good waiver is green; with a right one, or expired or for another generation, it is not."""
    waiver = GOOD_WAIVER | {"test": f'"{RANDOM}"'}
    fault = {"LOWLAT_STAND_IN_FAULT": "drops the last of K"}
    if not change:
        good = suite(
            RANDOM,
            f"--record={tmp_path}/record.json",
            LOWLAT_WAIVERS=str(write_waivers(tmp_path / "w.toml", waiver)),
            **fault,
        )
        assert good.returncode == 0 and "1 xfailed" in good.stdout, good.stdout
        assert [cell["status"] for cell in record_of(tmp_path)["cells"]] == ["waived"]
        fault = {}
    done = suite(RANDOM, LOWLAT_WAIVERS=str(write_waivers(tmp_path / "w.toml", waiver | change)), **fault)
    assert done.returncode not in (0, 5), done.stdout


def test_a_broken_list_of_shards(tmp_path):
    """Two of three shards, or one of them twice, are not the suite."""
    from hw_matrix.merge import find_shards, shard_problems

    tests = [RANDOM, INTEGERS, RERUNS]
    for index in range(3):
        (tmp_path / str(index)).mkdir()
        done = suite(*tests, LOWLAT_SHARD=f"{index}/3", LOWLAT_RECORD_DIR=str(tmp_path / str(index)))
        assert done.returncode == 0, done.stdout + done.stderr
    shards = find_shards([tmp_path])
    assert len(shards) == 3 and shard_problems(shards) == []
    assert shard_problems(shards[:2]) == ["need each of shards 0 to 2 once, found 0, 1"]
    assert shard_problems([shards[0], *shards[:2]]) == ["need each of shards 0 to 2 once, found 0, 0, 1"]
    shards[0].data["tests"].clear()
    assert shard_problems(shards) == ["2 tests ran, 3 were collected: some were left out or ran twice"]
