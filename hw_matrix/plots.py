"""The report's plots, as inline SVG that takes its text colour from the page."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from .summary import CUBLAS, OURS, Generation, Times  # noqa: E402

#: Stand-ins that become CSS colours of the page.
_INK, _FAINT, _OURS, _CUBLAS = "#010101", "#020202", "#030303", "#040404"
_CSS = {_INK: "var(--ink)", _FAINT: "var(--line)", _OURS: "var(--ours)", _CUBLAS: "var(--cublas)"}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lowlat_gemm",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "grid.color": _FAINT,
    "axes.axisbelow": True,
}
#: Token counts that get a panel of their own, where they were timed.
PANELS = (1, 2, 4, 8, 16, 32, 64)


def _svg(figure, title: str) -> str:
    """The figure as an SVG element with ``title`` for those who do not see it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Title": title})
    plt.close(figure)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for stand_in, css in _CSS.items():
        text = text.replace(stand_in, css)
    return text


def over_floor_by_tokens(generation: Generation) -> str | None:
    """Geometric mean of time over the floor by M: ours and cuBLAS, over the cells that a kernel of ours serves."""
    tokens = sorted({times.m for times in generation.times if times.ours is not None})
    if not tokens:
        return None
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(max(6.4, 0.44 * len(tokens)), 3.2))  # tick labels side by side
        for who, colour, name, marker in ((CUBLAS, _CUBLAS, "cuBLAS", "s"), (OURS, _OURS, "ours", "o")):
            means = [generation.mean_over_floor(who, m) for m in tokens]
            axes.plot(range(len(tokens)), means, color=colour, marker=marker, linewidth=1.8, markersize=5)
            axes.annotate(name, (len(tokens) - 1, means[-1]), xytext=(8, -3), textcoords="offset points", color=colour)
        axes.axhline(1.0, color=_INK, linewidth=1)
        axes.annotate("floor", (len(tokens) - 1, 1.0), xytext=(8, 4), textcoords="offset points")
        counted = [sum(times.m == m and times.ours is not None for times in generation.times) for m in tokens]
        axes.set_xticks(range(len(tokens)), [f"{m}\n({count})" for m, count in zip(tokens, counted)])
        axes.set_xlim(-0.3, len(tokens) - 0.3)
        axes.set_ylim(0.9, None)
        axes.set_xlabel("tokens M (cells)")
        axes.set_ylabel("time / floor")
        axes.grid(axis="y", linewidth=0.6)
        return _svg(figure, f"Time over the floor by tokens on {generation.runner.gpu}")


def by_shape(generation: Generation) -> str | None:
    """A panel a token count: each shape's time over the floor, ours and cuBLAS joined by a line."""
    timed = [times for times in generation.times if times.ours is not None and times.cublas is not None]
    panels = [m for m in PANELS if any(times.m == m for times in timed)]
    if not panels:
        return None
    shapes = list(dict.fromkeys((times.n, times.k) for times in timed))
    with plt.rc_context(_STYLE):
        figure, all_axes = plt.subplots(
            1,
            len(panels),
            figsize=(1.6 + 2.1 * len(panels), 0.9 + 0.24 * len(shapes)),
            sharey=True,
            sharex=True,
            squeeze=False,
        )
        for m, axes in zip(panels, all_axes[0]):
            _panel(axes, [times for times in timed if times.m == m], shapes)
            axes.set_title(f"M = {m}", fontsize=10)
        all_axes[0][0].set_yticks(range(len(shapes)), [f"{n} x {k}" for n, k in shapes])
        all_axes[0][0].set_ylim(len(shapes) - 0.4, -0.6)
        figure.supxlabel("time / floor", fontsize=9.5)
        figure.tight_layout()
        return _svg(figure, f"Time over the floor by shape on {generation.runner.gpu}")


def _panel(axes, timed: Sequence[Times], shapes: list[tuple[int, int]]) -> None:
    for times in timed:
        row = shapes.index((times.n, times.k))
        ours, cublas = times.over_floor(OURS), times.over_floor(CUBLAS)
        axes.plot([ours, cublas], [row, row], color=_FAINT, linewidth=2, zorder=1)
        axes.scatter([cublas], [row], color=_CUBLAS, marker="s", s=20, zorder=2)
        axes.scatter([ours], [row], color=_OURS, marker="o", s=26, zorder=3)
    axes.axvline(1.0, color=_INK, linewidth=1)
    axes.grid(axis="x", linewidth=0.6)
    axes.tick_params(axis="y", length=0)
