"""`pip install .` gives a package that works outside this tree: its modules, its tables, its command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conformance import plugin

ROOT = Path(plugin.__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package installed into it, from a copy: setuptools writes beside the sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("lowlat_gemm", "tools/lowlat_cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", target, source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def files(root: Path, *patterns: str) -> set[str]:
    return {str(path.relative_to(root)) for pattern in patterns for path in root.rglob(pattern)}


def test_all_modules_and_tables_are_installed(installed):
    assert files(installed / "lowlat_gemm", "*.py", "*.toml") == files(ROOT / "lowlat_gemm", "*.py", "*.toml")
    assert files(installed / "lowlat_cli", "*.py") == files(ROOT / "tools" / "lowlat_cli", "*.py")
    assert any(name.endswith(".toml") for name in files(installed / "lowlat_gemm" / "tables", "*"))
    assert (installed / "bin" / "lowlat").exists()


def test_it_imports_without_torch_or_anything_else(installed):
    code = "import lowlat_gemm, lowlat_gemm.tables, sys; print(lowlat_gemm.__file__); assert 'torch' not in sys.modules"
    # -S: no site-packages, so nothing but the standard library and the package is there.
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(installed)}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(installed / "lowlat_gemm" / "__init__.py")


def test_the_command_runs(installed):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(installed)}
    result = subprocess.run([sys.executable, "-m", "lowlat_cli", "--help"], capture_output=True, text=True, cwd="/", env=environ)
    assert result.returncode == 0 and "check" in result.stdout, result.stdout + result.stderr


def test_the_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = ROOT / "requirements" / "base.in"
    assert project["name"] == "lowlat_gemm" and project["requires-python"] == ">=3.11"
    kernels = next(line for line in project["optional-dependencies"]["kernels"] if "cutlass" in line)
    locked = next(line for line in base.read_text().splitlines() if "cutlass" in line)
    assert locked.startswith(kernels.removesuffix("*"))
