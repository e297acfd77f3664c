"""Device memory of the code itself: a kernel's module is loaded once, and loading it again is bounded.

Other tests run on the same GPU at the same time, and what they take is in the same number. So what must hold has to show
in one round of several: a leak is in every one.
"""

from __future__ import annotations

import gc

import torch

from conformance.cases import split_k_units
from conformance.harness import operands
from lowlat_gemm.execute import COMPILE_CACHE, launch
from lowlat_gemm.kernels.compile_cache import CompileCache

N, K = 104, 1032
MIB = 1 << 20
ROUNDS = 10
#: Times that each kernel is asked for in a round.
ASKED = 20
#: Times that each kernel is loaded in a round: some 200 modules in all rounds.
LOADED = 1
#: A module has tens of KiB of code, which the driver puts into blocks of 2 MiB; what comes beside is its own.
MOST_PER_MODULE = MIB // 4


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


class Kernels:
    """The BF16 kernels of split_k's test configs, launched once each: a module is on the device from its first launch on."""

    def __init__(self, arch):
        self.units = [unit for unit in split_k_units(arch) if unit.spec.input_dtype == unit.spec.output_dtype == "bfloat16"]
        self.data = operands(N, K, "random")
        self.y = torch.empty(1, N, dtype=torch.bfloat16, device="cuda")

    def launch_all(self, cache: CompileCache) -> None:
        for unit in self.units:
            residual = self.data.residual[:1] if unit.spec.residual else None
            launch(cache.get(unit), self.data.x[:1], self.data.weight, residual, self.y)


def new_cache() -> CompileCache:
    return CompileCache(COMPILE_CACHE._make)


def test_a_kernel_that_is_asked_for_again_takes_no_memory(arch):
    kernels, cache, taken = Kernels(arch), new_cache(), []
    kernels.launch_all(cache)
    made = cache.loads + cache.compiles
    for _ in range(ROUNDS):
        before = free_bytes()
        for _ in range(ASKED):
            kernels.launch_all(cache)
        taken.append(before - free_bytes())
    assert cache.loads + cache.compiles == made == len(kernels.units)
    assert min(taken) <= 0, f"bytes of device memory that {ASKED} launches of {made} kernels took, by round: {taken}"


def test_modules_loaded_again_after_clear_are_bounded(arch):
    """The DSL unloads no module of an object before the process ends, so a graph never launches code that is gone; what
    ``clear`` and another load cost is a module's own size, and not a context's."""
    kernels, cache, taken = Kernels(arch), new_cache(), []
    kernels.launch_all(cache)
    for _ in range(ROUNDS):
        before = free_bytes()
        for _ in range(LOADED):
            cache.clear()
            kernels.launch_all(cache)
        taken.append((before - free_bytes()) // (LOADED * len(kernels.units)))
    print(f"bytes of device memory a module that is loaded again, by round: {taken}")
    assert min(taken) <= MOST_PER_MODULE, f"bytes of device memory a module, by round: {taken}"
