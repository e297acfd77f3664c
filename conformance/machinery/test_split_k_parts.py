"""The builds of split_k that lack a part lack that part's instructions and no others."""

from __future__ import annotations

import re

import pytest

from lowlat_cli.split_k_parts import PARTS, compile_without, parts_of
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels import device
from lowlat_gemm.kernels.compiling import compile_now
from lowlat_gemm.kernels.split_k import SplitKConfig, compile_unit

#: Part -> what of the whole kernel's PTX it is.
INSTRUCTIONS = {
    "wait": r"griddepcontrol\.wait",
    "weights": str(device.EVICT_FIRST),  # the loads' cache policies
    "tokens": str(device.EVICT_LAST),
    "exchange": r"st\.async",
    "store": r"st\.(?:weak\.)?global",
}
CONFIGS = [SplitKConfig(56, 64, 4, 8, token_stages=4), SplitKConfig(48, 8, 1, 7, k_blocks=2)]


def ptx_of(folder, compile_with) -> str:
    folder.mkdir()
    compile_with(f"--keep-ptx --dump-dir={folder}")
    return next(folder.glob("*.ptx")).read_text()


@pytest.mark.parametrize("config", CONFIGS, ids=["split", "whole K"])
def test_a_build_lacks_its_part(config, tmp_path):
    unit = compile_unit(SM90, 1536, 7168, 8, config)
    whole = ptx_of(tmp_path / "whole", lambda options: compile_now(unit, options))
    counts = {part: len(re.findall(INSTRUCTIONS[part], whole)) for part in PARTS}
    assert all(counts[part] for part in parts_of(unit)), counts
    for part in parts_of(unit):
        text = ptx_of(tmp_path / part, lambda options: compile_without(part, unit, options))
        found = {other: len(re.findall(INSTRUCTIONS[other], text)) for other in PARTS}
        less = {other for other in PARTS if found[other] < counts[other]}
        assert less == {part}, f"without {part}: {found}, the whole has {counts}"
        assert found[part] == 0, f"without {part}: {found}"
