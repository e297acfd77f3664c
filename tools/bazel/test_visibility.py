"""A breach of the dependency direction does not build: what each room may see is what docs/design.md lets it use.

The answers come from Bazel's `visible()` over the real BUILD files, the same data that makes it refuse a target.
Inside one package everything is visible; there a wrong edge is a cycle, or test_import_direction.py's to find.
"""

from pathlib import Path

import pytest

PARTS = {
    "adapters": "//lowlat_gemm/adapters:vllm",
    "kernels": "//lowlat_gemm/kernels:kernels",
    "tables": "//lowlat_gemm/tables:tables",
}
ADAPTERS = {f"//lowlat_gemm/adapters:{name}" for name in ("sglang", "torch_nn", "vllm")}
LIBRARY = set(PARTS.values()) | {
    f"//lowlat_gemm:{name}"
    for name in ("arch", "backends", "dispatch", "execute", "init", "lowlat_gemm", "models", "operands", "reference", "settings")
    + ("ready", "torch_op", "warmup")
} | ADAPTERS
USERS = {"//conformance:lib", "//tools:lowlat_cli"}
# Visible to all, also outside of this repository; for a part of the library to use it would be a cycle.
EVERYBODY = {"//lowlat_gemm:lowlat_gemm", "//lowlat_gemm:init"}

EXPECTED = {
    "tables": EVERYBODY | {"//lowlat_gemm:arch", "//lowlat_gemm:backends", "//lowlat_gemm:settings"},
    "kernels": EVERYBODY | {"//lowlat_gemm:arch", "//lowlat_gemm:backends", "//lowlat_gemm:operands"},
    "adapters": EVERYBODY
    | {f"//lowlat_gemm:{name}" for name in ("dispatch", "execute", "operands", "ready", "settings", "torch_op", "warmup")}
    | ADAPTERS,
    "library": LIBRARY,  # never //conformance or //tools
    "conformance": LIBRARY | USERS,
    "tools": LIBRARY | USERS,
}


@pytest.mark.parametrize("room", EXPECTED)
def test_a_room_sees_what_the_design_lets_it_use(room):
    answer = Path(f"tools/bazel/visibility_{room}.txt").read_text().split()
    assert set(answer) - {PARTS.get(room)} == EXPECTED[room] - {PARTS.get(room)}
