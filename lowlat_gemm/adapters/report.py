"""What an install did, and what keeps a layer from being taken after its kernels were compiled: for every adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..dispatch import Plan
from ..operands import Reason, Refusal


@dataclass(frozen=True)
class InstallReport:
    """What ``enable_low_latency_gemm`` did: module names that run through plans, and why each other linear does not."""

    installed: tuple[str, ...] = ()
    skipped: dict[str, Refusal] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"lowlat_gemm: {len(self.installed)} linears installed, {len(self.skipped)} left alone"]
        lines += [f"  {name}: {refusal}" for name, refusal in self.skipped.items()]
        return "\n".join(lines)


def install_problem(plan: Plan, failed: Mapping[object, str]) -> Refusal | None:
    """Why a layer is left alone for ``failed`` compiles (unit -> problem), or None.

    In batch-invariant mode a plan serves every M or none; else what failed falls back at its own M.
    """
    if not plan.every_m:
        return None
    problem = next((failed[unit] for unit in plan.units() if unit in failed), None)
    return None if problem is None else Refusal(Reason.BACKEND_UNAVAILABLE, problem.splitlines()[0])
