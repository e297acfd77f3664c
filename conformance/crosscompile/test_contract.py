"""Every kernel and config of a generation holds ``conformance/contract.py``, on a machine without a GPU."""

from __future__ import annotations

from conformance.cases import unit_id
from conformance.contract import breaches
from conformance.machine_code import compiled


def test_contract(written_unit):
    problems = breaches(written_unit, compiled(written_unit))
    assert not problems, f"{unit_id(written_unit)}: {'; '.join(problems)}"
