"""A compiler that two wheels wrote over one another is not used, and is named."""

from __future__ import annotations

import importlib.metadata

import pytest

from conformance.fakes import clean_settings, lowlat, no_gpu  # noqa: F401
from lowlat_gemm.dispatch import explain, missing_packages_refusal
from lowlat_gemm.kernels import wheels
from lowlat_gemm.kernels.store import TOOLCHAIN
from lowlat_gemm.operands import Reason

BASE, CU13 = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"


@pytest.fixture
def installed(monkeypatch):
    """Distributions by name, each with the text of its RECORD."""
    records: dict[str, str] = {}

    class Distribution:
        def __init__(self, name):
            self.name = name

        def read_text(self, file):
            return records[self.name]

    def distribution(name):
        if name not in records:
            raise importlib.metadata.PackageNotFoundError(name)
        return Distribution(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    wheels.mixed_wheels.cache_clear()
    yield records
    wheels.mixed_wheels.cache_clear()


SO = "nvidia_cutlass_dsl/lib/runtime.so"


@pytest.mark.parametrize(
    ("base", "cu13", "mixed"),
    [
        (f"{SO},sha256=aa,10\n", f"{SO},sha256=bb,10\n", True),
        (f"{SO},sha256=aa,10\n", f"{SO},sha256=aa,10\n", False),
        (f"{SO},sha256=aa,10\n", "other.so,sha256=bb,10\n", False),
        ("a/__pycache__/x.pyc,,\n", "a/__pycache__/x.pyc,,\n", False),
        (f'"{SO}",sha256=aa,10\nx,,\n', f"y,sha256=c,1\n{SO},sha256=bb,10\n", True),
    ],
)
def test_two_wheels_with_one_path(installed, base, cu13, mixed):
    installed.update({BASE: base, CU13: cu13})
    found = wheels.mixed_wheels()
    assert found == (
        f"{BASE} and {CU13} both claim {SO} with different content: uninstall both, install one" if mixed else None
    )


def test_kernels_are_off_and_the_reason_names_the_wheels(installed, clean_settings):
    installed.update({BASE: f"{SO},sha256=aa,10\n", CU13: f"{SO},sha256=bb,10\n"})
    assert missing_packages_refusal().reason is Reason.BACKEND_UNAVAILABLE
    decision = explain(1, 1536, 7168, arch="sm90")
    assert not decision.runs and CU13 in str(decision.refusal)


def test_doctor_says_so(installed, lowlat, no_gpu, monkeypatch):
    monkeypatch.setattr("lowlat_cli.doctor.missing_packages", lambda: ())
    monkeypatch.setattr("lowlat_cli.doctor.mixed_wheels", lambda: "a and b both claim c")
    code, out, err = lowlat("doctor")
    assert code == 1 and "kernels are off: a and b both claim c" in out, out


def test_the_compiler_that_is_installed_here_is_of_one_piece():
    wheels.mixed_wheels.cache_clear()
    assert wheels.mixed_wheels() is None
    assert set(TOOLCHAIN) & {d.metadata["Name"] for d in importlib.metadata.distributions()}
