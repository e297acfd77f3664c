"""What is fused_a's own in its machine code: a whole chunk of weights before the wait, and all of its tokens together."""

from __future__ import annotations

import re

from conformance.cases import unit_id
from conformance.machine_code import compiled
from lowlat_gemm.kernels.fused_a import AT_ONCE, PREVIOUS_FINISHED, WEIGHTS_REQUESTED

#: On SM90; another generation's load may be wider or named otherwise, its contract is that of ``contract.py``.
_WORDS = r"\b(LDG\.E(?:\.\w+)*|ACQBULK|PREEXIT|HMMA)\b"


def test_loads_are_sent_before_they_are_waited_for(fused_a_unit):
    unit = fused_a_unit
    config, name = unit.spec.config, unit_id(unit)
    words = re.findall(_WORDS, compiled(unit).code.sass)
    wait = words.index("ACQBULK")
    before, after = words[:wait], words[wait + 1 : words.index("HMMA")]
    weights, tokens_read = ([word for word in part if word.startswith("LDG")] for part in (before, after))
    place = {AT_ONCE: 0, WEIGHTS_REQUESTED: wait - 1, PREVIOUS_FINISHED: wait + 1}[config.trigger]
    assert words.index("PREEXIT") == place, f"{name}: {words[: wait + 2]}"
    assert len(weights) == 2 * config.row_tiles * config.unroll, f"{name}: {before}"
    assert all(".NA" in word for word in weights), f"{name}: {before}"
    tokens = config.unroll * unit.spec.token_groups
    if tokens > 4:  # ptxas left to itself sends no more than about six before the first product
        assert len(tokens_read) == tokens, f"{name}: {tokens} loads of tokens before the first product, found {after}"
