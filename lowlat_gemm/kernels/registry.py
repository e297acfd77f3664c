"""The backends that exist in this build, each behind one interface."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..arch import ARCHES, SM90, Arch
from ..backends import BACKEND_NAMES
from ..operands import Refusal
from . import flashinfer, fused_a, kda, skinny, split_k
from .compile_cache import CompileUnit


@dataclass(frozen=True)
class Backend:
    """One kernel family.

    ``parse_config(mapping)``: the config dataclass; ValueError with the value.
    ``why_not(arch, n, k, m, config, residual=False)``: the one predicate that dispatcher, tuner, table validation and
    tests call; None when it can serve.
    ``compile_unit(arch, n, k, m, config, residual=False)``: what must be compiled for it.
    ``kernel_modules``: for each compile target ("sm_90a") that the kernel has code for, the name of the module that
    holds it and ``compile_kernel``.
    ``invariance(config)``: what a token's bits depend on besides its own row. Two configs of equal answers give equal
    bits at every M, however large; None: the bits, or whether it can serve, depend on M.
    ``proven``: the compile targets whose code hw_matrix/records shows right, there or on another generation that runs the
    same code, with nothing open against it. Until then it compiles and is tested, and the dispatcher takes it for not built.
    ``unavailable(arch)``: why the package that brings the kernels cannot serve a generation; None where it can, and for
    our own, whose packages are ``missing_packages``' business.
    ``layout_refusal(config, x, weight)``: what it asks of operands beyond ``check_operands``; None: nothing.
    """

    name: str
    parse_config: Callable[[Mapping[str, int]], Any]
    why_not: Callable[..., str | None]
    compile_unit: Callable[..., CompileUnit]
    kernel_modules: Mapping[str, str]
    invariance: Callable[[Any], Hashable | None]
    proven: frozenset[str]
    unavailable: Callable[[Arch], str | None] = lambda arch: None
    layout_refusal: Callable[[Any, Any, Any], Refusal | None] | None = None

    def proven_on(self, arch: Arch) -> bool:
        """Whether the dispatcher may take it on ``arch``."""
        return arch.compile_target in self.proven


def _on_every_generation(code: str) -> dict[str, str]:
    return {arch.compile_target: code for arch in ARCHES}


def _backend(host, code: Mapping[str, str], shown_on: Arch, *, invariance: Callable[[Any], Hashable | None]) -> Backend:
    """The backend of a kernel's host-side module ``host``; ``code``: its ``kernel_modules``, of which the one of the
    generation ``shown_on`` has been run, for all that share it."""
    proven = frozenset(target for target, module in code.items() if module == code[shown_on.compile_target])
    return Backend(host.NAME, host.parse_config, host.why_not, host.compile_unit, code, invariance, proven)


_SPLIT_K_CODE = _on_every_generation("split_k_sm100_kernel") | {SM90.compile_target: "split_k_sm90_kernel"}


_BACKENDS = {
    made.name: made
    for made in (
        _backend(skinny, _on_every_generation("skinny_kernel"), SM90, invariance=lambda config: None),
        _backend(fused_a, _on_every_generation("fused_a_kernel"), SM90, invariance=lambda config: (fused_a.NAME, config.k_warps)),
        # Nobody has run it from SM100 on.
        _backend(split_k, _SPLIT_K_CODE, SM90, invariance=lambda config: (split_k.NAME, config.split)),
    )
}


#: Kernels of other packages: prepared in the process that launches them, for one device, and never kept in our store.
_FOREIGN = {
    flashinfer.NAME: Backend(
        flashinfer.NAME,
        flashinfer.parse_config,
        flashinfer.why_not,
        flashinfer.compile_unit,
        _on_every_generation("flashinfer_kernel"),
        # A tactic is chosen for each M.
        invariance=lambda config: None,
        # The kernels behind the one call differ by generation; from SM100 on no recorded run has gone through them.
        proven=frozenset({SM90.compile_target}),
        unavailable=flashinfer.unavailable,
        layout_refusal=flashinfer.layout_refusal,
    )
}


#: Kernels that no row of a table names: they are launched by what knows its projections.
_BESIDE_BACKENDS = {kda.NAME: _on_every_generation("kda_kernel")}


def backend(name: str, arch: Arch) -> Backend | None:
    """The backend of that name, or None when the dispatcher does not have it yet on ``arch``. ValueError: no such name."""
    if name not in BACKEND_NAMES:
        raise ValueError(f"unknown backend {name!r}: known are {', '.join(BACKEND_NAMES)}")
    found = _BACKENDS.get(name) or _FOREIGN.get(name)
    return found if found is not None and found.proven_on(arch) else None


def built_backends(arch: Arch) -> tuple[str, ...]:
    """Names of the backends that the dispatcher has on ``arch``, in the closed set's order."""
    return tuple(name for name in BACKEND_NAMES if backend(name, arch) is not None)


def every_backend() -> Mapping[str, Backend]:
    """Every backend that compiles from our sources, by name, proven or not: for tools that measure and prove them."""
    return MappingProxyType(_BACKENDS)


def kernel_module(name: str, target: str) -> str:
    """Name of the module with a kernel's code for a compile target, proven or not. KeyError: there is none."""
    found = _BACKENDS.get(name) or _FOREIGN.get(name)
    return (_BESIDE_BACKENDS[name] if found is None else found.kernel_modules)[target]


def is_foreign(unit: CompileUnit) -> bool:
    """Whether another package brings the kernel: then it is prepared, not compiled by us."""
    return unit.kernel in _FOREIGN


def on_device(unit: CompileUnit, ordinal: int) -> CompileUnit:
    """The unit for CUDA device ``ordinal``: our own serve every device, those of other packages the one alone."""
    return replace(unit, spec=replace(unit.spec, ordinal=ordinal)) if is_foreign(unit) else unit


def layout_refusal(unit: CompileUnit, x, weight) -> Refusal | None:
    """What a unit's backend asks of operands beyond ``check_operands`` and these do not have; None: nothing is amiss."""
    found = _FOREIGN.get(unit.kernel)
    return None if found is None or found.layout_refusal is None else found.layout_refusal(unit.spec.config, x, weight)


#: Modules that compiling and launching needs, with the package that brings each.
_REQUIRED = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "cuda": "cuda-bindings"}


@functools.lru_cache(maxsize=None)
def missing_packages() -> tuple[str, ...]:
    """The packages that kernels need and this Python lacks (looked up, not imported)."""
    return tuple(package for module, package in _REQUIRED.items() if importlib.util.find_spec(module) is None)
