"""LOWLAT_GEMM_TABLES: tables of a user's own are found, and come before those of the package."""

from __future__ import annotations

import pytest

from conformance.fakes import PACKAGE, clean_settings, lowlat  # noqa: F401
from lowlat_gemm import settings
from lowlat_gemm.arch import ARCHES
from lowlat_gemm.dispatch import explain, families
from lowlat_gemm.tables import TableError, available_tables, load_table

pytestmark = pytest.mark.usefixtures("clean_settings")

SHIPPED = [("glm_5_3_flash", "sm90"), *(("kimi_k3", arch.name) for arch in ARCHES)]
ROW = """[[projection]]
n = {n}
k = {k}
label = "mine"
cells = [
  {{m = 1, backend = "skinny", block_size = 64, outputs_per_block = 2, k_unroll = 2, vector_width = 8}},
]
"""


def table(family: str, n: int, k: int) -> str:
    shipped = (PACKAGE / "tables" / "kimi_k3_sm90.toml").read_text()
    return shipped[: shipped.index("[[projection]]")].replace("kimi_k3", family) + ROW.format(n=n, k=k)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mymodel_sm90.toml").write_text(table("mymodel", 1000, 2048))
    (tmp_path / "notes.toml").write_text("not a table")
    settings.change(tables=str(tmp_path))
    return tmp_path


def test_a_family_of_ones_own_is_found(own, lowlat):
    assert available_tables() == [("mymodel", "sm90"), *SHIPPED] and families() == ("mymodel", *(family for family, arch in SHIPPED if arch == "sm90"))
    found = explain(1, 1000, 2048, arch="sm90")
    assert (found.family, found.label, found.backend) == ("mymodel", "mine", "skinny") and dict(found.config)["block_size"] == 64
    assert load_table("mymodel", "sm90").path == str(own / "mymodel_sm90.toml")
    assert "mymodel/sm90" in lowlat("doctor")[1]
    settings.change(tables=None)
    assert explain(1, 1000, 2048, arch="sm90").backend is None and available_tables() == SHIPPED


def test_a_shape_that_both_have_is_served_by_ones_own(own):
    (own / "mymodel_sm90.toml").write_text(table("mymodel", 1536, 7168))
    assert explain(1, 1536, 7168, arch="sm90").label == "mine"
    assert explain(1, 1536, 7168, arch="sm100").family == "kimi_k3"


def test_a_table_of_ones_own_stands_for_the_packages_of_that_name(own):
    (own / "kimi_k3_sm90.toml").write_text(table("kimi_k3", 64, 512))
    assert set(load_table("kimi_k3", "sm90").projections) == {(64, 512)}
    assert explain(1, 1536, 7168, arch="sm90").backend is None and explain(1, 64, 512, arch="sm90").label == "mine"
    assert available_tables().count(("kimi_k3", "sm90")) == 1


def test_a_table_that_is_not_there_names_those_that_are(own):
    with pytest.raises(TableError, match="mymodel sm90, glm_5_3_flash sm90, kimi_k3 sm90"):
        load_table("mymodel", "sm100")
    (own / "other_sm90.toml").write_text(table("mymodel", 1000, 2048))
    with pytest.raises(TableError, match="found mymodel sm90, need other sm90"):
        load_table("other", "sm90")
