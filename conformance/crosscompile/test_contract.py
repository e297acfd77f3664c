"""Every kernel and config of a generation holds ``conformance/contract.py``, on a machine without a GPU: table cells that
run on it are compile-checked, and the record says so."""

from __future__ import annotations

from conformance.cases import unit_id
from conformance.contract import breaches
from conformance.machine_code import compiled
from lowlat_cli.record import Status


def test_contract(written_unit, arch, unit_result):
    assert written_unit.target == arch.compile_target
    problems = breaches(written_unit, compiled(written_unit))
    assert not problems, f"{unit_id(written_unit)}: {'; '.join(problems)}"
    unit_result(written_unit, Status.COMPILED)
