"""The report as one static HTML page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import collections
import html
from collections.abc import Iterable
from pathlib import Path

from .coverage import MEANING, PROVENANCE_MEANING, CellState, Proof, Record
from .markdown import number
from .plots import by_shape, over_floor_by_tokens
from .summary import CUBLAS, OURS, Generation, Summary

_CSS = Path(__file__).with_name("page.css")
#: CSS class and letter of each proof in the grid.
_CLASS = {
    Proof.HARDWARE: ("hardware", "H"),
    Proof.WAIVED: ("waived", "W"),
    Proof.FAILED: ("failed", "F"),
    Proof.MODEL: ("model", "M"),
    Proof.COMPILED: ("compile", "C"),
    Proof.NONE: ("none", "\u00b7"),
}
#: Characters of a command that are shown unfolded.
_LONG_COMMAND = 60
_escape = html.escape


def render(summary: Summary) -> str:
    body = [_head(summary), _cards(summary), _legend(Proof), *map(_generation, summary.generations), _words()]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lowlat_gemm: what is proven where</title>\n<style>\n{_CSS.read_text()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _head(summary: Summary) -> str:
    cells = sum(len(generation.states) for generation in summary.generations)
    ran = sum(generation.proofs[Proof.HARDWARE] for generation in summary.generations)
    missing = len(summary.missing)
    verdict = (
        f"{missing} cells claim hardware and have no good record."
        if missing
        else "Every cell that claims hardware has a record."
    )
    return (
        "<h1>What is proven where</h1>\n"
        f"<p>lowlat_gemm names a kernel for {cells} cells: a local weight shape and a token count on one generation. "
        f"{ran} of them ran on that hardware and were right, element by element, against FP64.</p>\n"
        f'<div class="callout {"bad" if missing else "good"}">{verdict}</div>'
    )


def _bar(generation: Generation) -> str:
    total = len(generation.states) or 1
    parts = [
        f'<i class="{_CLASS[proof][0]}" style="width:{100 * count / total:.2f}%" title="{count} {proof}"></i>'
        for proof, count in generation.proofs.items()
        if count
    ]
    return f'<div class="bar">{"".join(parts)}</div>'


def _strongest(generation: Generation) -> tuple[Proof, int]:
    """What the card of a generation counts: the strongest good proof that any cell has."""
    for proof in (Proof.HARDWARE, Proof.MODEL, Proof.COMPILED):
        if generation.proofs[proof]:
            return proof, generation.proofs[proof]
    return Proof.HARDWARE, 0


def _cards(summary: Summary) -> str:
    cards = []
    for generation in summary.generations:
        proof, count = _strongest(generation)
        cards.append(
            f'<a class="card" href="#{generation.arch}"><b>{generation.arch.name.upper()}</b> '
            f'<span class="soft">{_escape(generation.runner.gpu)}</span>'
            f'<p class="big">{count}</p><p class="of">of {len(generation.states)} cells {proof}</p>'
            f"{_bar(generation)}</a>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _legend(proofs: Iterable[Proof]) -> str:
    items = [f'<span><i class="dot {_CLASS[proof][0]}"></i>{proof} ({_CLASS[proof][1]})</span>' for proof in proofs]
    return f'<div class="legend">{"".join(items)}</div>'


def _generation(generation: Generation) -> str:
    parts = [
        f'<h2 id="{generation.arch}">{generation.arch.name.upper()}: {_escape(generation.runner.gpu)}</h2>',
        _facts(generation),
        _missing(generation),
        "<h3>Cells, by shape and tokens</h3>",
        _grid(generation),
        _times(generation),
        _changes(generation),
        _records(generation),
    ]
    return "\n".join(filter(None, parts))


def _facts(generation: Generation) -> str:
    worst, ours, cublas = generation.worst, generation.mean_over_floor(OURS), generation.mean_over_floor(CUBLAS)
    facts = [(str(len(generation.states)), "cells")]
    facts += [(str(count), str(proof)) for proof, count in generation.proofs.items() if count]
    facts += [(str(count), f"{kind} choices") for kind, count in generation.provenances.items() if count]
    if generation.optional:
        facts.append((str(generation.optional), "optional cells beside them, nothing shown, not dispatched"))
    if worst is not None:
        where = f"{worst.case.n} x {worst.case.k}, M = {worst.case.m}"
        facts.append((f"{worst.worst_share:.2f}", f"worst error / its bound ({where})"))
    if ours is not None:
        facts += [(f"{number(ours)} x", "ours over the floor"), (f"{number(cublas)} x", "cuBLAS over the floor")]
    items = "".join(f"<div><b>{_escape(value)}</b><span>{_escape(text)}</span></div>" for value, text in facts)
    return f'<div class="facts">{items}</div>'


def _missing(generation: Generation) -> str:
    stale = [
        f"The kernels' sources have changed since <code>{_escape(r.name)}</code> was made." for r in generation.stale
    ]
    note = f'<div class="callout">{" ".join(stale)}</div>' if stale else ""
    note += "".join(f'<div class="callout bad">{_escape(text)}</div>' for text in generation.red)
    if not generation.runner.claims_hardware:
        return (
            note + '<p class="soft">No machine of this generation is there: nothing here claims to have run on one.</p>'
        )
    if not generation.missing:
        return note
    by_kind = collections.Counter((state.case.cell.backend, state.proof) for state in generation.missing)
    items = "; ".join(f"{count} on <code>{backend}</code> ({proof})" for (backend, proof), count in by_kind.items())
    said = f"{len(generation.missing)} cells claim hardware and have no good record: {items}."
    return f'{note}<div class="callout bad">{said}</div>'


def _grid(generation: Generation) -> str:
    """A row a shape, a column a token count; a cell's title says everything that is known of it."""
    rows: dict[tuple, dict[int, CellState]] = {}
    for state in generation.states:
        case = state.case
        rows.setdefault((case.family, case.n, case.k, case.residual), {})[case.m] = state
    tokens = sorted({state.case.m for state in generation.states})
    head = "".join(f"<th>{m if m == 1 or m % 4 == 0 else ''}</th>" for m in tokens)  # 64 of them are a blur
    lines = [f'<tr><th>N x K</th>{head}<th class="text">projection</th></tr>']
    families: set[str] = set()
    for (family, n, k, residual), row in rows.items():
        if family not in families:
            families.add(family)
            lines.append(f'<tr><th class="text family" colspan="{len(tokens) + 2}">{_escape(family)}</th></tr>')
        label = next(iter(row.values())).case.plan.spec.label
        cells = "".join(_cell(row.get(m)) for m in tokens)
        added = " <small>+ residual</small>" if residual else ""
        lines.append(f'<tr><td>{n} x {k}{added}</td>{cells}<td class="text"><small>{_escape(label)}</small></td></tr>')
    return f'<div class="scroll"><table class="grid">{"".join(lines)}</table></div>'


