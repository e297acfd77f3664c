"""Each rule of the contract is broken in a real kernel, most by leaving a step out of its source, and must be seen."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import cutlass.cute as cute
import pytest

from conformance.cases import SPLIT_K_CONFIGS
from conformance.contract import RULES, breaches
from conformance.control_flow import parse_sass
from conformance.machine_code import Compiled, compiled, read_cubin
from lowlat_gemm.arch import SM90, SM100, SM107
from lowlat_gemm.kernels import device, skinny, split_k, tensor_memory
from lowlat_gemm.kernels.compiling import compile_now

#: One generation of each way to multiply; the others compile from the same source.
GENERATIONS = pytest.mark.parametrize("arch", [SM90, SM100], ids=str)
#: Shared rings in a cluster of four, with residual, so that every operand is there.
SPLIT_K = {"config": SPLIT_K_CONFIGS[0], "residual": True}


def _units(arch):
    config = skinny.default_config(arch, 1536, 7168, 2, residual=True)
    return {
        "skinny": skinny.compile_unit(arch, 1536, 7168, 2, config, residual=True),
        "split_k": split_k.compile_unit(arch, 1536, 7168, 1, **SPLIT_K),
    }


def _recompiled(unit) -> Compiled:
    """``unit`` as it compiles now, past the session's cache: its source has been changed."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = compile_now(unit, f"--keep-cubin --keep-ptx --dump-dir={folder}")
        constants = frozenset(map(int, re.findall(r"constant\((\d+) : i64\)", str(kernel.ir_module))))
        return Compiled(
            read_cubin(next(Path(folder).glob("*.cubin"))), next(Path(folder).glob("*.ptx")).read_text(), constants
        )


def _nothing(*arguments) -> None:
    pass


def _plain_wait(barrier, phase) -> None:
    cute.arch.mbarrier_wait(barrier, phase)


#: rule -> (module, name, what stands there instead, kernels that must break it)
LEFT_OUT = {
    "activations_wait_for_the_previous_kernel": (device, "wait_for_previous_kernel", _nothing, ("skinny", "split_k")),
    "lets_the_next_kernel_start": (device, "let_next_kernel_start", _nothing, ("skinny", "split_k")),
    "weights_and_they_alone_leave_l2_first": (device, "EVICT_FIRST", device.EVICT_LAST, ("skinny", "split_k")),
    "weights_do_not_wait": (device, "EVICT_FIRST", device.EVICT_LAST, ("split_k",)),
    "remote_sums_are_acquired": (device, "wait_for_cluster_data", _plain_wait, ("split_k",)),
}
#: The same of tensor memory: from SM100 on.
LEFT_OUT_OF_TENSOR_MEMORY = {
    "tensor_work_is_fenced, behind waits": (tensor_memory, "fence_after_hand_over", _nothing),
    "tensor_work_is_fenced, before arrivals": (tensor_memory, "fence_before_hand_over", _nothing),
    "tensor_memory_is_given_back": (tensor_memory, "release", _nothing),
}


@GENERATIONS
@pytest.mark.parametrize("rule", LEFT_OUT)
def test_a_step_left_out_of_the_source(rule, arch, monkeypatch):
    module, name, instead, kernels = LEFT_OUT[rule]
    monkeypatch.setattr(module, name, instead)
    for kernel in kernels:
        unit = _units(arch)[kernel]
        assert rule in RULES and RULES[rule](unit, _recompiled(unit)) is not None, f"{kernel}: not seen"


@pytest.mark.parametrize("step", LEFT_OUT_OF_TENSOR_MEMORY)
def test_a_step_left_out_of_tensor_memory(step, monkeypatch):
    rule = step.split(",")[0]
    monkeypatch.setattr(*LEFT_OUT_OF_TENSOR_MEMORY[step])
    unit = _units(SM100)["split_k"]
    found = breaches(unit, _recompiled(unit))
    assert [line for line in found if line.startswith(rule)] == found and found, found


@GENERATIONS
def test_sm90_has_no_tensor_memory(arch):
    made = compiled(_units(arch)["split_k"])
    assert ("tcgen05" in made.ptx) == (arch != SM90)


def _in_sass(pattern: str, text: str, count: int = 0):
    def change(made: Compiled) -> Compiled:
        sass, changes = re.subn(pattern, text, made.code.sass, count)
        assert changes, f"{pattern} is not in the machine code"
        return replace(made, code=replace(made.code, sass=sass))

    return change


def _in_ptx(pattern: str, text: str, count: int = 0):
    def change(made: Compiled) -> Compiled:
        ptx, changes = re.subn(pattern, text, made.ptx, count)
        assert changes, f"{pattern} is not in the PTX"
        return replace(made, ptx=ptx)

    return change


