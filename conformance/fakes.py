"""Stand-ins for what a test machine lacks (GPUs, other tables, absent packages), shared by the static suites."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

import lowlat_gemm
from lowlat_gemm import arch as arch_module
from lowlat_gemm import dispatch, kda_branches, settings
from lowlat_gemm.arch import ARCHES, Arch, DeviceProperties
from lowlat_gemm.kernels import registry
from lowlat_gemm.kernels.compile_cache import CompileCache, Made
from lowlat_gemm.tables import loader
from lowlat_gemm.tables import Cell, ProjectionSpec, Provenance, Table, load_table
from lowlat_gemm.tables.schema import frozen

# Not `from lowlat_gemm import execute`: it needs torch, and the package resolves names lazily.
execute = importlib.import_module("lowlat_gemm.execute")
kda_overlap = importlib.import_module("lowlat_gemm.kda_overlap")
projection = importlib.import_module("lowlat_gemm.projection")
prepared_projection = importlib.import_module("lowlat_gemm.prepared_projection")
tensor_map = importlib.import_module("lowlat_gemm.tensor_map")

PACKAGE = Path(lowlat_gemm.__file__).parent
TOOLS = Path(importlib.util.find_spec("lowlat_cli").origin).parent.parent


def clear_caches() -> None:
    """Forgets plans, warnings and log lines: they are kept for a process, and a test changes what they were made from."""
    execute.READY.cache_clear()
    for module in (dispatch, execute, kda_branches, kda_overlap):
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and value.__module__ == module.__name__:
                value.cache_clear()


@pytest.fixture
def clean_settings():
    """Default settings whatever the environment says, and the process's own ones again afterwards."""
    before = settings._current
    settings.restore(settings.Settings())
    clear_caches()
    yield
    settings.restore(before)
    clear_caches()


@pytest.fixture
def public_world(monkeypatch, tmp_path_factory):
    """The public tables, and a build that has ``skinny`` alone: a world that stays as it is when tables are tuned."""
    from tools.import_public_tables import public_texts

    folder = tmp_path_factory.mktemp("public_tables")
    for name, text in public_texts().items():
        (folder / name).write_text(text)
    monkeypatch.setattr(loader, "_FOLDER", folder)
    for world in ("_BACKENDS", "_FOREIGN"):
        kept = {name: replace(one, proven=one.proven if name == "skinny" else frozenset()) for name, one in getattr(registry, world).items()}
        monkeypatch.setattr(registry, world, kept)
    loader._load_available.cache_clear()
    clear_caches()
    yield
    loader._load_available.cache_clear()
    clear_caches()


def device_of(arch: Arch, **changes) -> DeviceProperties:
    """A device of the class that the Kimi-K3 table of ``arch`` was measured on."""
    measured = load_table("kimi_k3", arch).device
    device = DeviceProperties(measured.name, arch.capability, measured.sm_count, measured.bandwidth_gbs)
    return replace(device, **changes)


def fake_table(cells: dict, *, residual_cells: dict | None = None, arch: str = "sm90", n=64, k=1024, family="toy") -> Table:
    """A table with one row; ``cells``: M -> (backend, config)."""

    def made(items):
        provenance = Provenance("public", source="test")
        return frozen({m: Cell(backend, frozen(config), provenance) for m, (backend, config) in items.items()})

    spec = ProjectionSpec(n, k, "toy", made(cells), made(residual_cells or {}))
    return replace(load_table("kimi_k3", arch), family=family, projections=frozen({(n, k): spec}))


def use_table(monkeypatch, table: Table) -> None:
    """Makes ``table`` the only one that dispatch finds."""
    monkeypatch.setattr(dispatch, "available_tables", lambda: [(table.family, table.arch)])
    monkeypatch.setattr(dispatch, "load_table", lambda family, arch: table)
    clear_caches()


@dataclass
class FakeCuda:
    """CPU tensors that call themselves CUDA ones. ``calls``: (compile unit, rows) of every launch."""

    devices: list[DeviceProperties]
    cache: CompileCache = None
    current: int = 0
    capturing: bool = False
    compile_error: Exception | None = None
    calls: list = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    #: what each tensor map was made of
    maps: list[tuple] = field(default_factory=list)
    #: start of a storage -> device; what is not named here is on cuda:0
    placed: dict[int, torch.device] = field(default_factory=dict)

    def place(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        self.placed[tensor.untyped_storage().data_ptr()] = torch.device(device)
        return tensor

    def encode(self, *what) -> bytes:
        """Stands for the driver's encoding of a tensor map: 128 bytes that depend on all that is in it."""
        self.maps.append(what)
        return hashlib.sha512(repr(what).encode()).digest() * 2

    def compiler(self, unit):
        """Stands for the DSL's: the "kernel" computes in FP64 what the unit's kernel has to."""
        if self.compile_error is not None:
            raise self.compile_error

        def kernel(x, weight, residual, out, stream):
            assert out.shape == (x.shape[0], weight.shape[0]) and x.stride(1) == weight.stride(1) == out.stride(1) == 1
            memory = [tensor.untyped_storage().data_ptr() for tensor in (x, weight, residual, out) if tensor is not None]
            assert all(memory), "launched with a null pointer"
            assert weight.stride(0) % 8 == 0, "a tensor map takes whole 16-byte words alone"
            assert getattr(unit.spec, "tokens", x.shape[0]) == x.shape[0]  # split_k serves every M
            self.calls.append((unit, x.shape[0]))
            value = x.double() @ weight.double().T
            out.copy_(value if residual is None else value + residual.double())

        return kernel


@contextlib.contextmanager
def cuda(device: DeviceProperties | list[DeviceProperties]):
    """Inside, this process seems to have ``device``, with kernels that are computed on the CPU."""
    fake = FakeCuda(device if isinstance(device, list) else [device])
    fake.cache = CompileCache(lambda unit: Made(fake.compiler(unit), compiled=True))
    real_device, real_empty = torch.Tensor.device, torch.empty

    def seen_device(tensor):
        real = real_device.__get__(tensor)
        if real.type != "cpu" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return real
        try:
            start = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse, or wrapped by a transform
            start = None
        return fake.placed.get(start, torch.device("cuda", 0))

    def empty(*args, device=None, **kwargs):
        return real_empty(*args, **kwargs) if str(device).startswith("cuda") else real_empty(*args, device=device, **kwargs)

    @contextlib.contextmanager
    def enter(device):
        before, fake.current = fake.current, torch.device(device).index if isinstance(device, str) else device
        fake.entered.append(fake.current)
        yield
        fake.current = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(seen_device))
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: fake.current)
        patch.setattr(torch.cuda, "device", enter)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current, raising=False)
        for module in (arch_module, execute, kda_overlap, prepared_projection, projection):
            patch.setattr(module, "device_properties", lambda ordinal: fake.devices[ordinal])
        patch.setattr(tensor_map, "_encode", fake.encode)
        patch.setattr(execute, "COMPILE_CACHE", fake.cache)
        patch.setattr(execute, "store_in", lambda folder: None)
        patch.setattr(dispatch, "missing_packages", lambda: ())
        clear_caches()
        try:
            yield fake
        finally:
            clear_caches()


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


