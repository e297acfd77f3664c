"""The compile cache: once per unit, one at a time, never by looking, and nothing kept alive by a failure."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from dataclasses import fields

import pytest

from conformance.fakes import public_world  # noqa: F401
from lowlat_gemm.arch import ARCHES
from lowlat_gemm.kernels.compile_cache import CompileCache, CompileError, CompileUnit, Made
from lowlat_gemm.kernels.registry import backend
from lowlat_gemm.kernels.skinny import SkinnyConfig, SkinnySpec
from lowlat_gemm.tables import load_table


def cache_of(compiler) -> CompileCache:
    """A cache whose kernels are all compiled by ``compiler``, none loaded."""
    return CompileCache(lambda unit: Made(compiler(unit), compiled=True))


UNIT, OTHER = CompileUnit("toy", "sm_90a", 1), CompileUnit("toy", "sm_90a", 2)


def test_looking_never_compiles():
    cache = cache_of(lambda unit: object())
    assert cache.peek(UNIT) is None and cache.compiles == 0
    compiled = cache.get(UNIT)
    assert cache.peek(UNIT) is compiled is cache.get(CompileUnit("toy", "sm_90a", 1)) and cache.compiles == 1
    assert cache.peek(OTHER) is None and cache.get(OTHER) is not compiled and cache.compiles == 2


@pytest.mark.parametrize("units", [[UNIT] * 8, [UNIT, OTHER] * 4], ids=["one unit", "two units"])
def test_eight_threads_compile_each_unit_once_and_one_at_a_time(units):
    inside, most, together = 0, 0, threading.Barrier(len(units))

    def compiler(unit):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return object()

    cache, found = cache_of(compiler), [None] * len(units)

    def ask(index):
        together.wait()
        found[index] = cache.get(units[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(units))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert None not in found and most == 1
    assert len(set(map(id, found))) == cache.compiles == len(set(units))


def failing(unit):
    raise KeyError("sm_999a")  # what the DSL raises for an unknown target


def test_a_failure_is_said_once_and_remembered(caplog):
    cache = cache_of(failing)
    with caplog.at_level(logging.DEBUG, "lowlat_gemm"):
        for attempt in range(3):
            with pytest.raises(CompileError) as error:
                cache.get(UNIT)
            assert "toy" in str(error.value) and "sm_90a" in str(error.value) and "sm_999a" in str(error.value)
            if attempt == 0:
                assert isinstance(error.value.__cause__, KeyError)
    assert cache.compiles == 1 and cache.peek(UNIT) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_one_failure_does_not_touch_other_units():
    cache = cache_of(lambda unit: failing(unit) if unit is UNIT else "good")
    with pytest.raises(CompileError):
        cache.get(UNIT)
    assert cache.get(OTHER) == "good"


class Activation:
    """Stands for the caller's tensor."""


def ask_with_an_activation(cache) -> weakref.ref:
    activation = Activation()
    try:
        cache.get(UNIT)
    except CompileError:
        pass
    return weakref.ref(activation)


def test_a_remembered_failure_does_not_grow_or_keep_its_callers_alive():
    """A server asks on every token. An exception that is raised again collects a traceback of every caller."""
    cache = cache_of(failing)
    activations = [ask_with_an_activation(cache) for _ in range(20)]
    gc.collect()
    alive = sum(reference() is not None for reference in activations[1:])
    assert alive == 0, f"the frames of {alive} of 19 later callers, and the tensors in them, are still alive"


def test_the_users_interrupt_is_no_failure_of_the_unit():
    answers = [KeyboardInterrupt(), "compiled"]

    def compiler(unit):
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    cache = cache_of(compiler)
    with pytest.raises(KeyboardInterrupt):
        cache.get(UNIT)
    assert cache.get(UNIT) == "compiled"


def test_clear_forgets_compiled_and_failed():
    compiler = {UNIT: "good"}
    cache = cache_of(lambda unit: compiler[unit])
    kept = cache.get(UNIT)
    with pytest.raises(CompileError):
        cache.get(OTHER)
    cache.clear()
    compiler[OTHER] = "mended"
    assert cache.peek(UNIT) is None and kept == "good"
    assert (cache.get(UNIT), cache.get(OTHER), cache.compiles) == ("good", "mended", 4)


def toy(number: int) -> CompileUnit:
    return CompileUnit("toy", "sm_90a", number)


def test_a_kernel_stays_however_many_come():
    """A captured graph holds no reference to its kernels: one that was let go would be launched all the same."""
    cache = CompileCache(lambda unit: Made([unit], compiled=True), limit=3)
    first = cache.get(toy(0))
    for number in range(1, 100):
        cache.get(toy(number))
    assert cache.peek(toy(0)) is first and cache.compiles == 100


def test_failures_are_bounded_too():
    cache = CompileCache(failing, limit=3)
    for number in range(5):
        with pytest.raises(CompileError):
            cache.get(toy(number))
    assert [cache.failed(toy(number)) is not None for number in range(5)] == [False, False, True, True, True]


def units(arch) -> list[tuple[tuple, CompileUnit]]:
    """Every skinny cell of the public tables of ``arch``, and what must be compiled for it."""
    found = []
    for key, cell in load_table("kimi_k3", arch).cells():
        implementation = backend(cell.backend, arch)
        if implementation is not None:
            config = implementation.parse_config(cell.config)
            found.append((key, implementation.compile_unit(arch, key.n, key.k, key.m, config, residual=key.residual)))
    return found


@pytest.mark.usefixtures("public_world")
@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_units_are_of_the_config_and_not_of_the_cell(arch):
    found = units(arch)
    distinct = {unit for _, unit in found}
    # By hand: the config with its unroll cut to the whole steps of K, the tokens, the residual.
    expected = set()
    for key, _ in found:
        config = dict(load_table("kimi_k3", arch).cell(key.n, key.k, key.m, residual=key.residual).config)
        steps = key.k // (config["block_size"] * config["vector_width"])
        config["k_unroll"] = min(config["k_unroll"], steps)
        expected.add((key.m, key.residual, *sorted(config.items())))
    assert len(distinct) == len(expected)
    # Public tables share configs between shapes: far fewer kernels than cells.
    assert len(distinct) < 0.75 * len(found), f"{len(distinct)} units for {len(found)} cells"
    assert all(unit.target == arch.compile_target for unit in distinct)


@pytest.mark.usefixtures("public_world")
@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_no_unit_knows_a_shape_that_its_code_does_not_depend_on(arch):
    for key, unit in units(arch):
        assert isinstance(unit.spec, SkinnySpec) and unit.spec.tokens == key.m and unit.spec.residual == key.residual
        numbers = {getattr(unit.spec.config, f.name) for f in fields(SkinnyConfig) if f.name != "static_k"}
        assert key.n not in numbers and (key.k not in numbers or unit.spec.config.static_k == key.k), (key, unit)
        assert unit.spec.config.static_k in (None, key.k)


@pytest.mark.usefixtures("public_world")
def test_all_tables_together_take_no_more_kernels_than_known():
    count = {str(arch): len({unit for _, unit in units(arch)}) for arch in ARCHES}
    assert count == {"sm90": 21, "sm100": 26, "sm103": 36, "sm107": 36}
