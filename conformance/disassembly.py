"""Machine code of many cubins as text, with one run of nvdisasm.

To start it takes longer (0.4 s) than to show a kernel. It takes one file, so the kernels' code is put into one ELF.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HEADER, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_ELF_HEADER = 64
_PROGBITS, _SYMTAB, _STRTAB, _NOBITS = 1, 2, 3, 8
_GLOBAL_FUNCTION, _CUDA_ENTRY = 0x12, 0x10


def tool(name: str) -> str:
    """The tool of the package nvidia-cuda-NAME where it is installed, else the one on PATH: a toolkit of a machine may be
    older than the generations that are compiled for here."""
    packaged = os.pathsep.join(os.path.join(entry, "nvidia/cu13/bin") for entry in sys.path)
    found = shutil.which(name, path=packaged) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: the package nvidia-cuda-{name} brings it")
    return found


def run(name: str, *arguments: str) -> str:
    """What the tool prints. Raises ValueError with its word when it fails."""
    command = (tool(name), *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def disassembled(cubin: Path) -> str:
    """The code of one cubin. Raises ValueError with the tool's word when it cannot be shown."""
    text = run("nvdisasm", "-c", "-ndf", str(cubin))
    return run("nvdisasm", "-c", str(cubin)) if _has_jump_table(text) else text


def disassembled_together(cubins: Sequence[Path]) -> list[str | None]:
    """The code of each; None where it has to be shown alone: jump tables, relocations, or one that nvdisasm refuses."""
    images = [path.read_bytes() for path in cubins]
    found = [_code_of(image) for image in images]
    texts: list[str | None] = [None] * len(cubins)
    if not any(found):
        return texts
    header = next(image[:_ELF_HEADER] for image, code in zip(images, found) if code is not None)
    # nvdisasm reads all code as that of the generation that the header's flags name.
    fit = [(i, code) for i, code in enumerate(found) if code is not None and _flags(images[i]) == _flags(header)]
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "together.cubin"
        image.write_bytes(_image(header, [code for _, code in fit]))
        try:
            text = run("nvdisasm", "-c", "-ndf", str(image))
        except ValueError:
            return texts
    parts = re.split(r"^//-+ \.text\.k(\d+) +-+$", text, flags=re.MULTILINE)
    if sorted(map(int, parts[1::2])) != list(range(len(fit))):
        return texts  # else the code of a kernel could be taken for that of the one before
    for number, part in zip(parts[1::2], parts[2::2]):
        if not _has_jump_table(part):
            texts[fit[int(number)][0]] = part
    return texts


def _has_jump_table(text: str) -> bool:
    """Where such a jump leads takes data-flow analysis, a third of nvdisasm's time; it changes no other line."""
    return re.search(r"\b(?:BRX|JMX)", text) is not None


def _flags(image: bytes) -> bytes:
    return image[0x30:0x34]


def _code_of(cubin: bytes) -> tuple[int, bytes] | None:
    """The info word and the bytes of the only code section; None with several, with relocations in it, or in a file that
    is none."""
    try:
        return _only_code_of(cubin)
    except (struct.error, ValueError, IndexError):
        return None  # nvdisasm says what is wrong with it, to the test of its kernel


def _only_code_of(cubin: bytes) -> tuple[int, bytes] | None:
    (start,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [_HEADER.unpack_from(cubin, start + _HEADER.size * i) for i in range(count)]
    strings = cubin[headers[names][4] :]
    named = [(strings[header[0] : strings.index(b"\0", header[0])].decode(), header) for header in headers]
    code = [header for name, header in named if name.startswith(".text.") and header[1] != _NOBITS]
    relocated = any(header[5] for name, header in named if name.startswith((".rel.text.", ".rela.text.")))
    if len(code) != 1 or relocated:
        return None
    return code[0][7], cubin[code[0][4] : code[0][4] + code[0][5]]


def _image(elf_header: bytes, codes: Sequence[tuple[int, bytes]]) -> bytes:
    """An ELF with the code sections ``.text.k0``, ``.text.k1``, ... and, for each, the symbol of a kernel."""
    out, rows = bytearray(elf_header), []
    names, strings, symbols = b"\0.shstrtab\0.strtab\0.symtab\0", b"\0", bytes(_SYMBOL.size)

    def section(name: int, kind: int, data: bytes, flags=0, link=0, info=0, align=8, entry=0) -> None:
        out.extend(bytes(-len(out) % align))
        rows.append((name, kind, flags, 0, len(out), len(data), link, info, align, entry))
        out.extend(data)

    for i, (info, code) in enumerate(codes):
        # The upper byte of info is the register count, the rest the symbol's index.
        section(len(names), _PROGBITS, code, flags=6, link=len(codes) + 3, info=info & 0xFF000000 | i + 1, align=128)
        symbols += _SYMBOL.pack(len(strings), _GLOBAL_FUNCTION, _CUDA_ENTRY, i + 1, 0, len(code))
        names, strings = names + b".text.k%d\0" % i, strings + b"k%d\0" % i
    section(names.index(b".shstrtab"), _STRTAB, names)
    section(names.index(b".strtab"), _STRTAB, strings)
    section(names.index(b".symtab"), _SYMTAB, symbols, link=len(codes) + 2, info=1, entry=_SYMBOL.size)
    out.extend(bytes(-len(out) % 8))
    at = len(out)
    out.extend(bytes(_HEADER.size) + b"".join(_HEADER.pack(*row) for row in rows))
    struct.pack_into("<QQ", out, 0x20, 0, at)
    struct.pack_into("<HHHHHH", out, 0x34, 64, 0, 0, _HEADER.size, len(rows) + 1, len(codes) + 1)
    return bytes(out)
