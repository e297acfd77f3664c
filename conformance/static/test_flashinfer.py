"""FlashInfer as an optional backend: what it serves, and why not, on every generation; what tables say of it."""

from __future__ import annotations

import json

import pytest

from conformance.fake_flashinfer import prove
from conformance.fakes import (  # noqa: F401
    clean_settings,
    clear_caches,
    fake_table,
    run_python,
    use_table,
)
from lowlat_gemm import dispatch, settings
from lowlat_gemm.arch import ARCHES, SM90, SM100, SM103, SM107
from lowlat_gemm.backends import CONFIG_KEYS
from lowlat_gemm.dispatch import explain, plan_for, select_kimi_k3_backend
from lowlat_gemm.kernels import flashinfer
from lowlat_gemm.kernels.flashinfer import FlashInferConfig, parse_config, warp_split_k_serves, why_not
from lowlat_gemm.kernels.registry import built_backends, every_backend
from lowlat_gemm.operands import Reason
from lowlat_gemm.tables import TableError, load_table
from lowlat_gemm.tables.loader import load_table_file
from tools.import_public_tables import FLASHINFER_SOURCE

pytestmark = pytest.mark.usefixtures("clean_settings")

BLACKWELL = [SM100, SM103, SM107]
KERNELS = CONFIG_KEYS["flashinfer"].words["kernel"]
#: kernel -> (generations, [(N, K, M) that it serves], [(N, K, M, what is wrong)])
SERVED = {
    "cute-dsl": (BLACKWELL, [(1536, 7168, 1), (24, 128, 32), (7, 128, 1)],
                 [(1536, 7168, 33, "M = 33"), (1536, 7200, 1, "K in multiples of 128"), (1536, 7168, 0, "M = 0")]),
    "tinygemm": (ARCHES, [(1536, 7168, 1), (16, 64, 64)],
                 [(1544, 7168, 1, "N in multiples of 16"), (1536, 7184, 1, "K in multiples of 64")]),
    "cutile": (ARCHES, [(1536, 7168, 64), (7, 8, 1)], [(0, 8, 1, "N = 0")]),
    "cutlass": (BLACKWELL, [(1536, 7168, 64), (8, 8, 1)], [(1537, 7168, 1, "N in multiples of 8")]),
    "cublaslt": (ARCHES, [(7, 8, 64)], [(7, 0, 1, "K = 0")]),
    "cudnn": (ARCHES, [(7, 8, 64)], [(7, 8, -1, "M = -1")]),
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_serves_each_generation(kernel, arch):
    generations, good, bad = SERVED[kernel]
    config = FlashInferConfig(kernel)
    assert (kernel in flashinfer.kernels_on(arch)) == (arch in generations)
    for n, k, m in good:
        problem = why_not(arch, n, k, m, config)
        if arch in generations:
            assert problem is None, f"{kernel} {n}x{k} M = {m} on {arch}: {problem}"
        else:
            assert f"{kernel} does not serve {arch}" in problem and "tinygemm, cutile, cublaslt, cudnn do" in problem
    for n, k, m, said in bad if arch in generations else ():
        problem = why_not(arch, n, k, m, config)
        assert problem and said in problem, f"{kernel} {n}x{k} M = {m} on {arch}: {problem!r}, expected {said!r}"


def test_no_residual_and_no_tactic_where_there_is_none_to_tune():
    assert "residual" in why_not(SM100, 1536, 7168, 1, FlashInferConfig("cute-dsl"), residual=True)
    for kernel, tunable in (("tinygemm", False), ("cutile", False), ("cute-dsl", True), ("cudnn", True)):
        problem = why_not(SM100, 1536, 7168, 1, FlashInferConfig(kernel, "autotuned"))
        assert (problem is None) == tunable, f"{kernel}: {problem}"


@pytest.mark.parametrize(
    ("n", "k", "served"),
    [(1536, 128, True), (1536, 8192, True), (1536, 16384, True), (1536, 8320, False), (1536, 16640, False),
     (1544, 128, False), (1536, 8448, True), (16, 16320, False)],
)  # fmt: skip
def test_warp_split_k_takes_64_tiles(n, k, served):
    """64 tiles of 128 are K = 8192; of 256, where they divide K, 16384."""
    assert warp_split_k_serves(n, k) == served


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, "expected kernel, tactic"), ({"kernel": "cute-dsl"}, "expected kernel, tactic"),
     ({"kernel": "tgv", "tactic": "default"}, "kernel in cute-dsl"), ({"kernel": "cutile", "tactic": "best"}, "tactic in default")],
)  # fmt: skip
def test_a_wrong_config_is_named(values, said):
    with pytest.raises(ValueError, match=said):
        parse_config(values)