def _cell(state: CellState | None) -> str:
    if state is None:
        return "<td></td>"
    name, letter = _CLASS[state.proof]
    config = ", ".join(f"{key} {value}" for key, value in state.case.cell.config.items())
    known = [
        f"{state.case.n} x {state.case.k}, M = {state.case.m}: {state.proof}",
        f"{state.case.cell.backend} {config}".strip(),
    ]
    known.append(f"choice: {state.case.cell.provenance}")
    if state.worst_share is not None:
        known.append(f"worst error {state.worst_share:.3f} of its bound")
    if state.reason:
        known.append(state.reason)
    if state.record is not None:
        known.append(f"record {state.record.name}")
    return f'<td class="cell {name}" title="{_escape(chr(10).join(known))}">{letter}</td>'


def _times(generation: Generation) -> str:
    curves, shapes = over_floor_by_tokens(generation), by_shape(generation)
    if curves is None:
        return ""
    records = sorted({times.record.name for times in generation.times})
    return (
        "<h3>Time against the floor and cuBLAS</h3>"
        '<p class="soft">The floor is a streaming read of the weight\'s bytes, timed in the same run: 1.0 cannot be '
        "beaten. Cold weights, programmatic dependent launch, GEMM after GEMM; geometric means over the cells that a "
        f"kernel of ours serves. From {', '.join(f'<code>{_escape(name)}</code>' for name in records)}.</p>"
        f'<div class="plot">{curves}</div><h3>By shape</h3><div class="legend">'
        '<span><i class="dot" style="background:var(--ours);border-radius:50%"></i>ours</span>'
        '<span><i class="dot" style="background:var(--cublas)"></i>cuBLAS</span></div>'
        f'<div class="plot scroll">{shapes or ""}</div>'
    )


def _changes(generation: Generation) -> str:
    items = "".join(f"<li>{_escape(change)}</li>" for change in generation.changes)
    text = (
        f"<ul>{items}</ul>"
        if items
        else '<p class="soft">There is no earlier record of the same kind to compare with.</p>'
    )
    return f"<h3>Since the last record</h3>{text}" if generation.records else ""


def _records(generation: Generation) -> str:
    if not generation.records:
        return ""
    rows = "".join(map(_record, reversed(generation.records)))
    names = ("made", "on", "driver", "compiler", "commit", "command")
    head = "<tr><th>record</th>" + "".join(f'<th class="text">{name}</th>' for name in names) + "</tr>"
    return f'<h3>Records</h3><div class="scroll"><table>{head}{rows}</table></div>'


def _record(record: Record) -> str:
    data = record.data
    values = [
        data["started"][:16].replace("T", " "),
        record.gpu or "CPU",
        data["machine"]["driver"] or "-",
        data["versions"].get("nvidia-cutlass-dsl-libs-cu13") or "-",
        (data["commit"] or "-")[:10],
    ]
    cells = "".join(f'<td class="text">{_escape(value)}</td>' for value in values)
    return f'<tr><td>{_escape(record.name)}</td>{cells}<td class="text">{_command(data["command"])}</td></tr>'


def _command(text: str) -> str:
    """A long command, such as a suite's with all its files, is folded."""
    if len(text) <= _LONG_COMMAND:
        return f"<code>{_escape(text)}</code>"
    beginning = text[:_LONG_COMMAND].rsplit(" ", 1)[0]
    return f"<details><summary><code>{_escape(beginning)} ...</code></summary><code>{_escape(text)}</code></details>"


def _words() -> str:
    items = [
        f'<dt><i class="dot {_CLASS[proof][0]}"></i>{proof}</dt><dd>{_escape(text)}</dd>'
        for proof, text in MEANING.items()
    ]
    items += [
        f"<dt>{kind}</dt><dd>the choice of kernel: {_escape(text)}</dd>" for kind, text in PROVENANCE_MEANING.items()
    ]
    items += [
        "<dt>bound</dt><dd>what an element may be off: half a unit in the last place of BF16 and the error of FP32 "
        "accumulation; up to 1 of it is right</dd>",
    ]
    return f'<h2 id="words">Words</h2><dl>{"".join(items)}</dl>'
