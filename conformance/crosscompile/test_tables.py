"""What every cell of the tables compiles from compiles for its generation and does not spill: its cells are
compile-checked, and the record says so. Also kernels that the dispatcher does not have yet."""

from __future__ import annotations

from conformance.cases import unit_id
from conformance.machine_code import code_of
from lowlat_cli.record import Status


def test_a_cells_kernel_compiles_without_spills(table_unit, arch, unit_result):
    assert table_unit.target == arch.compile_target
    code = code_of(table_unit)
    assert code.stack_bytes == 0 and code.local_accesses == 0, (
        f"{unit_id(table_unit)}: {code.registers} registers, {code.stack_bytes} bytes of stack, "
        f"{code.local_accesses} local loads and stores; expected none"
    )
    unit_result(table_unit, Status.COMPILED)
