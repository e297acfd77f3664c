"""The pytest plugin of the conformance suite: which GPU generation is tested, and that a runner keeps its word.

A runner claims a generation by LOWLAT_RUNNER_ARCH (set by the runner-* configs of .bazelrc), a Bazel GPU test by
--require-gpu. With either, a GPU that is not there is a failure, and so is every skip. Without them a GPU test is
skipped where its GPU is missing, so that `python -m pytest conformance --arch sm90` works on any machine. The one
failure that such a runner lets pass is one that a waiver names (waivers.py).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path

import pytest

from lowlat_gemm.arch import ARCHES, Arch, arch_of_capability, parse_arch

# In the order in which they import one another.
pytest_plugins = [
    "conformance.waivers",
    "conformance.isolated_worker",
    "conformance.sharding",
    "conformance.records",
    "conformance.isolation",
]

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def _arch_name(text: str) -> str:
    try:
        return parse_arch(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowlat_gemm")
    names = ", ".join(arch.name for arch in ARCHES)
    group.addoption("--arch", type=_arch_name, metavar="ARCH", help=f"GPU generation to test: {names}")
    group.addoption("--require-gpu", action="store_true", help="a missing GPU of --arch, or a skip, is a failure")


def gpus() -> list[tuple[int, int]] | str:
    """Compute capabilities of the GPUs here, or in one line why there are none. Loads the driver, not torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) is here"
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if (error := driver.cuInit(0)) or (error := driver.cuDeviceGetCount(ctypes.byref(count))):
        return f"the NVIDIA driver finds no GPU (CUDA error {error})"
    found = []
    for device in range(count.value):
        driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        found.append((major.value, minor.value))
    return found or "the NVIDIA driver finds no GPU"


def missing_gpu(arch: Arch) -> str | None:
    """Why tests of ``arch`` cannot run here, or None. The first GPU counts: it is the one that tests use."""
    found = gpus()
    if isinstance(found, str):
        return f"no {arch.name} GPU: {found}"
    if arch_of_capability(found[0]) != arch:
        return f"no {arch.name} GPU: the first one here has compute capability {found[0][0]}.{found[0][1]}"
    return None


def claimed_arch(config: pytest.Config) -> Arch | None:
    """The generation that this run says it has."""
    name = os.environ.get("LOWLAT_RUNNER_ARCH")
    if not name and config.getoption("--require-gpu"):
        name = config.getoption("--arch")
        if not name:
            raise pytest.UsageError("--require-gpu needs --arch")
    try:
        return parse_arch(name) if name else None
    except ValueError as error:
        raise pytest.UsageError(f"LOWLAT_RUNNER_ARCH: {error}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU of --arch (all tests in conformance/gpu)")
    config.addinivalue_line(
        "markers",
        "one_case_per_unit(**fields): `case` is one cell for each compiled kernel, and the standing cases, not all cells;"
        " with fields (m=1, residual=True) those alone",
    )
    # cuobjdump and nvdisasm come as Python packages.
    for folder in map(Path, sys.path):
        if (tools := folder / "nvidia" / "cu13" / "bin").is_dir():
            os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            break


def pytest_sessionstart(session: pytest.Session) -> None:
    arch = claimed_arch(session.config)
    if arch and (reason := missing_gpu(arch)):
        pytest.exit(f"this runner claims {arch.name}, but there is {reason}", returncode=pytest.ExitCode.TESTS_FAILED)


def pytest_report_header(config: pytest.Config) -> str:
    from conformance.seed import SEED

    return f"arch: {config.getoption('--arch') or 'none given'}, LOWLAT_TEST_SEED={SEED}, python: {sys.executable}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent / "gpu":
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        name = item.config.getoption("--arch")
        if not name:
            pytest.skip("needs --arch")
        if reason := missing_gpu(parse_arch(name)):
            pytest.skip(reason)


def _refuse_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    from conformance import waivers

    arch = claimed_arch(config)
    # An expected failure is reported as a skip too: neither proves anything, but the one that a waiver names.
    if arch and report.skipped and not waivers.is_waived(report):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped on a runner that claims {arch.name}: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after waivers
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    _refuse_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    _refuse_skip(collector.config, report)
    return report


@pytest.fixture(scope="session")
def arch(request: pytest.FixtureRequest) -> Arch:
    """The generation that --arch names."""
    name = request.config.getoption("--arch")
    if not name:
        pytest.skip("needs --arch")
    return parse_arch(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``case``: each cell of --arch that has a kernel; for a test marked ``one_case_per_unit``, one a unit.

    ``table_case``: each cell; ``written_unit``: each compile unit of every kernel that is written; ``skinny_unit``,
    ``split_k_unit``, ``fused_a_unit``, ``kda_unit``: those of one kernel; ``lm_head``: each kernel on large
    language-model heads.
    """
    from conformance import cases, standing

    marks = [mark for mark in metafunc.definition.iter_markers() if mark.name == "one_case_per_unit"]
    wanted = marks[0].kwargs if marks else {}

    def per_unit(arch: Arch) -> list[cases.Case]:
        found = cases.unit_cases(arch) + standing.standing_cases(arch)
        return [case for case in found if all(getattr(case, name) == value for name, value in wanted.items())]

    sources = {
        "case": per_unit if marks else cases.kernel_cases,
        "table_case": cases.table_cases,
        "written_unit": cases.written_units,
        "skinny_unit": cases.skinny_units,
        "split_k_unit": cases.written_split_k_units,
        "fused_a_unit": cases.fused_a_units,
        "kda_unit": cases.kda_units,
        "lm_head": standing.lm_head_cases,
    }
    name = metafunc.config.getoption("--arch")
    for fixture, source in sources.items():
        if fixture in metafunc.fixturenames:
            values = source(parse_arch(name)) if name else []
            metafunc.parametrize(fixture, values, ids=cases.unit_id if fixture.endswith("unit") else str)