#: One row, whose kernel is small: what tests that launch use.
TOY_CONFIG = {"block_size": 64, "outputs_per_block": 2, "k_unroll": 1, "vector_width": 8}
TOY_N, TOY_K = 64, 1024


def toy_linear(n=TOY_N, k=TOY_K, bias=False, dtype=torch.bfloat16, seed=0) -> torch.nn.Linear:
    made = torch.nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(bf16(n, k, seed=seed))
    return made


def toy_table() -> Table:
    """One row, with skinny at M = 1, 2 and 4, flashinfer, which is not built, at 3, and a residual at 1."""
    cells = {m: ("skinny", TOY_CONFIG) for m in (1, 2, 4)} | {3: ("flashinfer", {})}
    return fake_table(cells, residual_cells={1: ("skinny", TOY_CONFIG)}, n=TOY_N, k=TOY_K)


@pytest.fixture
def toy_gpu(monkeypatch):
    """An H200 and ``toy_table``. No gradients, as in serving."""
    use_table(monkeypatch, toy_table())
    with torch.no_grad(), cuda(device_of(ARCHES[0])) as fake:
        yield fake


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


#: Every plan row of every generation, for parametrising: (arch, n, k).
ROWS = [(arch, n, k) for arch in ARCHES for n, k in load_table("kimi_k3", arch).projections]

@pytest.fixture
def lowlat(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    from lowlat_cli import __main__ as cli

    monkeypatch.setattr(cli.OUT, "width", 200)
    monkeypatch.setattr(cli.ERR, "width", 200)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowlat", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def small(monkeypatch):
    """``lowlat check`` has one shape to do: skinny at M = 1 and 2 on SM90, fused_a at 3 to 8, no cell above."""
    from lowlat_cli import checking

    monkeypatch.setattr(checking, "model_shapes", lambda model, tps: [checking.Shape(2304, 1536, ("q_b_proj tp8",))])


@pytest.fixture
def no_gpu(monkeypatch):
    from lowlat_cli import environment

    monkeypatch.setattr(environment, "find_gpus", lambda: ([], "torch sees no CUDA GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


_HIDE = """\
import importlib.machinery, importlib.metadata, os
hidden = set(os.environ["LOWLAT_TEST_HIDDEN"].split(","))
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in hidden else find(name, *rest)
"""


def run_python(*arguments, folder: Path, hide: tuple[str, ...] = (), path: tuple = (), cwd=None, environ=None):
    """A fresh Python that sees the project (after ``path``), no GPU and none of the ``hide`` modules.

    ``folder`` is scratch.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOWLAT_GEMM_", "VLLM_")) and name not in ("PYTHONSAFEPATH", "PYTHONPATH")
    }
    search = [*path, PACKAGE.parent, TOOLS]
    if hide:
        (folder / "hide").mkdir(exist_ok=True)
        (folder / "hide" / "sitecustomize.py").write_text(_HIDE)
        search.insert(0, folder / "hide")
        environment["LOWLAT_TEST_HIDDEN"] = ",".join(hide)
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, search)), "COLUMNS": "200", **(environ or {})}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd or folder, env=environment, timeout=300)


def inner_environment() -> dict[str, str]:
    """The environment for a pytest of a test's own: it sees the project, and nothing of the run that it is in."""
    outer = ("TEST_", "LOWLAT_", "PYTEST_", "XML_OUTPUT_FILE", "TESTBRIDGE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half the start-up time
    return environment | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])}


def run_pytest(folder: Path, source: str, *options: str, **environ: str) -> subprocess.CompletedProcess:
    """pytest with the conformance plugin on one sample file in ``folder``."""
    (folder / "test_sample.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "conformance.plugin", "-p", "no:cacheprovider", "-q", "test_sample.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=inner_environment() | environ)


#: Fields of a waiver as TOML has them.
GOOD_WAIVER = {
    "test": '"test_sample.py::test_a[1]"',
    "arches": '["sm90"]',
    "reason": '"known"',
    "link": '"https://example.org/1"',
    "expires": "2999-12-31",
}


def write_waivers(path: Path, *entries: dict) -> Path:
    lines = ["[[waiver]]\n" + "".join(f"{key} = {value}\n" for key, value in entry.items()) for entry in entries]
    path.write_text("\n".join(lines))
    return path
