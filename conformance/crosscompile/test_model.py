"""What runs on split_k is model-checked: every order of its pipeline's steps, in small, ends well."""

from __future__ import annotations

import functools

from conformance.cases import unit_id, written_split_k_units
from conformance.model.parts import Size
from conformance.model.pipeline import check
from lowlat_cli.record import Status
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels import split_k


def in_small(arch, config: split_k.SplitKConfig) -> Size:
    """The pipeline of ``config`` with its kinds of ring, warpgroups, ranks and owners, and little work for each."""
    ranks = min(config.split, 2)
    return Size(
        "sm90" if arch == SM90 else "sm100",
        stages=min(config.stages, 2),
        tiles=3 if config.warpgroups == 1 or ranks == 1 else 2,
        split=ranks,
        groups=min(config.token_columns // 8, ranks),
        warpgroups=config.warpgroups,
        token_stages=min(config.token_stages, 2),
        prefetch=1 if config.early_stages < config.stages else 2,
        trigger=min(config.trigger, 1),
    )


def test_every_order_in_small_ends_well(arch, unit_result):
    walked = functools.lru_cache(maxsize=None)(check)
    units = written_split_k_units(arch)
    assert units
    for unit in units:
        size = in_small(arch, unit.spec.config)
        outcome = walked(size)
        assert outcome.problem is None, f"{unit_id(unit)} as {size}: {outcome.problem}\n" + "\n".join(outcome.tale)
        unit_result(unit, Status.MODEL)
    assert walked.cache_info().currsize > 5