@pytest.mark.parametrize(
    ("version", "arch", "said"),
    [
        (None, SM103, "flashinfer is not installed: sm103 needs flashinfer-python >= 0.7.0"),
        ("0.6.18.post1", SM90, "flashinfer 0.6.18.post1 is too old: sm90 needs flashinfer-python >= 0.7.0"),
        ("unknown", SM100, "flashinfer unknown is too old"),
        ("0.7", SM100, None),
        ("0.7.0", SM103, None),
        ("0.7.2.post1", SM107, "is too old: sm107 needs flashinfer-python >= 0.7.4"),
        ("0.7.4", SM107, None),
        ("0.10.0rc1", SM107, None),
        ("1.0", SM107, None),
    ],
)
def test_missing_or_too_old(monkeypatch, version, arch, said):
    monkeypatch.setattr(flashinfer, "installed_version", lambda: version)
    problem = flashinfer.unavailable(arch)
    assert problem == said if said is None else said in problem, f"{version} on {arch}: {problem!r}"


def test_the_version_is_read_without_importing(tmp_path):
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')\n")
    about = tmp_path / "site" / "flashinfer_python-0.7.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.9\n")
    code = "import sys\nfrom lowlat_gemm.kernels import flashinfer\nprint(flashinfer.installed_version())\n"
    code += "assert not {'torch', 'flashinfer'} & set(sys.modules)\n"
    found = run_python("-c", code, folder=tmp_path, path=(tmp_path / "site",))
    assert (found.returncode, found.stdout.strip()) == (0, "0.7.9"), found.stderr
    hidden = run_python("-c", code, folder=tmp_path, hide=("flashinfer",))
    assert (hidden.returncode, hidden.stdout.strip()) == (0, "None"), hidden.stderr


def test_it_is_kept_from_dispatch_where_no_run_shows_it_right():
    assert [arch for arch in ARCHES if "flashinfer" in built_backends(arch)] == [SM90]
    assert "flashinfer" not in every_backend()


# --- tables


def _published() -> dict[tuple[int, int, int], dict]:
    """(n, k, m) that FlashInfer's figures win at every token count of their row, recomputed from the data alone."""
    data = json.loads(FLASHINFER_SOURCE.read_text(encoding="utf-8"))
    assert data["arch"] == "sm103"
    config = {"kernel": data["kernel"], "tactic": data["tactic"]}
    rows = [row for row in data["rows"] if row["over_fused_a"][0] > 1]
    return {(r["n"], r["k"], m): config for r in rows for m in range(r["tokens"][0], r["tokens"][1] + 1)}


@pytest.mark.parametrize("arch", ARCHES, ids=str)
def test_optional_cells_are_the_published_ones(arch):
    table = load_table("kimi_k3", arch)
    found = {(key.n, key.k, key.m): cell for key, cell in table.optional_cells()}
    expected = _published() if arch in (SM103, SM107) else {}
    assert {key: dict(cell.config) for key, cell in found.items()} == expected
    for (n, k, m), cell in found.items():
        origin = cell.provenance.origin or cell.provenance
        assert (cell.provenance.kind, origin.kind) == ("public" if arch == SM103 else "inherited", "public")
        assert table.sources[origin.source].url == "https://github.com/flashinfer-ai/flashinfer/pull/4908"
        assert table.cell(n, k, m).backend == "fused_a", f"{n}x{k} M = {m}: what the figures beat is not there"
        assert why_not(arch, n, k, m, parse_config(cell.config)) is None, f"{n}x{k} M = {m}"
        assert warp_split_k_serves(n, k), f"{n}x{k}: the figures are those of warp split-K"
    assert len(found) == (sum(1 for _ in expected)) and (not expected or len(found) > 100)


TOY = """format = 1
family = "toy"
arch = "{arch}"
[device]
name = "d"
sm_count = 1
memory = "m"
bandwidth_gbs = 1
evidence = "e"
[sources.s]
kind = "public"
title = "t"
url = "https://example.org"
date = 2026-01-01
retrieved = 2026-01-02
note = "n"
[defaults]
provenance = "public"
source = "s"
[[projection]]
n = 1536
k = 7168
label = "toy"
cells = [{cells}]
optional_cells = [{optional}]
"""
OWN = '{m = "1..8", backend = "fused_a"}'
BROUGHT = '{m = 2, backend = "flashinfer", kernel = "cute-dsl", tactic = "default"}'


def _toy(tmp_path, arch="sm103", cells=OWN, optional=BROUGHT):
    path = tmp_path / f"toy_{arch}.toml"
    path.write_text(TOY.format(arch=arch, cells=cells, optional=optional))
    return load_table_file(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optional": '{m = 2, backend = "fused_a"}'}, ["optional cell m=2", "backend", "'fused_a'", "one of flashinfer"]),
        ({"optional": BROUGHT.replace("cute-dsl", "tgv")}, ["kernel", "'tgv'", "one of cute-dsl"]),
        ({"optional": BROUGHT.replace(', tactic = "default"', "")}, ["tactic", "nothing", "one of default, autotuned"]),
        ({"optional": BROUGHT.replace('"default"', "3")}, ["tactic", "3", "one of default, autotuned"]),
        ({"optional": f"{BROUGHT}, {BROUGHT}"}, ["optional cell m=2", "M = 2 in two cells"]),
        ({"cells": OWN.replace("}", ', kernel = "cutile"}')}, ["unknown key 'kernel'"]),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, change, said):
    with pytest.raises(TableError) as error:
        _toy(tmp_path, **change)
    for part in said:
        assert part in str(error.value), str(error.value)


