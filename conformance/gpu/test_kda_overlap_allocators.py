"""The memory tests of ``test_kda_overlap.py`` with torch's other allocators, which a process has from its start or never."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conformance.fakes import inner_environment
from conformance.seed import SEED

FILE = "conformance/gpu/test_kda_overlap.py"
TESTS = ["test_memory_is_not_given_away_while_the_aux_stream_uses_it", "test_memory_that_is_allocated_between_fork_and_join",
         "test_a_launch_that_raises_leaves_no_work_that_is_not_joined"]  # fmt: skip
LIMIT_S = 150
OUTPUT_CHARACTERS = 6000
#: What a child is: torch says which allocator it has before any test runs.
CHILD = """
import sys
import pytest
import torch

kept = torch.zeros(1, device="cuda")
segments = torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []
print("allocator:", torch.cuda.get_allocator_backend(), "expandable:", any(one["is_expandable"] for one in segments), flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.case_limit(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("expandable_segments:True", "allocator: native expandable: True"),
        ("backend:cudaMallocAsync", "allocator: cudaMallocAsync expandable: False"),
    ],
    ids=["expandable_segments", "cudaMallocAsync"],
)
def test_memory_with_another_allocator(arch, tmp_path, setting, said):
    environment = inner_environment() | {"PYTORCH_CUDA_ALLOC_CONF": setting, "LOWLAT_TEST_SEED": str(SEED)}
    environment["LOWLAT_TEST_SANITIZER"] = "1"  # as in a sanitizer's run, it makes those kernels alone that its tests launch
    environment |= {name: os.environ[name] for name in ("LOWLAT_GEMM_CACHE_DIR",) if name in os.environ}
    environment.pop("PYTORCH_ALLOC_CONF", None)  # the newer name of the same variable
    options = ["-q", "-c", "pyproject.toml", "--rootdir=.", "-p", "conformance.plugin", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/child"]
    options += [f"--arch={arch.name}", "--require-gpu"]
    tests = [f"{FILE}::{name}" for name in TESTS]
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *options, *tests],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT_S,
        )  # fmt: skip
        output, how = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, how = error.stdout or b"", f"not done within {LIMIT_S} s"
    text = output.decode(errors="replace")
    assert how == f"exit code {os.EX_OK}" and said in text, f"{setting}: {how}\n{text[-OUTPUT_CHARACTERS:]}"
