"""What is the KDA pair's own in its machine code: registers as reckoned, all weights before the wait, the right FMA."""

from __future__ import annotations

import re

from conformance.cases import unit_id
from conformance.machine_code import compiled
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.kda import REGISTER_MARGIN, registers


def test_the_pair(arch, kda_unit):
    unit = kda_unit
    spec, made, name = unit.spec, compiled(unit), unit_id(unit)
    reckoned = registers(spec.config, spec.tokens, spec.steps) + REGISTER_MARGIN
    assert made.code.registers <= reckoned, f"{name}: {made.code.registers} registers, reckoned {reckoned}"
    words = re.findall(r"\b(LDG\.E(?:\.\w+)*|ACQBULK|PREEXIT)\b", made.code.sass)
    early = words[: words.index("ACQBULK")]
    loads = [word for word in early if word.startswith("LDG")]
    weights = spec.config.rows_per_warp * spec.steps
    assert early[0] == "PREEXIT" and len(loads) == weights and all(".NA" in w for w in loads), f"{name}: {early}"
    assert not [w for w in words[words.index("ACQBULK") :] if ".NA" in w], f"{name}: weights behind the wait"
    kind = {"bfloat16": "BF16", "float16": "F16"}[spec.input_dtype]
    mixed, plain = (len(re.findall(pattern, made.code.sass)) for pattern in (r"\bFHFMA\b", r"\bFFMA\b"))
    products = spec.tokens * spec.config.rows_per_warp * spec.steps * spec.config.vector_width
    expected = (0, products) if arch == SM90 else (products, 0)
    assert (mixed, plain) == expected, f"{name}: FHFMA, FFMA {mixed, plain}, expected {expected} of {kind}"
