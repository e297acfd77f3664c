"""The model of split_k's pipeline: every order ends well, each mistake is found, its steps are the code's."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.model.bugs import BUGS, HARMLESS
from conformance.model.explore import Step, Thread, explore
from conformance.model.parts import Size
from conformance.model.pipeline import Pipeline, check
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.split_k import SplitKConfig, why_not

KERNELS = Path(importlib.util.find_spec("lowlat_gemm.kernels").origin).parent

#: Rings shorter and longer than the work, of one depth and of two, one warpgroup and two, prefetch and trigger at both ends;
#: ranks that own several groups, one, or none.
SIZES = [
    *(Size(arch, 2, tiles) for arch in ("sm90", "sm100") for tiles in (1, 2, 3, 5)),
    *(Size(arch, 3, 5, prefetch=2, trigger=1) for arch in ("sm90", "sm100")),
    *(Size(arch, 3, 4, prefetch=99, trigger=99) for arch in ("sm90", "sm100")),
    *(Size(arch, 2, 4, warpgroups=2, token_stages=3) for arch in ("sm90", "sm100")),
    *(Size(arch, 3, 4, token_stages=2, prefetch=2) for arch in ("sm90", "sm100")),
    *(Size(arch, 2, 7, token_stages=3) for arch in ("sm90", "sm100")),
    *(Size(arch, 3, 7, token_stages=2) for arch in ("sm90", "sm100")),
    *(Size(arch, 2, 3, split=2, groups=groups) for arch in ("sm90", "sm100") for groups in (1, 2)),
    *(Size(arch, 2, 2, split=2, groups=3, trigger=9) for arch in ("sm90", "sm100")),
    *(Size(arch, 2, 2, split=2, groups=2, warpgroups=2) for arch in ("sm90", "sm100")),
    *(Size(arch, 2, 1, split=3, groups=2) for arch in ("sm90", "sm100")),
    Size("sm100", 1, 3),
    Size("sm100", 2, 4, token_stages=1),
]

#: What a mistake leads to.
FOUND_AS = {
    "sums_not_acquired": "has not come",
    "no_wait_for_sums": "has not come",
    "ends_before_sums": "touches a CTA that has ended",
    "no_cluster_wait": "landed 0 is not initialised",
    "tokens_before_pdl_wait": "x is read while the previous kernel may write it",
    "phase_not_flipped": "deadlock",
    "barriers_of_the_shorter_ring": "deadlock",
    "asked_before_the_phase_is_flipped": "stage that holds",
    "armed_for_too_few": "deadlock",
    "map_on_another_stream": "a tensor map that is not there yet",
    "map_not_acquired": "a tensor map that is not there yet",
    "barriers_unfenced": "is not initialised",
    "released_too_early": "holds nothing whole",
    "released_by_arrival": "holds nothing whole",
    "one_pointer_barrier": "tensor memory holds None",
    "no_fence_behind_accumulated": "tensor memory holds ('garbage',)",
    "no_fence_behind_drained": "tensor memory holds None",
    "no_fence_before_drained": "tensor memory holds None",
    "no_fence_before_allocated": "the address of tensor memory is not there yet",
    "no_fence_behind_full": "holds nothing whole",
    "freed_before_read": "tensor memory holds None",
    "next_kernel_before_allocation": "next kernel beside 0 at: ends",
    "idle_commits": "touches a CTA that has ended",
    "address_not_waited_for": "the address of tensor memory is not there yet",
    "sums_kept": "tensor memory holds ('garbage', 0, 1, 2)",
}


#: Where it shows, if not in the usual size: the phase that passes early needs readers that have not come yet.
SHOWN_BY = {
    "barriers_of_the_shorter_ring": {"token_stages": 3, "tiles": 4},
    "one_pointer_barrier": {"split": 1, "groups": 1, "warpgroups": 2},
    "next_kernel_before_allocation": {"trigger": 9},
}


def _where(bug: str) -> list[str]:
    return [arch for archs, bugs in BUGS.items() if bug in bugs for arch in archs.split()]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_order_ends_well(size):
    outcome = check(size)
    assert outcome.problem is None, f"{outcome.problem}\n" + "\n".join(outcome.tale)


@pytest.mark.parametrize("bug", [bug for bugs in BUGS.values() for bug in bugs])
def test_each_mistake_is_found(bug):
    for arch in _where(bug):
        usual = Size(arch, 2, 3, split=2, groups=2)
        outcome = check(replace(usual, bug=bug, **SHOWN_BY.get(bug, {})))
        assert outcome.problem is not None and FOUND_AS[bug] in outcome.problem, f"{arch}: {outcome.problem}"
    assert _where(bug)


@pytest.mark.parametrize("archs, repair", [(archs, name) for archs, names in HARMLESS.items() for name in names])
def test_public_kernels_with_their_repair(archs, repair):
    """One barrier for address and release is right once the multiplying warp waits for its first phase; a map in memory
    once it is uploaded in the kernel's own stream and acquired."""
    for arch in archs.split():
        assert check(Size(arch, 2, 3, warpgroups=2, bug=repair)).problem is None


