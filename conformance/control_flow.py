"""Control flow of machine code and of PTX: which instruction can run before which.

A program is its instructions in order and, for each, those that may follow. "Every path to A passes B" is asked as: can
A be reached from the entry when B's instructions end every path?
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([^;]+?)\s*;")
_LABEL = re.compile(r"^\s*([.$][\w$.]+):")
_SASS_TARGET = re.compile(r"`\(([^)]+)\)")
_SASS_TABLE = re.compile(r'\(\*"BRANCH_TARGETS ([^"]+)"\*\)')
_PTX_TARGET = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")


@dataclass(frozen=True)
class Instruction:
    """``guard``: its predicate ("@!P0") or None. ``text``: without the guard."""

    text: str
    guard: str | None = None

    @functools.cached_property
    def opcode(self) -> str:
        """ "LDG.E.128", "tcgen05.ld.sync.aligned.16x256b.x1.b32"."""
        return self.text.split(maxsplit=1)[0]

    def is_a(self, *names: str) -> bool:
        """Whether the opcode is one of ``names``, or one of them with modifiers."""
        opcode = self.opcode
        for name in names:
            if opcode.startswith(name) and (len(opcode) == len(name) or opcode[len(name)] == "."):
                return True
        return False


class Program:
    """``following[i]``: indices of the instructions that may run after the i-th. The entry is the first."""

    def __init__(self, instructions: list[Instruction], following: list[set[int]]):
        self.instructions, self.following = instructions, following

    def where(self, test: Callable[[Instruction], bool]) -> list[int]:
        return [i for i, one in enumerate(self.instructions) if test(one)]

    def all_of(self, *names: str) -> list[int]:
        """Indices of the instructions of these opcodes."""
        return self.where(lambda one: one.is_a(*names))

    def reachable(self, starts: Iterable[int], without: Iterable[int] = ()) -> set[int]:
        """What can run from ``starts`` on, these included, when a path ends at each of ``without``."""
        stops = set(without)
        seen, todo = set(), list(starts)
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                if i not in stops:
                    todo.extend(self.following[i])
        return seen - stops

    def before(self, waits: Iterable[int]) -> set[int]:
        """What can run before any of ``waits`` has."""
        return self.reachable([0], waits)

    def after(self, starts: Iterable[int], without: Iterable[int] = ()) -> set[int]:
        """What can run after one of ``starts`` with none of ``without`` between."""
        return self.reachable({j for i in starts for j in self.following[i]}, without)


def _linked(rows: list[tuple[Instruction, list[str], bool]], labels: dict[str, int]) -> Program:
    """``rows``: instruction, labels that it may go to, whether the next one may follow."""
    following = []
    for i, (_, targets, falls_through) in enumerate(rows):
        nexts = {labels[name] for name in targets}
        if falls_through and i + 1 < len(rows):
            nexts.add(i + 1)
        following.append({j for j in nexts if j < len(rows)})
    return Program([row[0] for row in rows], following)


def parse_sass(text: str) -> Program:
    """The program in the output of ``nvdisasm -c``. Raises ValueError for a jump whose target the text does not show.

    BSSY names where its BSYNC goes on. A jump through a table (of ranks, with a split of 8) may go wherever nvdisasm
    says that the table leads. A called routine may return to behind any call.
    """
    rows, labels, joins, calls = [], {}, {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(rows)
        elif found := _SASS_LINE.match(line):
            guard, body = found[2], found[3]
            one = Instruction(body, guard)
            target, table = _SASS_TARGET.search(body), _SASS_TABLE.search(body)
            targets, ends = [], False
            if one.is_a("BSSY"):
                joins[body.split()[1].rstrip(",")] = target[1]
            elif one.is_a("BSYNC"):
                targets = [joins[body.split()[1]]]
            elif one.is_a("BRX", "BRXU") and table is not None:
                targets, ends = table[1].split(","), True
            elif one.is_a("BRA", "CALL", "BRX", "JMP", "JMX", "BRXU", "JMXU"):
                if target is None:
                    raise ValueError(f"a jump without a label: {body}")
                targets, ends = [target[1]], not one.is_a("CALL")
                calls += [len(rows)] * one.is_a("CALL")
            elif one.is_a("EXIT", "KILL"):
                ends = True
            elif one.is_a("RET"):
                targets, ends = ["return"], True
            conditional = guard is not None or re.search(r"\bBRA\S*\s+!?U?P", body) is not None
            rows.append((one, targets, conditional or not ends))
    missing = {name for _, targets, _ in rows for name in targets} - set(labels) - {"return"}
    if missing or not rows:
        raise ValueError(f"{len(rows)} instructions; labels that are not there: {sorted(missing)}")
    returns = [f"return {i}" for i in range(len(calls))]
    labels |= {name: call + 1 for name, call in zip(returns, calls)}
    return _linked([(one, returns if "return" in to else to, on) for one, to, on in rows], labels)


def parse_ptx(text: str) -> Program:
    """The program of the one kernel in ``text``, by statements. Waits in inline assembly are taken to go on."""
    body = re.sub(r"//[^\n]*", "", text[text.index("{", text.index(".entry")) + 1 :])
    rows, labels = [], {}
    for statement in re.split(r"[;\n]", body):
        statement = statement.strip()
        while label := re.match(r"(\$\w+):\s*", statement):
            labels[label[1]] = len(rows)
            statement = statement[label.end() :]
        if not statement or statement[0] in "{}." or statement.endswith(":"):
            continue
        guard = re.match(r"(@!?%?\w+)\s+", statement)
        one = Instruction(statement[guard.end() :] if guard else statement, guard[1] if guard else None)
        target = _PTX_TARGET.search(one.text)
        ends = target is not None or one.is_a("ret", "trap", "exit")
        rows.append((one, [target[1]] if target else [], guard is not None or not ends))
    return _linked(rows, labels)
