"""What is skinny's own in its machine code: registers as its predicate reckons, a whole chunk of weights before the wait."""

from __future__ import annotations

import re

from conformance.cases import unit_id
from conformance.machine_code import compiled
from lowlat_gemm.kernels.skinny import REGISTER_BUDGET, REGISTER_MARGIN, registers


def test_the_predicate_reckons_enough_registers(skinny_unit):
    code = compiled(skinny_unit).code
    estimate = registers(skinny_unit.spec.config, skinny_unit.spec.tokens)
    assert code.registers <= estimate + REGISTER_MARGIN <= REGISTER_BUDGET + REGISTER_MARGIN, (
        f"{unit_id(skinny_unit)}: {code.registers} registers; the predicate reckons with {estimate} + {REGISTER_MARGIN}"
    )


def test_weights_are_in_flight_before_the_pdl_wait(skinny_unit):
    """The first chunk of weights is requested before the wait, no activation is, and dependents are let go first."""
    wanted = re.findall(r"\b(LDG\.E(?:\.\w+)*|ACQBULK|PREEXIT)\b", compiled(skinny_unit).code.sass)
    wait = wanted.index("ACQBULK")
    config = skinny_unit.spec.config
    before = wanted[:wait]
    weights = config.outputs_per_block * config.k_unroll
    assert before[0] == "PREEXIT", f"{unit_id(skinny_unit)}: expected PREEXIT first, found {before}"
    loads = [word for word in before if word.startswith("LDG")]
    assert len(loads) == weights and all(".NA" in word for word in loads), (
        f"{unit_id(skinny_unit)}: expected {weights} streaming weight loads before the wait, found {loads}"
    )