def test_rings_of_one_stage_hang_where_the_predicate_refuses_them():
    """On SM90 a stage is given back when the next one's products are under way: a ring of one waits for itself."""
    for size, config in (
        (Size("sm90", 1, 2), SplitKConfig(56, 8, 1, 1)),
        (Size("sm90", 2, 2, token_stages=1), SplitKConfig(56, 8, 1, 8, token_stages=1)),
    ):
        assert check(size).problem.startswith("deadlock")
        assert "expected 2 to 32" in why_not(SM90, 1536, 7168, 1, config)


# Walking every order without leaving any out.


@pytest.mark.parametrize("size", [Size("sm90", 2, 2), Size("sm100", 1, 1)], ids=str)
def test_the_reduction_loses_nothing_on_small_sizes(size):
    bugs = [None, *(bug for bugs in BUGS.values() for bug in bugs if size.arch in _where(bug))]
    for bug in bugs:
        pipeline = Pipeline(replace(size, bug=bug))
        full = explore(pipeline.threads, pipeline.values, reduced=False)
        reduced = explore(pipeline.threads, pipeline.values)
        assert (full.problem is None) == (reduced.problem is None), f"{bug}: {full.problem} / {reduced.problem}"
        assert reduced.states <= full.states


def _counter(name: str) -> Thread:
    """Reads x, then writes what it read and one: two of them lose an update in some orders."""

    def read(view):
        view[f"held by {name}"] = view["x"]

    def write(view):
        view["x"] = view[f"held by {name}"] + 1.0

    held = frozenset([f"held by {name}"])
    return Thread(
        name,
        [
            Step("reads", reads=frozenset(["x"]), writes=held, run=read),
            Step("writes", reads=held, writes=frozenset(["x"]), run=write),
        ],
    )


def test_a_lost_update_is_found():
    def check_sum(view):
        if view["x"] != 2.0:
            view.fail(f"x is {view['x']}")

    threads = [_counter("a"), _counter("b")]
    for thread in threads:
        thread.steps.append(Step("is done", adds=frozenset(["done"]), run=lambda v: v.change("done", lambda n: n + 1)))
    last = Step(
        "looks", waits=frozenset(["done"]), reads=frozenset(["x"]), ready=lambda v: v["done"] == 2, run=check_sum
    )
    outcome = explore([*threads, Thread("c", [last])], {"x": 0.0, "held by a": 0.0, "held by b": 0.0, "done": 0})
    assert outcome.problem == "c: looks: x is 1.0" and outcome.tale[0].endswith("reads")


def test_a_step_may_touch_only_what_it_declares():
    step = Step("writes", run=lambda view: view.__setitem__("x", 1))
    with pytest.raises(AssertionError, match="writes x, undeclared"):
        explore([Thread("a", [step])], {"x": 0})


# The names of the code.


def _function(code: str) -> str:
    """Source of "module.Class.function" or "module.function" in lowlat_gemm/kernels. Raises KeyError without one."""
    module, *path = code.split(".")
    text = (KERNELS / f"{module}.py").read_text()
    nodes = ast.parse(text).body
    for name in path:
        found = {node.name: node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        nodes = found[name].body
    return ast.get_source_segment(text, found[name])


def _device_functions() -> list[str]:
    """"module.Class.function" or "module.function" of everything in split_k's device code."""
    found = []
    for module in sorted({step.split(".")[0] for step, _ in _named_steps()}):
        for node in ast.parse((KERNELS / f"{module}.py").read_text()).body:
            if isinstance(node, ast.ClassDef):
                found += [f"{module}.{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)]
            elif isinstance(node, ast.FunctionDef):
                found.append(f"{module}.{node.name}")
    return found


def _named_steps() -> set[tuple[str, str]]:
    found = set()
    for size in SIZES:
        found |= {(step.code, step.source) for thread in Pipeline(size).threads for step in thread.steps if step.code}
    return found


def test_steps_stand_for_code_that_is_there():
    steps = _named_steps()
    assert len({code for code, _ in steps}) > 10
    missing = [f"{code}: {source}" for code, source in sorted(steps) if source not in _function(code)]
    assert not missing, f"no longer in the code, the model must follow it: {missing}"
    assert all(source for _, source in steps)


def test_every_synchronisation_of_the_code_is_in_the_model():
    """The waits, arrivals and hand-overs of split_k's device code: each is a step's source, which names its function.

    But for the barrier of one row warpgroup in ``store``, which is one thread here: the emulator follows its warps.
    """
    words = (
        "mbarrier_wait(",
        "wait_unless(",
        "is_over(",
        "mbarrier_arrive(",
        "cluster_wait()",
        "cluster_arrive",
        "wait_group(",
        "give_back_when_done(empty",
        "give_back_when_done(tensor",
        "wait_for_previous_kernel()",
        "let_next_kernel_start()",
        "wait_for_cluster_data(",
        "tensor_memory.wait(",
        " wait(",
        "store_async_dsmem(",
        "alloc_tmem(",
        "dealloc_tmem(",
        "sync_threads()",
    )
    steps = _named_steps()
    helpers = {"tensor_memory.wait"}  # its callers are named
    for code in sorted(set(_device_functions()) - helpers):
        known = [source for name, source in steps if name == code]
        for line in _function(code).splitlines():
            if any(word in line for word in words) and not line.strip().startswith(("#", '"""', "def ")):
                assert any(source in line for source in known), f"{code} does what the model does not: {line.strip()}"
