"""The compiler's own environment variables do not change for which generation a kernel is compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conformance.cases import written_units

_COMPILE = """
import re, sys
from conformance.cases import written_units
from lowlat_gemm.arch import parse_arch
from lowlat_gemm.kernels.compiling import compile_now
compiled = compile_now(written_units(parse_arch(sys.argv[1]))[0], "--keep-ptx --dump-dir=" + sys.argv[2])
"""


@pytest.mark.parametrize("foreign", ["sm_120a", "sm_90a", "sm_100a"])
def test_a_foreign_arch_in_the_environment_changes_nothing(arch, foreign, tmp_path):
    """Another package may have set CUTE_DSL_ARCH for a GPU of its own."""
    assert written_units(arch)
    environment = os.environ | {"CUTE_DSL_ARCH": foreign, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _COMPILE, arch.name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    (ptx,) = tmp_path.glob("*.ptx")
    assert f".target {arch.compile_target}" in ptx.read_text(), ptx.read_text()[:300]
