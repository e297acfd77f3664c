"""The local shapes of the models, against the imported check lists and by properties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat_gemm.models import MODELS, model_geometry, projection_shapes

GEOMETRY = json.loads((Path(__file__).parents[1] / "data" / "model_geometry.json").read_text(encoding="utf-8"))
IMPORTED = {"kimi_k3": GEOMETRY["kimi_k3"], "glm_5_3_flash": GEOMETRY["glm_5_3_flash (glm5next)"]}
CHECKS = [(model, int(tp.removeprefix("tp"))) for model, data in IMPORTED.items() for tp in data["check"]]

#: Produced, and not in the check lists: packed weights whose row ranges are in them.
EXTRAS = {"kimi_k3": {"fused_qkv_a_g_proj"}, "glm_5_3_flash": set()}

VALID_TP = {"kimi_k3": (1, 2, 4, 8, 16, 32), "glm_5_3_flash": (1, 2, 4, 8, 16, 32, 64)}


def _by_name(model: str, tp: int) -> dict:
    shapes = {shape.name: shape for shape in projection_shapes(model, tp)}
    assert len(shapes) == len(MODELS[model].linears), "names are unique"
    return shapes


@pytest.mark.parametrize("model, tp", CHECKS)
def test_shapes_are_those_of_the_check_list(model, tp):
    expected = {tuple(shape) for shape in IMPORTED[model]["check"][f"tp{tp}"]}
    shapes = _by_name(model, tp)
    produced = {(s.n, s.k): s.name for s in shapes.values() if s.name not in EXTRAS[model]}
    missing = expected - produced.keys()
    unexpected = {shape: name for shape, name in produced.items() if shape not in expected}
    assert not missing, f"{model} tp{tp}: not produced: {sorted(missing)}"
    assert not unexpected, f"{model} tp{tp}: not in the check list: {unexpected}"


@pytest.mark.parametrize("model", MODELS)
def test_every_projection_of_the_import_is_produced(model):
    names = {part.strip() for key in IMPORTED[model]["projections"] for part in key.split("/")}
    assert names == set(_by_name(model, 1)), "the names are those of the imported list"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", (1, 2, 4, 8, 16))
def test_local_times_tp_is_global(model, tp):
    whole, local = _by_name(model, 1), _by_name(model, tp)
    for name, shape in local.items():
        one = whole[name]
        if shape.sharding == "row":
            assert (shape.n, shape.k * tp) == (one.n, one.k), name
        elif shape.sharding == "replicated":
            assert (shape.n, shape.k) == (one.n, one.k), name
        elif not shape.rows:
            assert (shape.n * tp, shape.k) == (one.n, one.k), name
        else:
            assert shape.k == one.k, name


@pytest.mark.parametrize("tp", VALID_TP["kimi_k3"])
def test_packed_weights_of_kimi_k3(tp):
    shapes = _by_name("kimi_k3", tp)
    packed = shapes["fused_qkv_a_g_proj"]
    ranges = {rows.name: rows.stop - rows.start for rows in packed.rows}
    assert list(ranges.items()) == [("fused_qkv_a_proj", 2112), ("mla_g_proj", 12288 // tp)]
    for name, rows in ranges.items():
        assert (shapes[name].n, shapes[name].k) == (rows, packed.k), name
    in_proj = shapes["in_proj_qkvgfab"]
    ranges = {rows.name: rows.stop - rows.start for rows in in_proj.rows}
    pad = ranges.pop("pad", 0)
    assert ranges == {**dict.fromkeys("qkvg", 12288 // tp), "f_a": 128, "beta": 96 // tp}
    assert in_proj.n % 16 == 0 and 0 <= pad < 16


def test_in_proj_at_tp8_is_the_packed_weight_of_the_kda_overlap():
    rows = {r.name: (r.start, r.stop) for r in _by_name("kimi_k3", 8)["in_proj_qkvgfab"].rows}
    assert rows["g"][1] == 6144 and rows["f_a"] == (6144, 6272) and rows["beta"] == (6272, 6284)
    assert rows["pad"] == (6284, 6288)


@given(model=st.sampled_from(sorted(MODELS)), tp=st.integers(1, 300))
def test_any_tp_divides_or_is_refused(model, tp):
    if tp not in VALID_TP[model]:
        with pytest.raises(ValueError, match=rf"{model} \w+: .*\d+.* is not divisible by tp {tp}$"):
            projection_shapes(model, tp)
        return
    for shape in projection_shapes(model, tp):
        assert shape.n > 0 and shape.k > 0, shape
        assert shape.sharding in ("column", "row", "replicated"), shape
        edges = [edge for rows in shape.rows for edge in (rows.start, rows.stop)]
        assert not edges or (edges[0] == 0 and edges[-1] == shape.n and edges[1:-1:2] == edges[2::2]), shape
        assert edges == sorted(edges), shape


@pytest.mark.parametrize(
    "model, tp, fragments",
    [
        ("kimi_k3", 5, ["in_proj_qkvgfab", "N of q", "12288", "96 heads of 128", "tp 5"]),
        ("kimi_k3", 64, ["in_proj_qkvgfab", "96 heads", "tp 64"]),
        ("kimi_k3", 96, ["lm_head: N, 163840", "tp 96"]),
        ("glm_5_3_flash", 3, ["kda_qkv", "8192", "64 heads of 128", "tp 3"]),
        ("glm_5_3_flash", 128, ["kda_qkv", "64 heads", "tp 128"]),
    ],
)
def test_a_tp_that_does_not_divide(model, tp, fragments):
    with pytest.raises(ValueError) as raised:
        projection_shapes(model, tp)
    missing = [fragment for fragment in fragments if fragment not in str(raised.value)]
    assert not missing, f"{raised.value!s} does not say {missing}"


@pytest.mark.parametrize("tp", (0, -1, True, 2.0, "8", None))
def test_a_tp_that_is_no_size(tp):
    with pytest.raises(ValueError, match="tp is .*need an integer >= 1"):
        projection_shapes("kimi_k3", tp)


@pytest.mark.parametrize("model", ("kimi", "", None))
def test_an_unknown_model(model):
    with pytest.raises(ValueError, match="unknown model .*known are kimi_k3, glm_5_3_flash"):
        model_geometry(model)
    with pytest.raises(ValueError, match="unknown model"):
        projection_shapes(model, 8)
