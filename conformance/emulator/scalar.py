"""PTX statements of one thread as Python: registers, integers, predicates, conversions, branches.

Registers hold unsigned integers; what an instruction's type says of signs and widths is done when it runs. Anything that
is not listed is an error: a kernel is followed wholly or not at all.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable

from conformance.control_flow import Instruction

_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BINARY = {
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "min": min, "max": max,
}  # fmt: skip


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def to_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]


def from_float(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def to_bfloat16(word: int) -> int:
    """The upper half of an FP32 word, rounded to nearest even."""
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


def operands(text: str) -> list[str]:
    """Operands of a statement; those in braces or brackets are one."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


def registers(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]


def width(opcode: str) -> tuple[str, int]:
    """("s", 32) of "mad.lo.s32"."""
    found = re.findall(r"\.([subf])(8|16|32|64)\b", opcode)
    return (found[-1][0], int(found[-1][1])) if found else ("b", 1)


class Registers(dict):
    """The registers of a thread, by name."""

    def value(self, text: str) -> int:
        if text in self:
            return self[text]
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
            return int(text[2:], 16)
        raise KeyError(f"{text} is read and was never written")

    def address(self, text: str) -> int:
        base, _, offset = text.strip("[] ").partition("+")
        return self.value(base) + (int(offset) if offset else 0)


def arithmetic(one: Instruction) -> Callable[[Registers], None] | None:
    """What a statement does to a thread's registers; None for one that is not of registers alone."""
    name, parts = (
        one.opcode.split(".")[0],
        operands(one.text.split(maxsplit=1)[1]) if " " in one.text.replace("\t", " ") else [],
    )
    kind, bits = width(one.opcode)
    mask = (1 << bits) - 1

    def read(thread: Registers, text: str) -> int:
        value = thread.value(text)
        return signed(value, bits) if kind == "s" else value & mask

    def writing(compute: Callable[[Registers], int]) -> Callable[[Registers], None]:
        target = parts[0]
        return lambda thread: thread.__setitem__(target, compute(thread) & mask)

    if one.is_a("mov", "cvta") and ("{" in one.text):
        return _packed(parts, bits)
    if one.is_a("mov.f32"):
        return lambda t: t.__setitem__(parts[0], t.value(parts[1]))
    if one.is_a("mov"):
        return writing(lambda t: t.value(parts[1]))
    if one.is_a("add.f32"):
        return writing(lambda t: from_float(to_float(t.value(parts[1])) + to_float(t.value(parts[2]))))
    if one.is_a("add.rn.f32.bf16"):
        return writing(lambda t: from_float(to_float(t.value(parts[1]) << 16) + to_float(t.value(parts[2]))))
    if one.is_a("fma.rn.f32", "fma.rn.f32.bf16"):
        lift = 16 if ".bf16" in one.opcode else 0

        def product_and_sum(t: Registers) -> int:
            a, b = (to_float(t.value(part) << lift) for part in parts[1:3])
            return from_float(a * b + to_float(t.value(parts[3])))

        return lambda t: t.__setitem__(parts[0], product_and_sum(t))
    if name == "selp":
        return lambda t: t.__setitem__(parts[0], t.value(parts[1] if t[parts[3]] else parts[2]))
    if kind == "f" or ".bf16" in one.opcode:
        return _conversion_of_floats(one, parts)
    if name in _BINARY:
        return writing(lambda t: _BINARY[name](read(t, parts[1]), read(t, parts[2])))
    if name == "not":
        return writing(lambda t: ~read(t, parts[1]))
    if name == "neg":
        return writing(lambda t: -read(t, parts[1]))
    if name == "shl":
        return writing(lambda t: read(t, parts[1]) << min(t.value(parts[2]), bits))
    if name == "shr":
        return writing(lambda t: read(t, parts[1]) >> min(t.value(parts[2]), bits))
    if one.is_a("mul.wide"):
        return lambda t: t.__setitem__(parts[0], read(t, parts[1]) * read(t, parts[2]) & ((1 << 2 * bits) - 1))
    if one.is_a("mul.hi"):
        return writing(lambda t: read(t, parts[1]) * read(t, parts[2]) >> bits)
    if one.is_a("mul.lo"):
        return writing(lambda t: read(t, parts[1]) * read(t, parts[2]))
    if one.is_a("mad.lo"):
        return writing(lambda t: read(t, parts[1]) * read(t, parts[2]) + read(t, parts[3]))
    if name == "setp":
        compare = _COMPARE[one.opcode.split(".")[1]]
        return lambda t: t.__setitem__(parts[0], compare(read(t, parts[1]), read(t, parts[2])))
    if name == "cvt":
        return _conversion(one, parts)
    return None


def _conversion_of_floats(one: Instruction, parts: list[str]) -> Callable[[Registers], None] | None:
    if one.is_a("cvt.rn.bf16.f32"):
        return lambda t: t.__setitem__(parts[0], to_bfloat16(t.value(parts[1])))
    if one.is_a("cvt.rn.bf16x2.f32"):
        return lambda t: t.__setitem__(parts[0], to_bfloat16(t.value(parts[1])) << 16 | to_bfloat16(t.value(parts[2])))
    if one.is_a("cvt.f32.bf16"):
        return lambda t: t.__setitem__(parts[0], (t.value(parts[1]) & 0xFFFF) << 16)
    return None


def _packed(parts: list[str], bits: int) -> Callable[[Registers], None]:
    """mov between a register and the list of its parts, the lowest first."""
    if parts[0].startswith("{"):
        names, share = registers(parts[0]), bits // len(registers(parts[0]))

        def unpack(thread: Registers) -> None:
            value = thread.value(parts[1])
            for i, name in enumerate(names):
                thread[name] = value >> (i * share) & ((1 << share) - 1)

        return unpack
    names, share = registers(parts[1]), bits // len(registers(parts[1]))

    def pack(thread: Registers) -> None:
        thread[parts[0]] = sum((thread.value(name) & ((1 << share) - 1)) << (i * share) for i, name in enumerate(names))

    return pack


def _conversion(one: Instruction, parts: list[str]) -> Callable[[Registers], None]:
    (_, to_bits), (kind, bits) = ((found[0], int(found[1])) for found in re.findall(r"\.([su])(16|32|64)", one.opcode))

    def convert(thread: Registers) -> None:
        value = thread.value(parts[1])
        value = signed(value, bits) if kind == "s" else value & ((1 << bits) - 1)
        thread[parts[0]] = value & ((1 << to_bits) - 1)

    return convert
