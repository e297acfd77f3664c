"""Kernels that are disassembled together are judged as they are alone; one that cannot be made fails alone."""

from __future__ import annotations

import re

import pytest

from conformance import disassembly, machine_code
from conformance.cases import fused_a_units, skinny_units
from conformance.control_flow import parse_sass
from conformance.disassembly import _code_of, disassembled, disassembled_together
from lowlat_gemm.arch import SM90, SM100, SM107
from lowlat_gemm.kernels import split_k


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch):
    monkeypatch.setattr(machine_code, "_made", {})
    monkeypatch.setattr(machine_code, "_expected", [])


@pytest.mark.parametrize("arch", [SM90, SM100, SM107], ids=str)
def test_together_as_alone(arch, tmp_path):
    table = split_k.compile_unit(arch, 4096, 8192, 32, split_k.SplitKConfig(56, 32, 8, 8))  # with a jump table
    plain = split_k.compile_unit(arch, 1536, 7168, 1, split_k.SplitKConfig(64, 8, 3, 4))
    cubins = []
    for i, unit in enumerate((skinny_units(arch)[0], table, plain, fused_a_units(arch)[0])):
        (tmp_path / str(i)).mkdir()
        cubins.append(machine_code._compile_into(tmp_path / str(i), unit)[0])
    texts = disassembled_together(cubins)
    assert [text is None for text in texts] == [False, True, False, False]
    for cubin, text in zip(cubins, texts):
        if text is not None:
            alone, together = parse_sass(disassembled(cubin)), parse_sass(text)
            assert together.following == alone.following
            assert _without_labels(together) == _without_labels(alone)


def _without_labels(program) -> list[tuple]:
    return [(re.sub(r"`\([^)]*\)", "", one.text), one.guard) for one in program.instructions]


def test_one_that_does_not_compile_fails_alone(monkeypatch):
    good, bad, last = skinny_units(SM90)[:3]
    compile_into, order = machine_code._compile_into, []

    def broken(folder, unit):
        order.append(unit)
        if unit == bad:
            raise RuntimeError("no such instruction")
        return compile_into(folder, unit)

    monkeypatch.setattr(machine_code, "_compile_into", broken)
    machine_code.expect([good, bad, last])
    assert machine_code.compiled(good).code.sass and order == [good, bad, last]
    with pytest.raises(RuntimeError, match="no such instruction"):
        machine_code.compiled(bad)
    assert machine_code.compiled(last).code.sass != machine_code.compiled(good).code.sass
    assert len(order) == 3, "each is compiled once"


def test_one_that_cannot_be_shown_fails_alone(monkeypatch):
    good, bad = skinny_units(SM90)[:2]
    compile_into = machine_code._compile_into

    def broken(folder, unit):
        cubin, ptx, constants = compile_into(folder, unit)
        if unit == bad:
            _, code = _code_of(cubin.read_bytes())
            cubin.write_bytes(cubin.read_bytes().replace(code, b"\xff" * len(code)))
        return cubin, ptx, constants

    monkeypatch.setattr(machine_code, "_compile_into", broken)
    machine_code.expect([good, bad])
    assert "ACQBULK" in machine_code.compiled(good).code.sass
    with pytest.raises(ValueError, match="nvdisasm"):
        machine_code.compiled(bad)


def test_what_is_no_cubin_or_of_another_generation_is_shown_alone(tmp_path):
    cubins = []
    for i, unit in enumerate((skinny_units(SM90)[0], skinny_units(SM100)[0], skinny_units(SM90)[1])):
        (tmp_path / str(i)).mkdir()
        cubins.append(machine_code._compile_into(tmp_path / str(i), unit)[0])
    cut = tmp_path / "cut.cubin"
    cut.write_bytes(cubins[0].read_bytes()[:100])
    texts = disassembled_together([cut, *cubins])
    assert [text is None for text in texts] == [True, False, True, False]


def test_a_part_that_is_not_found_costs_all_of_them(tmp_path, monkeypatch):
    """Its code would be taken for the end of the kernel's before it."""
    cubins = []
    for i, unit in enumerate(skinny_units(SM90)[:2]):
        (tmp_path / str(i)).mkdir()
        cubins.append(machine_code._compile_into(tmp_path / str(i), unit)[0])
    run = disassembly.run
    monkeypatch.setattr(disassembly, "run", lambda *arguments: run(*arguments).replace(".text.k1 ", ".text.other "))
    assert disassembled_together(cubins) == [None, None]
