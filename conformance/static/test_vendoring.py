"""The package as a copy in another tree, under another name: docs/vendoring.md, followed to the letter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from conformance.fakes import PACKAGE, run_python

ROOT = Path.cwd()  # pytest's root, with and without Bazel
GUIDE = (ROOT / "docs/vendoring.md").read_text()
NAME = "thirdparty.fast_gemm"


def block(language: str) -> str:
    """The guide's only block of code in ``language``."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A tree that the guide's commands put the copy into."""
    folder = tmp_path_factory.mktemp("tree")
    environment = {"PATH": "/usr/bin:/bin", "TREE": str(folder), "CHECKOUT": str(PACKAGE.parent)}
    subprocess.run(["bash", "-euc", block("sh")], env=environment, check=True)
    return folder


def in_tree(code: str, tree: Path, tmp_path: Path) -> str:
    result = run_python("-c", code, folder=tmp_path, path=(tree,))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_copy_has_everything_and_no_build_files(tree):
    copy = tree / "thirdparty/fast_gemm"
    for pattern in ("*.py", "*.toml"):
        wanted = {path.relative_to(PACKAGE) for path in PACKAGE.rglob(pattern)}
        assert wanted and {path.relative_to(copy) for path in copy.rglob(pattern)} == wanted
    assert (copy / "LICENSE").exists() and not list(copy.rglob("BUILD*"))


def test_the_guides_code_runs(tree, tmp_path):
    out = in_tree(block("python") + "assert y is None", tree, tmp_path)
    assert "  cell        " in out and "0 linears installed, 1 left alone" in out


WHOLE = """\
import sys
import thirdparty.fast_gemm as copy
from thirdparty.fast_gemm.execute import COMPILE_CACHE
from thirdparty.fast_gemm.tables import available_tables, load_table

for name in copy.__all__:
    getattr(copy, name)
assert available_tables() and load_table("kimi_k3", "sm90").path.endswith("thirdparty/fast_gemm/tables/kimi_k3_sm90.toml")
decision = copy.explain(1, 1536, 7168, arch="sm90")
assert decision.backend and type(decision).__module__ == "thirdparty.fast_gemm.dispatch"
if decision.runs:  # the kernel packages are here
    unit = copy.plan_for(copy.parse_arch("sm90"), 1536, 7168).units()[0]
    assert callable(COMPILE_CACHE.get(unit))
assert not [name for name in sys.modules if name.split(".")[0] == "lowlat_gemm"], "the copy imported the original"
"""


def test_every_name_of_the_copy_is_its_own(tree, tmp_path):
    in_tree(WHOLE, tree, tmp_path)


SIDE_BY_SIDE = """\
import torch
import thirdparty.fast_gemm.torch_op as copy
import lowlat_gemm.torch_op as original

assert (original.linear.name(), copy.linear.name()) == ("lowlat_gemm::linear", "thirdparty_fast_gemm::linear")
x, weight = torch.ones(2, 16), torch.ones(8, 16)
assert torch.equal(copy.linear(x, weight), original.linear(x, weight))
"""


def test_a_copy_and_the_original_live_side_by_side(tree, tmp_path):
    in_tree(SIDE_BY_SIDE, tree, tmp_path)


def test_without_the_kernel_packages_everything_imports_plans_and_explains(tree, tmp_path):
    code = block("python") + "assert y is None"
    result = run_python("-c", code, folder=tmp_path, path=(tree,), hide=("cutlass", "tvm_ffi"))
    assert result.returncode == 0 and "not installed: nvidia-cutlass-dsl, apache-tvm-ffi" in result.stdout, result.stderr
