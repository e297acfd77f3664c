"""What the machine code of every kernel must hold, whatever the kernel: one rule a promise.

A rule takes a unit and its code and says in one line what is wrong, or None. Where it matters what ptxas did (order,
registers, spills) the rule reads machine code; where the machine code hides what was meant (which pointer, which scope)
it reads the PTX that the machine code was made from.

Loads of the weight are told by their hint: that the PTX gives it to them alone is a rule of its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from lowlat_gemm.arch import ARCHES, SM90
from lowlat_gemm.kernels import fused_a, kda, skinny, split_k
from lowlat_gemm.kernels.compile_cache import CompileUnit
from lowlat_gemm.kernels.device import EVICT_FIRST

from .control_flow import Instruction, Program, parse_ptx, parse_sass
from .machine_code import Compiled

_ARCH_OF = {arch.compile_target: arch for arch in ARCHES}
REGISTERS_PER_SM, REGISTER_UNIT = 65_536, 8
#: Kernel parameters in order; those of a residual and of y follow.
_PARAMETERS = {"skinny": ["x", "weight"], "fused_a": ["x", "weight"], "kda": ["x", "weight"], "split_k": ["weight", "", "x", ""]}
#: Machine instructions that touch global memory, but for prefetches.
_GLOBAL = (
    "LDG",
    "STG",
    "LD",
    "ST",
    "ATOM",
    "ATOMG",
    "RED",
    "REDG",
    "LDGSTS",
    "UTMALDG",
    "UTMASTG",
    "UTMAREDG",
    "UBLKCP",
    "UBLKRED",
)
_TENSOR_CORES = {"HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "QGMMA", "IMMA", "QMMA"}
#: Stores of y that no wait of the same thread precedes: the tokens of its sums were loaded behind one, and the model of
#: the pipeline shows that order.
_STORES_BEHIND_THE_RING = {("split_k", SM90.compile_target, False)}

Rule = Callable[[CompileUnit, Compiled], "str | None"]


@functools.lru_cache(maxsize=4)
def _sass(text: str) -> Program:
    return parse_sass(text)


@functools.lru_cache(maxsize=4)
def _ptx(text: str) -> Program:
    return parse_ptx(text)


def shared_memory_bytes(unit: CompileUnit) -> int:
    """Bytes of shared memory of a CTA, as the kernel's host side reckons them."""
    spec = unit.spec
    if unit.kernel == "split_k":
        return split_k.shared_memory_bytes(spec.config, spec.output_dtype, residual=spec.residual)
    if unit.kernel == "fused_a":
        return fused_a.shared_memory_bytes(spec.config, spec.token_groups)
    host = {"skinny": skinny, "kda": kda}[unit.kernel]
    return host.shared_memory_bytes(spec.config, spec.tokens)


def no_spills(unit: CompileUnit, made: Compiled) -> str | None:
    code = made.code
    if code.stack_bytes or code.local_accesses:
        return f"{code.stack_bytes} bytes of stack, {code.local_accesses} local accesses, {code.registers} registers"