#: What the compiler could do, or a source that does not compile: rule, kernel, change of its code.
CHANGED = [
    ("no_spills", "skinny", lambda made: replace(made, code=replace(made.code, stack_bytes=16))),
    ("no_spills", "skinny", lambda made: replace(made, code=replace(made.code, local_accesses=1))),
    ("a_cta_fits", "split_k", lambda made: replace(made, code=replace(made.code, registers=256))),
    ("a_cta_fits", "split_k", lambda made: replace(made, ptx=re.sub(r"\.reqntid \d+", ".reqntid 1056", made.ptx))),
    ("a_cta_fits", "split_k", lambda made: replace(made, constants=frozenset())),
    # A weight load without its hint is taken for one of activations; one of activations goes above the wait.
    ("activations_wait_for_the_previous_kernel", "skinny", _in_sass(r"LDG\.E\.NA", "LDG.E", 1)),
    ("activations_wait_for_the_previous_kernel", "skinny", _in_sass(r"PREEXIT ;", "LDG.E R0, desc[UR4][R2.64] ;", 1)),
    ("activations_wait_for_the_previous_kernel", "split_k", _in_sass(r"ACQBULK ;", "NOP ;", 1)),
    ("activations_wait_for_the_previous_kernel", "split_k", _in_sass(r"0x12f00000", "0x14f00000")),
    # A way around the wait.
    ("activations_wait_for_the_previous_kernel", "skinny", _in_sass(r"ACQBULK ;", "@P0 ACQBULK ;")),
    ("weights_do_not_wait", "skinny", _in_sass(r"(/\*0000\*/\s+)[^;]+;", r"\1ACQBULK ;", 1)),
    ("weights_do_not_wait", "split_k", _in_sass(r"(/\*0000\*/\s+)[^;]+;", r"\1ACQBULK ;", 1)),
    ("the_intended_tensor_cores", "skinny", _in_sass(r"FFMA ", "HMMA.16816.F32 ", 1)),
    ("the_intended_tensor_cores", "split_k", _in_sass(r"(UTCHMMA|HGMMA\S*) ", "HMMA.16816.F32 ")),
    ("no_thread_ends_before_the_cluster_has_begun", "split_k", _in_ptx(r"barrier\.cluster\.wait;", "", 1)),
    ("tensor_maps_are_acquired", "split_k", _in_ptx(r"cvta\.param\.u64( \t%\w+), (%\w+);", r"ld.global.b64 \1, [\2];")),
    ("remote_sums_are_acquired", "split_k", _in_ptx(r"\.acquire\.cluster", "")),
    ("weights_and_they_alone_leave_l2_first", "split_k", _in_ptx(str(device.EVICT_LAST), str(device.EVICT_FIRST))),
    (
        "weights_and_they_alone_leave_l2_first",
        "skinny",
        _in_ptx(r"ld\.global(\.v4[^;]*);", rf"ld.global.L2::cache_hint\1, {device.EVICT_FIRST};", 1),
    ),
]


@GENERATIONS
@pytest.mark.parametrize("index", range(len(CHANGED)), ids=lambda i: f"{CHANGED[i][0]}-{CHANGED[i][1]}-{i}")
def test_changed_code(index, arch):
    rule, kernel, change = CHANGED[index]
    unit = _units(arch)[kernel]
    assert RULES[rule](unit, compiled(unit)) is None, "the kernel as it is breaks the rule"
    assert RULES[rule](unit, change(compiled(unit))) is not None, "not seen"


@GENERATIONS
def test_too_much_shared_memory(arch):
    unit = _units(arch)["split_k"]
    config = replace(unit.spec.config, rows=128, stages=32)
    large = replace(unit, spec=replace(unit.spec, config=config))
    reckoned = split_k.shared_memory_bytes(config, residual=True)
    problem = RULES["a_cta_fits"](large, replace(compiled(unit), constants=frozenset([reckoned])))
    assert f"{reckoned} bytes of shared memory, a CTA may have" in problem


def test_every_rule_is_broken_somewhere():
    broken = {*LEFT_OUT, *(step.split(",")[0] for step in LEFT_OUT_OF_TENSOR_MEMORY), *(rule for rule, _, _ in CHANGED)}
    assert broken == set(RULES)


#: A jump through a table, as nvdisasm shows it: to the store before the wait, and to the wait.
TABLE = """
        /*0000*/                   LDC R2, c[0x2][R3] ;
        /*0010*/                   BRX R2 -0x20      (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0020*/                   STG.E desc[UR4][R2.64], R5 ;
.L_x_2:
        /*0030*/                   ACQBULK ;
        /*0040*/                   EXIT ;
"""


@pytest.mark.parametrize("jump", ["BRX R2", "BRXU UR8"])
def test_jumps_through_tables_are_followed(jump):
    text = TABLE.replace("BRX R2", jump)
    program = parse_sass(text)
    assert program.following[1] == {2, 3}
    assert program.before(program.all_of("ACQBULK")) == {0, 1, 2}
    with pytest.raises(ValueError, match=f"a jump without a label: {jump}"):
        parse_sass(re.sub(r"\(\*.*\*\)", "", text))


@pytest.mark.parametrize("arch", [SM90, SM100, SM107], ids=str)
def test_a_split_of_eight_holds_the_contract(arch):
    """Of so many ranks ptxas makes jump tables; on SM107 by uniform registers."""
    unit = split_k.compile_unit(arch, 4096, 8192, 32, split_k.SplitKConfig(56, 32, 8, 8))
    made = compiled(unit)
    assert re.search(r"\bBRXU?\b", made.code.sass), "no jump table: the test says nothing"
    assert breaches(unit, made) == []
