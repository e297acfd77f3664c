"""What a tuning run is asked for, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checking import Shape
from .candidates import SCREENED_COLUMNS, Candidate, TokenClass, token_classes
from .jobs import JobResult
from .table_writer import RowResult


@dataclass(frozen=True)
class Request:
    """What to tune. ``residual``: the shapes whose cells with the residual epilogue are wanted as well; ``known``:
    configs that tables have for a shape; ``most``: ``split_k`` tilings that are timed for a class; ``minutes``: no
    other shape is begun after so many."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    #: Of token tiles, that the generation has.
    widths: tuple[int, ...]
    most: int
    residual: frozenset[tuple[int, int]] = frozenset()
    known: dict[tuple[int, int], tuple[Candidate, ...]] = field(default_factory=dict)
    minutes: float | None = None

    @property
    def classes(self) -> list[TokenClass]:
        """The token counts by what one config can serve."""
        return token_classes(self.tokens, self.widths)

    @property
    def screens(self) -> list[TokenClass]:
        """The token counts by where candidates are screened."""
        return token_classes(self.tokens, SCREENED_COLUMNS)


@dataclass(frozen=True)
class ModelCheck:
    """How the cost model did for one backend and class of a shape: its order against the measured one, and whether a
    candidate that it had left out was the fastest of them."""

    n: int
    k: int
    m: int
    backend: str
    correlation: float | None
    probes: int
    lost: bool


@dataclass
class Outcome:
    """What a run found. ``passes``: (n, k, residual) -> M -> the results of each pass; ``not_reached``: shapes that
    time ran out for; ``measured_*``: what this run timed, ``journal_*``: what it took over from the journal of earlier
    ones, jobs and the candidates in them; ``seconds``: of this run by stage, compiling among them."""

    rows: list[RowResult] = field(default_factory=list)
    passes: dict[tuple[int, int, bool], dict[int, list[JobResult]]] = field(default_factory=dict)
    model: list[ModelCheck] = field(default_factory=list)
    excluded: dict[Candidate, str] = field(default_factory=dict)
    not_reached: list[Shape] = field(default_factory=list)
    measured_jobs: int = 0
    measured_candidates: int = 0
    journal_jobs: int = 0
    journal_candidates: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
