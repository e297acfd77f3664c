"""The allow-list of generations is exact, and a table is used only on the class of device that it was measured on."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from lowlat_gemm import arch as arch_module
from lowlat_gemm.arch import (
    ARCHES,
    DEFAULT_ARCH,
    SM90,
    SM103,
    Arch,
    DeviceClass,
    DeviceProperties,
    arch_of_capability,
    parse_arch,
    resolve_arch,
)
from lowlat_gemm.tables import load_table

LISTED = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm103", (10, 7): "sm107"}
OTHERS = [(7, 5), (8, 0), (8, 9), (9, 1), (10, 1), (10, 4), (10, 6), (10, 8), (11, 0), (12, 0), (12, 1), (13, 0), (90, 0), (0, 9)]


@pytest.mark.parametrize("capability", [*LISTED, *OTHERS])
def test_the_allow_list_is_exact(capability):
    found = arch_of_capability(capability)
    assert (None if found is None else found.name) == LISTED.get(capability)


def test_names_targets_and_capabilities_say_the_same():
    assert [arch.name for arch in ARCHES] == ["sm90", "sm100", "sm103", "sm107"]
    for arch in ARCHES:
        major, minor = arch.capability
        assert arch.name == f"sm{major}{minor}" and arch.compile_target == f"sm_{major}{minor}a" and str(arch) == arch.name
        assert parse_arch(arch.name) is parse_arch(arch) is arch


@pytest.mark.parametrize("bad", ["sm80", "SM90", "sm_90a", "90", "", " sm90", 90, (9, 0), None, 9.0, b"sm90", ["sm90"]])
def test_an_unknown_name_is_refused_with_the_known_ones(bad):
    with pytest.raises(ValueError) as error:
        parse_arch(bad)
    assert repr(bad) in str(error.value) and all(arch.name in str(error.value) for arch in ARCHES)


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_shared_memory_is_the_compilers_own_figure(arch):
    utils = pytest.importorskip("cutlass.utils")
    assert arch.shared_memory_bytes == utils.get_smem_capacity_in_bytes(arch.compile_target.removesuffix("a"))


def device(name, sm_count, bandwidth, capability=(9, 0)) -> DeviceProperties:
    return DeviceProperties(name, capability, sm_count, bandwidth)


# Peak figures as memory clock x bus width gives them.
@pytest.mark.parametrize(
    ("arch", "found", "message"),
    [
        ("sm90", device("NVIDIA H200", 132, 4917.0), None),
        ("sm90", device("NVIDIA H200", 132, 4814.0), None),
        ("sm90", device("NVIDIA GH200 144G HBM3e", 132, 4916.7), None),
        ("sm90", device("NVIDIA H100 80GB HBM3", 132, 3352.3), "3352 GB/s"),
        ("sm90", device("NVIDIA H100 PCIe", 114, 2039.0), "114 SMs"),
        ("sm90", device("NVIDIA H100 NVL", 132, 3938.0), "3938 GB/s"),
        ("sm90", device("NVIDIA H20", 78, 4023.0), "78 SMs"),
        ("sm90", device("NVIDIA GH200 480GB", 132, 4023.0), "4023 GB/s"),
        ("sm90", device("NVIDIA H200", 132, None), "memory bandwidth of NVIDIA H200 is not known"),
        ("sm90", device("NVIDIA H200 MIG 1g.18gb", 16, 4917.0), "16 SMs"),
        ("sm90", device("NVIDIA H200 MIG 7g.141gb", 132, 4917.0), None),  # all SMs, all memory: the same machine
        ("sm90", device("NVIDIA H200 MIG 7g.141gb", 132, 2458.0), "2458 GB/s"),
        ("sm100", device("NVIDIA B200", 148, 8000.0, (10, 0)), None),
        ("sm100", device("NVIDIA GB200", 152, 8000.0, (10, 0)), "152 SMs"),
        ("sm103", device("NVIDIA B300 SXM6 AC", 148, 8000.0, (10, 3)), None),
        ("sm103", device("NVIDIA GB300", 152, 8000.0, (10, 3)), "152 SMs"),
    ],
    ids=lambda value: f"{value.name} {value.bandwidth_gbs}" if isinstance(value, DeviceProperties) else None,
)
def test_which_devices_are_of_the_measured_class(arch, found, message):
    measured = load_table("kimi_k3", arch).device
    mismatch = measured.mismatch(found)
    if message is None:
        assert mismatch is None
    else:
        assert message in mismatch and found.name in mismatch
        wanted = f"{measured.name}: {measured.sm_count} SMs, {measured.memory} at {measured.bandwidth_gbs:.0f} GB/s"
        assert wanted in mismatch


def test_the_bandwidth_tolerance_is_15_percent_on_both_sides():
    measured = DeviceClass("X", 100, "HBM", 1000.0)
    assert [bool(measured.mismatch(device("d", 100, b))) for b in (849, 851, 1149, 1151)] == [True, False, False, True]


def fake_torch(monkeypatch, capability=None):
    """A torch with one CUDA device of ``capability``, or without CUDA."""
    properties = SimpleNamespace(name="fake", major=0, minor=0, multi_processor_count=1)
    if capability is not None:
        properties.major, properties.minor = capability
    cuda = SimpleNamespace(
        is_available=lambda: capability is not None,
        current_device=lambda: 0,
        get_device_properties=lambda ordinal: properties,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


@pytest.fixture(autouse=True)
def fresh_properties():
    arch_module.device_properties.cache_clear()
    yield
    arch_module.device_properties.cache_clear()


def test_no_arch_without_torch_is_sm103(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    assert resolve_arch(None) is DEFAULT_ARCH is SM103


def test_no_arch_without_cuda_is_sm103(monkeypatch):
    fake_torch(monkeypatch)
    assert resolve_arch(None) is SM103


@pytest.mark.parametrize("capability", [*LISTED, *OTHERS])
def test_no_arch_with_cuda_is_the_devices_or_none(monkeypatch, capability):
    fake_torch(monkeypatch, capability)
    found = resolve_arch(None)
    assert (None if found is None else found.name) == LISTED.get(capability)


def test_a_named_arch_wins_over_the_device(monkeypatch):
    fake_torch(monkeypatch, (10, 0))
    assert resolve_arch("sm90") is SM90 and resolve_arch(SM90) is SM90
    with pytest.raises(ValueError, match="sm91"):
        resolve_arch("sm91")


def test_device_properties_are_torchs(monkeypatch):
    fake_torch(monkeypatch, (9, 0))
    monkeypatch.setattr(arch_module, "_peak_bandwidth_gbs", lambda ordinal: 4917.0)
    assert arch_module.device_properties(0) == DeviceProperties("fake", (9, 0), 1, 4917.0)


class FakeDriver:
    """libcuda, with an H200's attributes unless told otherwise."""

    def __init__(self, init=0, clock=3_201_000, bus=6144, answer=0):
        self.init, self.values, self.answer = init, {36: clock, 37: bus}, answer

    def cuInit(self, flags):
        return self.init

    def cuDeviceGet(self, device, ordinal):
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.values[attribute]
        return self.answer


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (FakeDriver(), 4916.7),
        (FakeDriver(init=100), None),
        (FakeDriver(answer=1), None),
        (FakeDriver(clock=0), None),
        (FakeDriver(bus=0), None),
        (None, None),
    ],
    ids=["H200", "no init", "attribute fails", "clock 0", "bus 0", "no driver"],
)
def test_peak_bandwidth_comes_from_clock_and_bus(monkeypatch, driver, expected):
    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(arch_module.ctypes, "CDLL", load)
    found = arch_module._peak_bandwidth_gbs(0)
    assert found == (None if expected is None else pytest.approx(expected, abs=0.1))


def test_an_arch_is_frozen_and_hashable():
    with pytest.raises(AttributeError):
        SM90.name = "sm91"
    assert {SM90: 1}[Arch(*vars(SM90).values())] == 1