def a_cta_fits(unit: CompileUnit, made: Compiled) -> str | None:
    """Registers as ptxas took them, shared memory as reckoned, which is what the launch asks for."""
    warps = -(-made.threads // 32)
    registers = -(-made.code.registers // REGISTER_UNIT) * REGISTER_UNIT * 32 * warps
    if made.threads > 1024 or made.code.registers > 255 or registers > REGISTERS_PER_SM:
        return f"{made.threads} threads of {made.code.registers} registers: {registers}, an SM has {REGISTERS_PER_SM}"
    shared, limit = shared_memory_bytes(unit), _ARCH_OF[unit.target].shared_memory_bytes
    if shared not in made.constants:
        return f"the launch does not ask for the {shared} bytes of shared memory that are reckoned"
    if shared > limit:
        return f"{shared} bytes of shared memory, a CTA may have {limit}"


def _is_weight_load(program: Program, index: int) -> bool:
    """A load with the streaming hint: LDG.NA, or a TMA load whose policy word is that of evict-first."""
    one = program.instructions[index]
    if one.is_a("LDG"):
        return ".NA" in one.opcode
    policy = re.search(r"desc\[UR(\d+)\]", one.text)
    return (
        one.is_a("UTMALDG")
        and policy is not None
        and _constants(program, index, f"UR{int(policy[1]) + 1}") == {EVICT_FIRST >> 32}
    )


def _constants(program: Program, index: int, register: str) -> set[int | None]:
    """What ``register`` may hold at ``index``: constants that reach it, None for anything else."""
    preceding = _preceding(program)
    seen, todo, found = set(), list(preceding[index]), set()
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        text = program.instructions[i].text
        written = text.split(maxsplit=1)[1].split(",")[0].strip() if " " in text else ""
        pair = re.fullmatch(r"UR(\d+)", written)
        if written == register or (
            pair and ".64" in program.instructions[i].opcode and f"UR{int(pair[1]) + 1}" == register
        ):
            constant = re.fullmatch(rf"UMOV {register}, (0x[0-9a-f]+)", text)
            found.add(int(constant[1], 16) if constant else None)
        else:
            todo.extend(preceding[i])
    return found


def _preceding(program: Program) -> list[set[int]]:
    preceding: list[set[int]] = [set() for _ in program.instructions]
    for i, nexts in enumerate(program.following):
        for j in nexts:
            preceding[j].add(i)
    return preceding


def _before_the_pdl_wait(program: Program) -> set[int]:
    """What can run before the PDL wait. One under a predicate may not be executed: it holds nothing back."""
    return program.before(i for i in program.all_of("ACQBULK") if program.instructions[i].guard is None)


def activations_wait_for_the_previous_kernel(unit: CompileUnit, made: Compiled) -> str | None:
    """No access to x, residual or y can run before the PDL wait (ACQBULK) on any path."""
    program = _sass(made.code.sass)
    early = _before_the_pdl_wait(program)
    exempt = ("STG",) if (unit.kernel, unit.target, unit.spec.residual) in _STORES_BEHIND_THE_RING else ()
    wrong = [
        program.instructions[i].text
        for i in program.all_of(*_GLOBAL)
        if i in early and not _is_weight_load(program, i) and not program.instructions[i].is_a(*exempt)
    ]
    if wrong:
        return f"{len(wrong)} accesses to activations can run before the PDL wait, the first: {wrong[0]}"


def weights_do_not_wait(unit: CompileUnit, made: Compiled) -> str | None:
    """Weight loads can run before the PDL wait."""
    program = _sass(made.code.sass)
    early = _before_the_pdl_wait(program)
    weights = [i for i in program.all_of("LDG", "UTMALDG") if _is_weight_load(program, i)]
    if not weights or not early & set(weights):
        return f"none of {len(weights)} weight loads can run before the PDL wait"


def lets_the_next_kernel_start(unit: CompileUnit, made: Compiled) -> str | None:
    program = _sass(made.code.sass)
    if not program.reachable([0]) & set(program.all_of("PREEXIT")):
        return "no launch_dependents (PREEXIT)"


def weights_and_they_alone_leave_l2_first(unit: CompileUnit, made: Compiled) -> str | None:
    """In PTX, where pointers can be traced to parameters: weight loads evict first, nothing else does."""
    program = _ptx(made.ptx)
    origins, values = _origins(program), _constant_values(program)
    for one in program.instructions:
        if not one.is_a("ld.global", "cp.async.bulk.tensor", "ld.volatile.global", "ld.relaxed.gpu.global"):
            continue
        places = re.findall(r"\[([^\]]*)\]", one.text)
        address = places[1] if one.is_a("cp.async.bulk.tensor") else places[0]
        of = {_operand(unit, number) for name in re.findall(r"%\w+", address) for number in origins.get(name, ())}
        if len(of) != 1:
            return f"a load from {sorted(of) or 'nowhere known'}: {one.text}"
        policy = one.text.split(",")[-1].strip()
        hinted = "L2::cache_hint" in one.opcode and EVICT_FIRST == values.get(
            policy, int(policy) if policy.isdigit() else None
        )
        if hinted != (of == {"weight"}):
            return f"a load of {of.pop()} {'with' if hinted else 'without'} evict-first: {one.text}"


def _operand(unit: CompileUnit, number: int) -> str:
    names = [*_PARAMETERS[unit.kernel], *(["residual"] if unit.spec.residual else []), "y", ""]
    return names[number]


def _origins(program: Program) -> dict[str, set[int]]:
    """For each register that an address may be in: the parameters whose pointer or tensor map it comes from."""
    origins: dict[str, set[int]] = {}
    moves = []
    for one in program.instructions:
        written, read = _written_and_read(one)
        if place := re.search(r"_param_(\d+)(\+\d+)?", one.text):
            # A tensor is passed with its pointer first, a tensor map is passed itself.
            if written and not place[2]:
                origins.setdefault(written[0], set()).add(int(place[1]))
        elif written and not one.is_a("setp", "ld", "mbarrier"):
            moves.append((written, read))
    changed = True
    while changed:
        changed = False
        for written, read in moves:
            of = set().union(*(origins[name] for name in read if name in origins))
            for name in written if of else ():
                if not of <= origins.setdefault(name, set()):
                    origins[name] |= of
                    changed = True
    return origins


def _written_and_read(one: Instruction) -> tuple[list[str], list[str]]:
    parts = one.text.split(maxsplit=1)
    if len(parts) < 2:
        return [], []
    target = re.match(r"\{[^}]*\}|[^,]*", parts[1])[0]
    return re.findall(r"%\w+", target), re.findall(r"%\w+", parts[1][len(target) :])


def _constant_values(program: Program) -> dict[str, int]:
    found = {}
    for one in program.instructions:
        if constant := re.fullmatch(r"mov\.b64\s+(%\w+), (\d+)", one.text):
            found[constant[1]] = int(constant[2])
    return found


def the_intended_tensor_cores(unit: CompileUnit, made: Compiled) -> str | None:
    """skinny none, fused_a mma.sync, split_k wgmma on SM90 and tcgen05 from SM100 on."""
    split_k_core = "HGMMA" if unit.target == SM90.compile_target else "UTCHMMA"
    wanted = {"skinny": set(), "kda": set(), "fused_a": {"HMMA"}, "split_k": {split_k_core}}[unit.kernel]
    found = {one.opcode.split(".")[0] for one in _sass(made.code.sass).instructions} & _TENSOR_CORES
    if found != wanted:
        return f"tensor-core instructions {sorted(found)}, expected {sorted(wanted)}"


def remote_sums_are_acquired(unit: CompileUnit, made: Compiled) -> str | None:
    """Every wait on a barrier that peers' ``st.async`` complete is ``.acquire.cluster``, and there is one."""
    program = _ptx(made.ptx)
    mapped = {}
    for i in program.all_of("mapa"):
        written, read = _written_and_read(program.instructions[i])
        mapped[written[0]] = read[0]
    sends = [program.instructions[i].text for i in program.all_of("st.async")]
    barriers = {mapped.get(re.findall(r"\[(%\w+)\]", text)[-1]) for text in sends}
    waits = [one for one in program.instructions if one.is_a("mbarrier.try_wait", "mbarrier.test_wait")]
    remote = [one for one in waits if set(re.findall(r"\[(%\w+)\]", one.text)) & barriers]
    if sends and (None in barriers or not remote):
        return f"no wait on the barrier of {len(sends)} st.async"
    if wrong := [one.text for one in remote if ".acquire.cluster" not in one.opcode]:
        return f"a wait for peers' sums without .acquire.cluster: {wrong[0]}"
    if bool(sends) != (unit.kernel == "split_k" and unit.spec.config.split > 1):
        return f"{len(sends)} st.async"


def no_thread_ends_before_the_cluster_has_begun(unit: CompileUnit, made: Compiled) -> str | None:
    """With a cluster: no thread sends or ends before it knows that every rank has its barriers."""
    program = _ptx(made.ptx)
    if unit.kernel != "split_k" or unit.spec.config.split == 1:
        return None
    early = program.before(program.all_of("barrier.cluster.wait"))
    if wrong := [program.instructions[i].opcode for i in program.all_of("ret", "st.async") if i in early]:
        return f"{wrong[0]} can run before barrier.cluster.wait"


def tensor_maps_are_acquired(unit: CompileUnit, made: Compiled) -> str | None:
    """A tensor map is a kernel parameter, which nobody writes, or ``fence.proxy.tensormap`` precedes its use."""
    program = _ptx(made.ptx)
    parameters = {_written_and_read(program.instructions[i])[0][0] for i in program.all_of("cvta.param")}
    unfenced = program.before(program.all_of("fence.proxy.tensormap::generic"))
    for i in program.all_of("cp.async.bulk.tensor"):
        map_address = re.search(r"\], \[(%\w+)", program.instructions[i].text)[1]
        if map_address not in parameters and i in unfenced:
            return f"a tensor map in memory that is not acquired: {program.instructions[i].text}"


def tensor_work_is_fenced(unit: CompileUnit, made: Compiled) -> str | None:
    """tcgen05: a fence behind every wait that precedes such work, and one before every arrival that follows it."""
    program = _ptx(made.ptx)
    work = program.all_of("tcgen05.mma", "tcgen05.ld", "tcgen05.dealloc")
    waits = program.all_of("mbarrier.try_wait", "mbarrier.test_wait")
    unfenced = program.after(waits, program.all_of("tcgen05.fence::after_thread_sync"))
    if wrong := [program.instructions[i].opcode for i in work if i in unfenced]:
        return f"{wrong[0]} can follow a wait without tcgen05.fence::after_thread_sync"
    begun = program.all_of("tcgen05.alloc", "tcgen05.mma", "tcgen05.ld")
    unfenced = program.after(begun, [*program.all_of("tcgen05.fence::before_thread_sync"), *waits])
    if wrong := [program.instructions[i].opcode for i in program.all_of("mbarrier.arrive") if i in unfenced]:
        return f"{wrong[0]} can follow tcgen05 work without tcgen05.fence::before_thread_sync"


def tensor_memory_is_given_back(unit: CompileUnit, made: Compiled) -> str | None:
    """tcgen05: one allocation, its permit given up, and no end of the kernel without deallocation."""
    program = _ptx(made.ptx)
    counts = [len(program.all_of(f"tcgen05.{name}")) for name in ("alloc", "relinquish_alloc_permit", "dealloc")]
    needed = unit.kernel == "split_k" and unit.target != SM90.compile_target
    if counts != [int(needed)] * 3:
        return f"alloc, relinquish_alloc_permit, dealloc: {counts}"
    leaves = program.after(program.all_of("tcgen05.alloc"), program.all_of("tcgen05.dealloc"))
    if leaves & set(program.all_of("ret")):
        return "the kernel can end without tcgen05.dealloc"


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        no_spills,
        a_cta_fits,
        activations_wait_for_the_previous_kernel,
        weights_do_not_wait,
        lets_the_next_kernel_start,
        weights_and_they_alone_leave_l2_first,
        the_intended_tensor_cores,
        remote_sums_are_acquired,
        no_thread_ends_before_the_cluster_has_begun,
        tensor_maps_are_acquired,
        tensor_work_is_fenced,
        tensor_memory_is_given_back,
    )
}


def breaches(unit: CompileUnit, made: Compiled) -> list[str]:
    """One line a rule that the code breaks."""
    return [f"{name}: {problem}" for name, rule in RULES.items() if (problem := rule(unit, made)) is not None]
