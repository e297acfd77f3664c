"""A jump through a table is followed to every place that the table names."""

from __future__ import annotations

import pytest

from conformance.control_flow import parse_sass
from conformance.machine_code import with_jump_targets

CODE = """
        /*0000*/                   LDC R6, c[0x2][R5] ;
        /*0010*/                   BRX R6 -0x20 ;
.L_x_1:
        /*0020*/                   ACQBULK ;
        /*0030*/                   LDG.E R0, desc[UR4][R2.64] ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   LDG.E.64 R0, desc[UR4][R2.64] ;
        /*0060*/                   EXIT ;
"""


def _data(*words: int) -> str:
    text = ", ".join(f"0x{byte:02x}" for word in words for byte in word.to_bytes(4, "little", signed=True))
    return f".nv.constant2.kernel_1:\n        /*0000*/ \t.byte\t{text}\n\n.text.kernel_1:\n{CODE}"


def test_what_a_table_names_can_run_behind_the_jump():
    program = parse_sass(with_jump_targets(CODE, _data(0x50, 0x20)))
    before = program.before(program.all_of("ACQBULK"))
    assert {program.instructions[i].opcode for i in before} == {"LDC", "BRX", "LDG.E.64", "EXIT"}


def test_what_no_table_names_does_not():
    program = parse_sass(with_jump_targets(CODE, _data(0x20)))
    assert {program.instructions[i].opcode for i in program.before(program.all_of("ACQBULK"))} == {"LDC", "BRX"}
    assert len(program.reachable([0])) == 5


@pytest.mark.parametrize("data", ["", _data()], ids=["no section", "empty"])
def test_a_jump_without_a_table_is_an_error(data):
    with pytest.raises(ValueError, match="0 bytes in constant bank 2"):
        with_jump_targets(CODE, data)
    with pytest.raises(ValueError, match="a jump without a label: BRX R6 -0x20"):
        parse_sass(CODE)


def test_a_place_where_no_instruction_is_is_an_error():
    with pytest.raises(ValueError, match="labels that are not there: .'0x58'"):
        parse_sass(with_jump_targets(CODE, _data(0x58)))
