"""The words that parent and child of a tuning run exchange: one JSON object a line, jobs one way and events the other.

A job is a group: candidates of one (N, K, M, residual), judged and then timed in turn with the floor and the
baselines. Its identity is its content, so that a journal knows it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .candidates import Candidate

BACK_TO_BACK, LINKED = "back_to_back", "linked"
#: The streaming read that no GEMM can beat.
FLOOR = "floor"


@dataclass(frozen=True)
class Job:
    """``stage``: "screen", "refine" or "final"; ``turn``: which of the separate passes; ``max_tokens``: rows of x that
    the shape's operands have (its random numbers depend on it); ``replays``: at most, fewer of long graphs."""

    stage: str
    n: int
    k: int
    m: int
    residual: bool
    turn: int
    max_tokens: int
    replays: int
    chains: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def without(self, excluded) -> "Job":
        return replace(self, candidates=tuple(one for one in self.candidates if one not in excluded))

    def to_json(self) -> dict:
        return vars(self) | {"chains": list(self.chains), "candidates": [one.to_json() for one in self.candidates]}

    @classmethod
    def from_json(cls, value: dict) -> "Job":
        candidates = tuple(map(Candidate.from_json, value["candidates"]))
        return cls(**value | {"chains": tuple(value["chains"]), "candidates": candidates})

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:24]

    def __str__(self) -> str:
        residual = " + residual" if self.residual else ""
        where = f"M={self.m} N={self.n} K={self.k}{residual}"
        return f"{self.stage} {self.turn}, {where}, {len(self.candidates)} candidates"


@dataclass(frozen=True)
class JobResult:
    """Median microseconds a launch. ``times``: candidate -> chain -> us; ``others``: floor, baselines, back to back;
    ``linked_others``: the baselines in the linked chain, where the job has it."""

    times: Mapping[Candidate, Mapping[str, float]]
    others: Mapping[str, float]
    linked_others: Mapping[str, float] = field(default_factory=dict)

    @property
    def floor_us(self) -> float:
        return self.others[FLOOR]

    @property
    def baseline_us(self) -> float:
        """The fastest of what callers have without us."""
        return min(us for name, us in self.others.items() if name != FLOOR)

    @property
    def linked_baseline_us(self) -> float | None:
        return min(self.linked_others.values(), default=None)

    def to_json(self) -> dict:
        return {
            "times": [one.to_json() | {"us": dict(us)} for one, us in self.times.items()],
            "others": dict(self.others),
            "linked_others": dict(self.linked_others),
        }

    @classmethod
    def from_json(cls, value: dict) -> "JobResult":
        times = {Candidate.from_json(one): one["us"] for one in value["times"]}
        return cls(times, value["others"], value["linked_others"])
