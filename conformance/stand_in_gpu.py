"""A stand-in for a GPU, so that the GPU suite runs on a CPU: ``python -m pytest -p conformance.stand_in_gpu ...``.

Tensors call themselves CUDA ones, graphs record torch operations and repeat them, streams are one, and each kernel is
FP64 arithmetic by torch. It shows that the tests run, that they pass what is right, and that they fail what is wrong:
LOWLAT_STAND_IN_FAULT names one of ``FAULTS``, which every kernel then has. It shows nothing about kernels: the record
of a run with it names no GPU, and nothing counts it as hardware.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: What a wrong kernel does.
FAULTS = (
    "drops the last of K",
    "leaves an element",
    "writes beside y",
    "reads beside x",
    "rounds between halves of K",
    "differs from run to run",
    "hangs",
    "aborts",
)
FAULT = os.environ.get("LOWLAT_STAND_IN_FAULT")


def _product(x, weight, residual):
    value = x.double() @ weight.double().T
    return value if residual is None else value + residual.double()


def _faulty(x, weight, residual, y) -> None:
    value = _product(x, weight, residual)
    if FAULT == "drops the last of K":
        value -= x[:, -1:].double() @ weight[:, -1:].double().T
    elif FAULT == "reads beside x":
        value += 0 * x.as_strided((x.shape[0], 1), (x.stride(0), 1), x.storage_offset() + x.shape[1]).double()
    elif FAULT == "rounds between halves of K":
        half = x.shape[1] // 2
        first = _product(x[:, :half], weight[:, :half], None).bfloat16()
        value = first.double() + _product(x[:, half:], weight[:, half:], residual).bfloat16().double()
    elif FAULT == "differs from run to run":
        value += (time.monotonic_ns() // 1000 % 2) * value.abs().max()
    elif FAULT == "hangs":
        time.sleep(3600)
    elif FAULT == "aborts":
        os.abort()
    keep = y[-1, -1].clone()
    y.copy_(value)
    if FAULT == "leaves an element":
        y[-1, -1] = keep
    elif FAULT == "writes beside y":
        y.as_strided((1,), (1,), y.storage_offset() + (y.shape[0] - 1) * y.stride(0) + y.shape[1]).fill_(1.0)


def _kernel(x, weight, residual, y, stream) -> None:
    assert y.shape == (x.shape[0], weight.shape[0]) and x.shape[1] == weight.shape[1]
    if FAULT is None:
        y.copy_(_product(x, weight, residual))
    else:
        _faulty(x, weight, residual, y)


def _is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Graph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph: the operations inside the capture, carried out again at each replay."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.steps:
            again = function(*args, **kwargs)
            if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)

    def pool(self):
        return None


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class _Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __getattr__(self, name):
        return lambda *arguments: None


class _Event:
    def __init__(self, **options):
        pass

    def __getattr__(self, name):
        return lambda *arguments: None


def _stub(name: str, **values) -> None:
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module


def _write(src, dst, delay, stream) -> None:
    dst.copy_(src)


def pytest_configure(config: pytest.Config) -> None:
    from conformance import fakes, plugin, records
    from lowlat_gemm import arch as arch_module
    from lowlat_gemm.kernels.compile_cache import CompileCache, Made

    assert FAULT is None or FAULT in FAULTS, f"LOWLAT_STAND_IN_FAULT={FAULT!r}: known are {', '.join(FAULTS)}"
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    arch = arch_module.parse_arch(config.getoption("--arch"))
    fake = stack.enter_context(fakes.cuda(fakes.device_of(arch)))
    fake.cache = CompileCache(lambda unit: Made(_kernel, compiled=True))
    patch.setattr(fakes.execute, "COMPILE_CACHE", fake.cache)
    patch.setattr(fakes.execute, "context_refusal", lambda: None)  # a capture is a dispatch mode here
    patch.setattr(plugin, "missing_gpu", lambda arch: None)
    patch.setattr(records, "find_gpus", lambda: ([], "a stand-in"))  # nothing of this is hardware in a record
    # They compile kernels of their own.
    _stub("conformance.gpu.late_writer", compiled_late_writer=lambda target: _write)
    _stub("conformance.gpu.held_split_k", compiled_held=lambda arch, n, k, config: (_kernel, lambda *told: None))
    _stub("conformance.gpu.occupier", compiled_occupier=lambda target: lambda done, *rest: done.fill_(1))

    @contextlib.contextmanager
    def capture(graph, pool=None):
        fake.capturing = True
        try:
            with graph:
                yield
        finally:
            fake.capturing = False

    main = _Stream()
    nothing = {name: (lambda *arguments, **options: None) for name in ("synchronize", "_sleep", "empty_cache")}
    for name, value in {
        **nothing,
        "CUDAGraph": _Graph,
        "graph": capture,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *device: main,
        "memory_allocated": lambda: 0,
        "device_count": lambda: 1,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "Generator", _Generator)
    stack.enter_context(_OnTheCpu())
