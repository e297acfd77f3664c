"""What the compiler made of a kernel: registers, spills, machine code and PTX, read with NVIDIA's binary tools."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
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
    """The tool of the package nvidia-cuda-NAME where it is installed, else the one on PATH: a toolkit of a machine may be
    older than the generations that are compiled for here."""
    packaged = os.pathsep.join(os.path.join(entry, "nvidia/cu13/bin") for entry in sys.path)
    found = shutil.which(name, path=packaged) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: the package nvidia-cuda-{name} brings it")
    return found


def read_cubin(path: Path) -> MachineCode:
    """Reads the one kernel of a cubin. Raises ValueError with the tool's word when one cannot."""

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    usage = run(_tool("cuobjdump"), "-res-usage", str(path))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage says nothing of registers: {usage!r}")
    sass = run(_tool("nvdisasm"), "-c", "-ndf", str(path))
    if re.search(r"\b(?:BRX|JMX)", sass):  # where a jump table leads takes data-flow analysis, a third of its time
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
