"""What the compiler made of a kernel: registers, spills, machine code and PTX, read with NVIDIA's binary tools."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.compiling import compile_now


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel. ``stack_bytes`` and ``local_accesses`` above zero mean spills."""

    registers: int
    stack_bytes: int
    local_accesses: int
    sass: str


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not on PATH: install the package nvidia-cuda-{name}")
    return found


def read_cubin(path: Path) -> MachineCode:
    """Reads the one kernel of a cubin. Raises CalledProcessError when the tools cannot."""

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = run(_tool("cuobjdump"), "-res-usage", str(path))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage says nothing of registers: {usage!r}")
    # With its data-flow analysis, which finds where jump tables lead.
    sass = run(_tool("nvdisasm"), "-c", str(path))
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


@functools.lru_cache(maxsize=None)
def compiled(unit: CompileUnit) -> Compiled:
    """Compiles ``unit`` once a process. Raises what the compiler raises."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = compile_now(unit, f"--keep-cubin --keep-ptx --dump-dir={folder}")
        cubins = list(Path(folder).glob("*.cubin"))
        if len(cubins) != 1:
            raise ValueError(f"{unit}: expected one cubin, found {cubins}")
        constants = frozenset(map(int, re.findall(r"constant\((\d+) : i64\)", str(kernel.ir_module))))
        return Compiled(read_cubin(cubins[0]), next(Path(folder).glob("*.ptx")).read_text(), constants)
