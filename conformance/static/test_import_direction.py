"""Who imports whom inside lowlat_gemm, as docs/design.md has it. Bazel's visibility holds the same between packages."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(importlib.util.find_spec("lowlat_gemm.arch").origin).parent

# room -> rooms that it may import; a room is a file or a folder of lowlat_gemm.
ALLOWED = {
    "arch": set(),
    "backends": set(),
    "models": set(),
    "reference": set(),
    "operands": {"arch"},
    "settings": {"backends"},
    "tables": {"arch", "backends", "settings"},
    "kernels": {"arch", "backends", "operands"},
    "dispatch": {"arch", "backends", "kernels", "operands", "settings", "tables"},
    "ready": {"dispatch", "operands", "settings"},
    "execute": {"arch", "dispatch", "kernels", "operands", "ready", "settings", "tables"},
    "tensor_map": {"operands"},
    "captures": set(),
    "projection": {
        "arch", "captures", "dispatch", "execute", "kernels", "operands", "settings", "tables", "tensor_map",
    },  # fmt: skip
    "prepared_projection": {"arch", "captures", "execute", "kernels", "projection", "tensor_map"},
    "kda_branches": {"arch", "dispatch", "kernels", "models", "settings", "tables"},
    "kda_overlap": {"arch", "dispatch", "execute", "kda_branches", "kernels", "operands", "settings", "tables", "torch_op"},
    "torch_op": {"captures", "execute", "operands", "ready", "settings"},
    "warmup": {"dispatch", "execute", "operands"},
    "adapters": {
        "captures", "dispatch", "execute", "kda_overlap", "operands", "ready", "settings", "torch_op",
    },  # fmt: skip
    "__init__": set(),  # by name only, when one is asked for
}


def imported_rooms(source: str, module: tuple[str, ...]) -> set[str]:
    """Rooms that a module of lowlat_gemm imports anywhere in it; ``module`` is its path inside the package.

    Raises ValueError for an import that does not work in a copy of the package under another name.
    """
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom):
            above = module[: len(module) - node.level]
            if len(module) < node.level:
                raise ValueError(f"line {node.lineno}: import from above the package")
            paths = [tuple(node.module.split("."))] if node.module else [(alias.name,) for alias in node.names]
            paths = [path for path in paths if path != ("__version__",)]  # the package's own word, no room
            rooms |= {(above + path)[0] for path in paths}
            continue
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("lowlat_gemm", "lowlat_cli", "conformance", "hw_matrix", "tools"):
                raise ValueError(f"line {node.lineno}: import of {name}; inside lowlat_gemm every import is relative")
    return rooms


def breaches(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").parts
        try:
            rooms = imported_rooms(path.read_text(), module)
        except ValueError as error:
            found.append(f"{path.relative_to(root)}: {error}")
            continue
        if module[0] not in ALLOWED:
            found.append(f"{path.relative_to(root)}: not in the list of rooms; decide what it may import")
            continue
        for room in sorted(rooms - ALLOWED[module[0]] - {module[0]}):
            found.append(f"{path.relative_to(root)}: {module[0]} must not import {room}")
    return found


def test_imports_follow_the_design():
    assert breaches(ROOT) == []


def test_the_list_has_no_cycle():
    order, left = [], dict(ALLOWED)
    while ready := [room for room, needs in left.items() if needs <= set(order)]:
        order += ready
        for room in ready:
            del left[room]
    assert not left


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("tables/loader.py", "from ..dispatch import plan_for", "tables must not import dispatch"),
        ("tables/loader.py", "from .. import dispatch", "tables must not import dispatch"),
        ("arch.py", "def f():\n    from .tables import Table", "arch must not import tables"),
        ("kernels/skinny.py", "from ..adapters.torch_nn import x", "kernels must not import adapters"),
        ("dispatch.py", "from lowlat_gemm.arch import Arch", "every import is relative"),
        ("dispatch.py", "import conformance.cases", "import of conformance.cases"),
        ("dispatch.py", "from ..conformance import cases", "above the package"),
        ("extra.py", "", "not in the list of rooms"),
    ],
)
def test_a_breach_is_found(tmp_path, path, source, message):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(source)
    assert len(found := breaches(tmp_path)) == 1 and message in found[0]
