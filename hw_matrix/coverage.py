"""What is shown of every cell of every table, from the records under ``hw_matrix/records``.

Two closed vocabularies. ``Proof``: the strongest thing that was shown of a cell. Provenance (lowlat_gemm/tables): where
the choice of its kernel comes from. A record counts for a cell only if it names the backend and config that the table
names now.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.cases import Case, table_cases
from lowlat_cli.report import kind_of
from lowlat_gemm.arch import ARCHES, Arch

from .runners import Runner

RECORDS = Path(__file__).with_name("records")


class Proof(str, enum.Enum):
    """What was shown of a cell. A closed set; the first that holds, by the newest record of its kind."""

    HARDWARE = "hardware-run"
    WAIVED = "waived"
    FAILED = "failed"
    MODEL = "model-checked"
    COMPILED = "compile-checked"
    NONE = "nothing shown"

    def __str__(self) -> str:
        return self.value


#: What each word means.
MEANING = {
    Proof.HARDWARE: "ran on a GPU of the generation, on the backend and config that the table names, and every element"
    " was within the bound against FP64",
    Proof.WAIVED: "ran on a GPU of the generation and was wrong, or did not end; a reviewed waiver in force names"
    " its test",
    Proof.FAILED: "ran on a GPU of the generation and was wrong, or did not end",
    Proof.MODEL: "no hardware: its kernel compiles, and every order of its pipeline's steps, in small (two ranks, two"
    " stages, two or three tiles), ends well in a model of the generation",
    Proof.COMPILED: "no hardware: its kernel compiles for the generation and fits in registers and shared memory,"
    " without spills",
    Proof.NONE: "no record shows anything of the cell as the table has it now",
}
PROVENANCE_MEANING = {
    "measured": "this project measured the choice on the device class of the table, at least 5 % faster than cuBLAS",
    "interpolated": "lies between two measured token counts that kernels of ours won, with the backend and config of the upper one",
    "public": "somebody else's published choice, with its source; not measured by this project",
    "inherited": "taken over from another generation's table until it is measured on this one",
}
#: Status words of records (lowlat_cli.record) -> what they show. The other words show nothing of a kernel.
_SHOWN = {
    "kernel": Proof.HARDWARE,
    "waived": Proof.WAIVED,
    "failed": Proof.FAILED,
    "model": Proof.MODEL,
    "compiled": Proof.COMPILED,
}
_ON_HARDWARE = (Proof.HARDWARE, Proof.WAIVED, Proof.FAILED)


@dataclass(frozen=True)
class Record:
    """One JSON file. ``name``: its path under the records folder."""

    name: str
    data: Mapping

    @property
    def started(self) -> str:
        return self.data["started"]

    @property
    def has_verdicts(self) -> bool:
        return any("status" in cell for cell in self.data.get("cells", ()))

    @property
    def series(self) -> tuple[str, str | None]:
        """What it is a record of: only those of one series can be compared, as far as they have cells in common."""
        return kind_of(self.data), self.data.get("suite")

    @property
    def gpu(self) -> str | None:
        gpu = self.data["machine"]["gpu"]
        return None if gpu is None else gpu["name"]


def load_records(folder: Path = RECORDS) -> dict[str, list[Record]]:
    """Generation -> its records, oldest first."""
    found: dict[str, list[Record]] = {}
    for arch in ARCHES:
        paths = sorted((folder / arch.name).glob("*.json"))
        records = [Record(f"{arch.name}/{path.name}", json.loads(path.read_text())) for path in paths]
        found[arch.name] = sorted(records, key=lambda record: (record.started, record.name))
    return found


def cell_key(cell: Mapping) -> tuple:
    """A cell of a record, as ``CellState.key`` has it."""
    return cell.get("family"), cell["n"], cell["k"], cell["m"], cell["residual"]


@dataclass(frozen=True)
class CellState:
    """One cell of a table and what is shown of it. ``claims``: it needs a hardware record. ``worst_share``: largest
    error as a share of its bound; None where nothing was compared, or the record is from before records had it."""

    case: Case
    proof: Proof
    claims: bool
    record: Record | None = None
    worst_share: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple:
        return self.case.family, self.case.n, self.case.k, self.case.m, self.case.residual

    @property
    def provenance(self) -> str:
        return self.case.cell.provenance.kind

    @property
    def is_missing(self) -> bool:
        """Claims hardware and has no good record of it."""
        return self.claims and self.proof not in (Proof.HARDWARE, Proof.WAIVED)


def claims_hardware(case: Case, runner: Runner) -> bool:
    """A cell claims hardware where its generation has a runner, and wherever its choice is said to be measured."""
    return runner.claims_hardware or case.cell.provenance.kind in ("measured", "interpolated")


def cell_states(arch: Arch, records: Iterable[Record], runner: Runner) -> list[CellState]:
    """Every cell of the generation's tables, in their order; ``records``: of the generation, oldest first."""
    verdicts: dict[tuple, list[tuple[Proof, Mapping, Record]]] = {}
    for record in records:
        for cell in record.data.get("cells", ()):
            proof = _SHOWN.get(cell.get("status"))
            if proof in _ON_HARDWARE and record.gpu is None:
                continue  # no hardware, whatever it says
            if proof is not None and cell["arch"] == arch.name:
                verdicts.setdefault(cell_key(cell), []).append((proof, cell, record))
    return [_state(case, verdicts, claims_hardware(case, runner)) for case in table_cases(arch)]


def _state(case: Case, verdicts: Mapping[tuple, list], claims: bool) -> CellState:
    blank = CellState(case, Proof.NONE, claims)
    wanted = (case.cell.backend, dict(case.cell.config))
    of_now = [one for one in verdicts.get(blank.key, ()) if (one[1]["backend"], one[1]["config"]) == wanted]
    for kinds in (_ON_HARDWARE, (Proof.MODEL,), (Proof.COMPILED,)):
        of_kind = [one for one in of_now if one[0] in kinds]
        if of_kind:
            proof, cell, record = of_kind[-1]
            worst = cell.get("worst_share")
            return CellState(case, proof, claims, record, float(worst) if worst is not None else None, cell["reason"])
    return blank


def counts(states: Iterable[CellState]) -> dict[Proof, int]:
    """How many cells are at each proof, every word named."""
    listed = [state.proof for state in states]
    return {proof: listed.count(proof) for proof in Proof}


@functools.lru_cache(maxsize=None)
def kernel_sources() -> str:
    """Digest of the kernels' sources as they are now, as records name it."""
    from lowlat_gemm.kernels.store import source_hash

    return source_hash()
