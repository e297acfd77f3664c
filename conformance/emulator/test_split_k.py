"""``split_k`` on tcgen05, as compiled for SM100, followed thread by thread on a CPU: right in any order, and able to be wrong."""

from __future__ import annotations

import re

import pytest
import torch

from conformance.cases import SPLIT_K_CONFIGS, unit_id
from conformance.emulator.cluster import Trap
from conformance.emulator.split_k import emulate
from conformance.machine_code import compiled
from conformance.seed import SEED
from lowlat_gemm.arch import SM100
from lowlat_gemm.kernels.split_k import SplitKConfig, compile_unit
from lowlat_gemm.reference import parity, reference_gemm
from lowlat_gemm.tables import load_table

#: Every tactic that the public tables have, in their order.
PUBLIC = list(
    dict.fromkeys(
        SplitKConfig(**cell.config) for _, cell in load_table("kimi_k3", "sm103").cells() if cell.backend == "split_k"
    )
)


def _unit(config, residual=False):
    return compile_unit(SM100, 1536, 7168, 1, config, residual=residual)


def _shape(config: SplitKConfig, row_tiles: int = 1) -> tuple[int, int, int]:
    """(M, N, K) with tails everywhere: the last tile of rows and of tokens, and K, whose slices are a stage or two."""
    return config.token_columns - 3, config.rows * row_tiles - 4, 128 * config.split + 40


def _operands(m: int, n: int, k: int, whole: bool):
    generator = torch.Generator().manual_seed(SEED + m + n + k)

    def matrix(rows, columns):
        if whole:
            return torch.randint(-1, 2, (rows, columns), generator=generator).bfloat16()
        return torch.randn(rows, columns, generator=generator).bfloat16()

    return matrix(m, k), matrix(n, k), matrix(m, n)


@pytest.mark.parametrize("index", range(len(SPLIT_K_CONFIGS)))
def test_whole_numbers_match_bit_for_bit(index):
    unit = _unit(SPLIT_K_CONFIGS[index], residual=bool(index % 2))
    x, weight, residual = _operands(*_shape(unit.spec.config, 2 if index == 3 else 1), whole=True)
    added = residual if unit.spec.residual else None
    y = emulate(unit.spec, compiled(unit).ptx, x, weight, added, SEED + index)
    wanted = reference_gemm(x, weight, added).value.bfloat16()
    assert torch.equal(y, wanted), f"{unit_id(unit)}: {int((y != wanted).sum())} of {y.numel()} elements differ"


@pytest.mark.parametrize("config", PUBLIC, ids=lambda c: f"{c.rows}.{c.token_columns}.{c.split}.{c.stages}")
def test_public_tactics_are_right(config):
    unit = _unit(config)
    x, weight, _ = _operands(*_shape(config), whole=False)
    report = parity(emulate(unit.spec, compiled(unit).ptx, x, weight, None, SEED), reference_gemm(x, weight))
    assert report.ok, f"{unit_id(unit)}: {report}"


def test_several_token_tiles_and_many_orders():
    """The same bits whatever the order: of warps, of loads, of products, of messages."""
    unit = _unit(SplitKConfig(64, 8, 3, 4))
    x, weight, _ = _operands(11, 64, 648, whole=False)
    ptx = compiled(unit).ptx
    found = [emulate(unit.spec, ptx, x, weight, None, 2 * seed).view(torch.int16) for seed in range(3)]
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("stages, token_stages", [(2, 0), (2, 3), (3, 2)])
def test_rings_that_go_round_and_round(stages, token_stages):
    """Nine stages a rank: every barrier has several phases, whichever ring is the longer one."""
    unit = _unit(SplitKConfig(64, 8, 2, stages, token_stages=token_stages))
    x, weight, _ = _operands(8, 64, 2 * 9 * 64 - 24, whole=True)
    wanted = reference_gemm(x, weight).value.bfloat16()
    for seed in range(3):
        assert torch.equal(emulate(unit.spec, compiled(unit).ptx, x, weight, None, seed), wanted), f"order {seed}"


#: What a wrong kernel would be, by its PTX: (pattern, what stands there instead).
WRONG = {
    "x is loaded before the previous kernel has ended": (r"griddepcontrol\.wait;", ""),
    "another stride between rows of a descriptor": ("4611756662049538048", str(4611756662049538048 + (1 << 32))),
    "no swizzle": ("4611756662049538048", str(4611756662049538048 - (2 << 61))),
    "operands of another type": (r"mov\.b32 \t(%r\d+), 67241104;", rf"mov.b32 \t\1, {67241104 - (1 << 7)};"),
    "the first product adds": (r"\t(tcgen05\.mma[^;]*), %p\d+;", r"\tmov.pred \t%p999, 1;\n\t\1, %p999;"),
    "sums of another warp": (r"shl\.b32 (\t%r\d+, %r\d+), 21;", r"shl.b32 \1, 20;"),
    "a stage of other bytes": (r", 8192;", ", 4096;"),
    "tensor memory freed at once": (
        r"(?s)(tcgen05\.relinquish_alloc_permit[^;]*;)",
        r"\1\n\ttcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 32;",
    ),
    "the staged output is read before it is written": (r"bar\.sync \t%r\d+, 128;", ""),
    "peers' sums are not waited for": (r"mbarrier\.try_wait\.parity\.acquire\.cluster[^;]*;", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen(name):
    unit = _unit(SplitKConfig(64, 8, 2, 4))
    x, weight, _ = _operands(8, 64, 328, whole=True)
    pattern, instead = WRONG[name]
    ptx, changes = re.subn(pattern, instead, compiled(unit).ptx)
    assert changes, f"{pattern} is not in the PTX"
    wanted = reference_gemm(x, weight).value.bfloat16()
    for seed in range(8):  # a race may be won
        try:
            y = emulate(unit.spec, ptx, x, weight, None, 2 * seed)
        except (Trap, KeyError):
            return
        if not torch.equal(y, wanted):
            return
    raise AssertionError("not seen")


def test_an_instruction_that_is_not_known_is_an_error():
    unit = _unit(SplitKConfig(64, 8, 2, 4))
    x, weight, _ = _operands(8, 64, 256, whole=True)
    with pytest.raises(NotImplementedError, match="popc"):
        emulate(unit.spec, compiled(unit).ptx.replace("bar.sync \t0;", "popc.b32 \t%r1, %r1;"), x, weight, None, 0)