# --- decisions


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A table of every generation with an optional cell at M = 2; ``installed(version)`` says what is installed."""
    monkeypatch.setattr(dispatch, "missing_packages", lambda: ())
    prove(monkeypatch)

    def install(version, arch="sm103", **cells):
        monkeypatch.setattr(flashinfer, "installed_version", lambda: version)
        use_table(monkeypatch, _toy(tmp_path, arch, **cells))

    return install


def test_where_it_is_installed_the_optional_cell_serves(installed):
    installed("0.7.4")
    decision = explain(2, 1536, 7168, arch="sm103")
    assert decision.runs and (decision.backend, decision.otherwise, decision.passed_over) == ("flashinfer", "fused_a", None)
    assert "cell        flashinfer (kernel cute-dsl, tactic default)" in str(decision)
    assert "else        fused_a, for calls that flashinfer does not take" in str(decision)
    assert explain(3, 1536, 7168, arch="sm103").backend == "fused_a"
    kernels = [unit.kernel for unit in plan_for(SM103, 1536, 7168).entry(2, False).units()]
    assert kernels == ["flashinfer", "fused_a"], "a warm-up makes both"
    assert explain(2, 1536, 7168, arch="sm103", has_residual=True).backend is None


@pytest.mark.parametrize(
    ("version", "reason", "said"),
    [(None, Reason.BACKEND_UNAVAILABLE, "flashinfer is not installed"), ("0.6.9", Reason.BACKEND_UNAVAILABLE, "too old")],
)
def test_where_it_is_missing_or_too_old_the_own_cell_serves_and_says_why(installed, version, reason, said):
    installed(version)
    decision = explain(2, 1536, 7168, arch="sm103")
    assert decision.runs and decision.backend == "fused_a" and decision.otherwise is None
    cell, refusal = decision.passed_over
    assert cell.backend == "flashinfer" and refusal.reason is reason and said in refusal.detail
    assert f"passed over flashinfer (kernel cute-dsl, tactic default), public (s): backend unavailable: " in str(decision)
    assert decision.to_json()["passed_over"]["reason"] == "backend unavailable"
    assert [unit.kernel for unit in plan_for(SM103, 1536, 7168).units()] == ["fused_a"]


def test_other_reasons_to_pass_it_over(installed, monkeypatch):
    installed("0.7.4")
    for change, reason in (
        ({"deny": settings.parse_deny("flashinfer")}, Reason.DISABLED),
        ({"batch_invariant": True}, Reason.BATCH_INVARIANT),
    ):
        before = settings.change(**change)
        clear_caches()
        decision = explain(2, 1536, 7168, arch="sm103")
        settings.restore(before)
        assert decision.runs and decision.backend == "fused_a" and decision.passed_over[1].reason is reason, str(decision)
        assert decision.batch_invariant, "the row without it adds in one order"
    clear_caches()
    assert not explain(2, 1536, 7168, arch="sm103").batch_invariant
    installed("0.7.4", arch="sm90")
    assert explain(2, 1536, 7168, arch="sm90").passed_over[1].reason is Reason.CONFIG, "cute-dsl does not serve SM90"


def test_without_an_own_cell_the_call_falls_back_with_the_reason(installed):
    for cells in ({"cells": OWN.replace("1..8", "4..8")}, {"cells": f"{BROUGHT}, {OWN.replace('1..8', '4..8')}", "optional": ""}):
        installed(None, **cells)
        decision = explain(2, 1536, 7168, arch="sm103")
        assert not decision.runs and decision.refusal.reason is Reason.BACKEND_UNAVAILABLE, str(decision)
        assert "flashinfer is not installed" in decision.refusal.detail
        installed("0.7.4", **cells)
        assert explain(2, 1536, 7168, arch="sm103").runs


def test_the_table_alone_answers_with_what_needs_no_other_package(monkeypatch):
    prove(monkeypatch)
    for version in (None, "0.7.4"):
        monkeypatch.setattr(flashinfer, "installed_version", lambda: version)
        clear_caches()
        assert select_kimi_k3_backend(4, 1536, 7168, arch="sm103") == "fused_a"
    assert plan_for(SM103, 1536, 7168).entry(4, False).cell.backend == "flashinfer"
    assert plan_for(SM90, 1536, 7168).entry(4, False).cell.backend != "flashinfer"
