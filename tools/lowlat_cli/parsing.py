"""Reading what users write for shapes and token counts."""

from __future__ import annotations

import re

from .checking import Shape


def tokens(text: str) -> list[int]:
    """"1,2,4-8" as [1, 2, 4, 5, 6, 7, 8]. ValueError for anything else, naming the part."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last:
            raise ValueError(f"token counts {text!r}: {part!r} is neither a count nor a range such as 4-8")
        found += range(first, last + 1)
    return sorted(set(found))


def shape(text: str) -> Shape:
    """"1536x7168" as that (N, K). ValueError for anything else."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or int(match[1]) < 1 or int(match[2]) < 8 or int(match[2]) % 8:
        raise ValueError(f"shape {text!r}: expected NxK, such as 1536x7168, with K a multiple of 8")
    return Shape(int(match[1]), int(match[2]), (text,))
