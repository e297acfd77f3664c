"""Says which compile units the tests of this session are about, so that they are disassembled many at a time."""

from __future__ import annotations

import pytest

from conformance.machine_code import expect
from lowlat_gemm.kernels.compile_cache import CompileUnit


def pytest_collection_finish(session: pytest.Session) -> None:
    calls = (item.callspec.params.values() for item in session.items if hasattr(item, "callspec"))
    expect(value for values in calls for value in values if isinstance(value, CompileUnit))
