"""Every skinny config of every table compiles for its generation, on a machine without a GPU, and does not spill."""

from __future__ import annotations

import re

import pytest

from conformance.cases import unit_id
from conformance.machine_code import code_of
from lowlat_gemm.arch import parse_arch
from lowlat_gemm.kernels.skinny import REGISTER_BUDGET, REGISTER_MARGIN, registers

_REGISTERS_PER_SM = 65_536


@pytest.fixture
def machine_code(unit):
    return code_of(unit)


def test_compiles_without_spills_and_fits(unit, machine_code, arch):
    assert parse_arch(arch).compile_target == unit.target
    name = unit_id(unit)
    assert machine_code.stack_bytes == 0 and machine_code.local_accesses == 0, (
        f"{name}: {machine_code.registers} registers, {machine_code.stack_bytes} bytes of stack, "
        f"{machine_code.local_accesses} local loads and stores; expected none"
    )
    threads = unit.spec.config.block_size
    assert machine_code.registers * threads <= _REGISTERS_PER_SM, f"{name}: {machine_code.registers} x {threads} threads"
    estimate = registers(unit.spec.config, unit.spec.tokens)
    assert machine_code.registers <= estimate + REGISTER_MARGIN <= REGISTER_BUDGET + REGISTER_MARGIN, (
        f"{name}: {machine_code.registers} registers; the predicate reckons with {estimate} + {REGISTER_MARGIN}"
    )


def test_weights_are_in_flight_before_the_pdl_wait(unit, machine_code):
    """The first chunk of weights is requested before the wait, no activation is, and dependents are let go first."""
    wanted = re.findall(r"\b(LDG\.E(?:\.\w+)*|ACQBULK|PREEXIT)\b", machine_code.sass)
    wait = wanted.index("ACQBULK")
    config = unit.spec.config
    before = wanted[:wait]
    weights = config.outputs_per_block * config.k_unroll
    assert before[0] == "PREEXIT", f"{unit_id(unit)}: expected PREEXIT first, found {before}"
    loads = [word for word in before if word.startswith("LDG")]
    assert len(loads) == weights and all(".NA" in word for word in loads), (
        f"{unit_id(unit)}: expected {weights} streaming weight loads before the wait, found {loads}"
    )
