"""What the compiler made of a kernel: registers, spills, machine code and PTX, read with NVIDIA's binary tools."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.disassembly import disassembled, disassembled_together, run
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.compiling import compile_now


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel. ``stack_bytes`` and ``local_accesses`` above zero mean spills."""

    registers: int
    stack_bytes: int
    local_accesses: int
    sass: str


def read_cubin(path: Path, sass: str | None = None) -> MachineCode:
    """Reads the one kernel of a cubin; ``sass``: its code as text, where that is known. Raises ValueError with the tool's
    word when one cannot."""
    usage = run("cuobjdump", "-res-usage", str(path))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage says nothing of registers: {usage!r}")
    sass = disassembled(path) if sass is None else sass
    return MachineCode(int(match[1]), int(match[2]), len(re.findall(r"\b(?:STL|LDL)\b", sass)), sass)


@dataclass(frozen=True)
class Compiled:
    """A unit's code. ``constants``: 64-bit constants of the launching code; one is the shared memory it asks for."""

    code: MachineCode
    ptx: str
    constants: frozenset[int]

    @property
    def threads(self) -> int:
        """Threads of a CTA, as the kernel declares them."""
        return int(re.search(r"\.(?:reqntid|maxntid) (\d+)", self.ptx)[1])


#: Units that are compiled and disassembled at a time, where it is known which come.
TOGETHER = 16
_expected: list[CompileUnit] = []
_made: dict[CompileUnit, Compiled | Exception] = {}


def expect(units: Iterable[CompileUnit]) -> None:
    """Says which units ``compiled`` will be asked for, in order: it makes the next of them together."""
    _expected[:] = dict.fromkeys(units)


def compiled(unit: CompileUnit) -> Compiled:
    """Compiles ``unit`` once a process. Raises what the compiler raises."""
    if unit not in _made:
        behind = _expected[_expected.index(unit) + 1 :] if unit in _expected else []
        _make_together([unit, *(one for one in behind if one not in _made)][:TOGETHER])
    made = _made[unit]
    if isinstance(made, Exception):
        raise made.with_traceback(None)  # raised again for each test of the unit: no pile of frames
    return made


def _make_together(units: Sequence[CompileUnit]) -> None:
    with tempfile.TemporaryDirectory() as root:
        done = {}
        for i, unit in enumerate(units):
            folder = Path(root) / str(i)
            folder.mkdir()
            try:
                done[unit] = _compile_into(folder, unit)
            except Exception as error:  # the DSL raises many types; it is the unit's own test that fails
                _made[unit] = error
        for (unit, (cubin, ptx, constants)), sass in zip(
            done.items(), disassembled_together([cubin for cubin, _, _ in done.values()])
        ):
            try:
                _made[unit] = Compiled(read_cubin(cubin, sass), ptx, constants)
            except ValueError as error:
                _made[unit] = error


def _compile_into(folder: Path, unit: CompileUnit) -> tuple[Path, str, frozenset[int]]:
    """The cubin, PTX and constants of ``unit``."""
    kernel = compile_now(unit, f"--keep-cubin --keep-ptx --dump-dir={folder}")
    cubins = list(folder.glob("*.cubin"))
    if len(cubins) != 1:
        raise ValueError(f"{unit}: expected one cubin, found {cubins}")
    constants = frozenset(map(int, re.findall(r"constant\((\d+) : i64\)", str(kernel.ir_module))))
    return cubins[0], next(folder.glob("*.ptx")).read_text(), constants
