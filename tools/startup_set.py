"""Everything that a rank of a model launches, as an adapter makes it ready; and a first launch of each of them."""

from __future__ import annotations

import torch

from lowlat_gemm.arch import Arch
from lowlat_gemm.dispatch import PlanEntry, plan_for
from lowlat_gemm.execute import kernels_of, launch
from lowlat_gemm.kda_branches import FAMILY, GEOMETRY, TP, branches
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.models import projection_shapes
from lowlat_gemm.tables import MAX_OVERLAP_TOKENS


class Ready:
    """The ready set of one rank. ``units``: each kernel once."""

    def __init__(self, arch: Arch, model: str, tp: int):
        self._launches: dict[CompileUnit, tuple[int, int, int, bool]] = {}
        for n, k in dict.fromkeys((shape.n, shape.k) for shape in projection_shapes(model, tp)):
            plan = plan_for(arch, n, k, (model,))
            for entry in () if plan is None else (*plan.entries.values(), *plan.residual_entries.values()):
                self._add(n, k, entry)
        if (model, tp) == (FAMILY, TP):
            for m in range(1, MAX_OVERLAP_TOKENS + 1):
                for name, (n, k) in GEOMETRY.shapes.items():
                    unit = getattr(branches(arch, m), name)
                    if unit is not None:
                        self._launches.setdefault(unit, (n, k, m, False))

    def _add(self, n: int, k: int, entry: PlanEntry) -> None:
        if entry.refusal is None:
            self._launches.setdefault(entry.unit, (n, k, entry.m, entry.residual))

    @property
    def units(self) -> list[CompileUnit]:
        return list(self._launches)

    def launch_each(self) -> int:
        """Launches every kernel once on the current CUDA device, on zeros; returns how many there were."""
        device = torch.device("cuda", torch.cuda.current_device())

        def zeros(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)

        for kernel, (n, k, m, residual) in zip(kernels_of(self._launches), self._launches.values()):
            launch(kernel, zeros(m, k), zeros(n, k), zeros(m, n) if residual else None)
        return len(self._launches)
