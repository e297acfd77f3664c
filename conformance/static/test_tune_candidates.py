"""What a tuning run looks at: every candidate is sound, and pruning keeps what measurements have shown to be best."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.fakes import device_of
from lowlat_cli.checking import model_shapes
from lowlat_cli.tuning import candidates as module
from lowlat_cli.tuning import cost_model
from lowlat_cli.tuning.candidates import (
    Candidate,
    fused_a_candidates,
    screened_width,
    skinny_candidates,
    tiling_of,
    tilings,
    variants,
)
from lowlat_cli.tuning.cost_model import predict_us, prune, rank_correlation
from lowlat_gemm.arch import SM90
from lowlat_gemm.kernels.fused_a import FusedAConfig
from lowlat_gemm.kernels.skinny import SkinnyConfig
from lowlat_gemm.kernels.split_k import SplitKConfig, shared_memory_bytes

DATA = json.loads((Path(__file__).parents[1] / "data" / "split_k_sm90_times.json").read_text())
SCREENS = json.loads((Path(__file__).parents[1] / "data" / "split_k_sm90_screens.json").read_text())
H200 = device_of(SM90)
FEW = 12
MOST = 24  # the command's default
SHAPES = [(shape.n, shape.k) for shape in model_shapes("kimi_k3", (8,))]


@pytest.mark.parametrize("m", [1, 8, 16, 32, 33])
def test_every_candidate_is_sound(m):
    for n, k in SHAPES:
        found = [*tilings(SM90, n, k, m), *fused_a_candidates(SM90, n, k, m), *skinny_candidates(SM90, n, k, m)]
        assert found and len(set(found)) == len(found), f"{n}x{k}"
        for one in found:
            assert one.why_not(SM90, n, k, m) is None, f"{n}x{k} M = {m}: {one}"
            if one.backend == "split_k":
                assert shared_memory_bytes(one.config) <= module.HALF_AN_SM and one.config.token_columns >= m, one


def test_backends_are_enumerated_where_they_serve():
    assert fused_a_candidates(SM90, 1536, 128, 8) and not fused_a_candidates(SM90, 1536, 120, 8)
    assert skinny_candidates(SM90, 1536, 7168, 1) and not skinny_candidates(SM90, 1536, 7168, 8)
    known = Candidate("skinny", SkinnyConfig(224, 2, 4, 8, 7168))
    assert known in skinny_candidates(SM90, 1536, 7168, 1, [known])


@pytest.mark.parametrize(
    "one",
    [
        Candidate("split_k", SplitKConfig(64, 64, 4, 7, token_stages=5)),
        Candidate("fused_a", FusedAConfig(1, 8, 1, 4)),
        Candidate("fused_a", FusedAConfig(1, 8, 1, 4, trigger=2)),
        Candidate("fused_a", FusedAConfig()),
        Candidate("skinny", SkinnyConfig(224, 2, 4, 8, 7168)),
        Candidate("skinny", SkinnyConfig(224, 2, 4, 8)),
    ],
    ids=str,
)
def test_a_candidate_is_the_same_after_json_and_as_a_cell(one):
    assert Candidate.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Candidate.from_json({"backend": one.backend, "config": {"trigger": 6} | one.mapping() if one.backend == "split_k" else one.mapping()}) == one
    assert all(value > 0 for value in one.mapping().values())


def _winner(row: dict) -> Candidate:
    return Candidate("split_k", SplitKConfig(**row["config"]))


@pytest.mark.parametrize("row", DATA["winners"], ids=lambda row: f"{row['n']}x{row['k']}-{_winner(row)}")
def test_what_was_best_on_the_h200_is_looked_at(row):
    """Its tiling survives the pruning, and its variants come within one step of prefetch, trigger and ring of it."""
    n, k, best = row["n"], row["k"], _winner(row)
    kept, _ = prune(tilings(SM90, n, k, best.config.token_columns), n, k, best.config.token_columns, H200, MOST)
    found = [one for one in kept if tiling_of(one) == tiling_of(best)]
    assert found, f"{best} is lost: kept rows, split {[tiling_of(one) for one in kept]}"
    # A ring that is deeper than a rank has loads is the same as one of so many stages.
    loads = math.ceil(math.ceil(k / 128) / best.config.split) * 128 // best.config.stage_k
    ring = min(best.config.stages, loads)
    near = [
        one
        for one in (variant.config for variant in variants(found[0], k))
        if (one.k_blocks, one.token_stages) == (best.config.k_blocks, best.config.token_stages)
        and abs(one.stages - ring) <= 1
    ]
    assert near, f"{best}: no variant with its blocks and rings"


@pytest.mark.parametrize("row", DATA["times"], ids=lambda row: f"{row['n']}x{row['k']}@{row['m']}")
def test_the_model_is_near_what_was_measured(row):
    predicted = predict_us(_winner(row), row["n"], row["k"], row["m"], H200)
    assert abs(math.log(predicted / row["us"])) < 0.22, f"{predicted:.2f} us predicted, {row['us']} measured"


def _screened(entry: dict) -> tuple[list[float], list[float]]:
    """Predicted and measured microseconds of the tilings of one class that a tuning run screened."""
    m, columns = entry["m"], screened_width(entry["m"])
    predicted = []
    for rows, split, stages, k_blocks, token_stages, _ in entry["times"]:
        config = SplitKConfig(rows, columns, split, stages, k_blocks=k_blocks, trigger=6, token_stages=token_stages)
        predicted.append(predict_us(Candidate("split_k", config), entry["n"], entry["k"], m, H200))
    return predicted, [times[-1] for times in entry["times"]]


def test_the_model_orders_what_a_tuning_run_screened():
    """Over all classes: its order, and what the best of the few that it likes best costs over the best of all."""
    correlations, costs = [], []
    for entry in SCREENS["classes"]:
        predicted, measured = _screened(entry)
        correlations.append(rank_correlation(predicted, measured))
        liked = sorted(range(len(measured)), key=predicted.__getitem__)[:FEW]
        costs.append(min(measured[i] for i in liked) / min(measured))
    assert statistics.mean(correlations) > 0.58, statistics.mean(correlations)
    assert statistics.geometric_mean(costs) < 1.012 and max(costs) < 1.16, (statistics.geometric_mean(costs), max(costs))


def test_clusters_do_not_fill_every_sm(monkeypatch):
    """Without that the order is much worse: it is what makes tilings of just as many CTAs as there are places slow."""
    monkeypatch.setattr(cost_model._split_k_us, "__defaults__", (replace(cost_model.SPLIT_K, cluster_share=1.0),))
    assert statistics.mean(rank_correlation(*_screened(entry)) for entry in SCREENS["classes"]) < 0.5


def test_the_model_orders_what_was_measured():
    for n, k, m in ((1536, 7168, 8), (2304, 1536, 8)):
        rows = [row for row in DATA["split_scan"] + DATA["times"] if (row["n"], row["k"], row["m"]) == (n, k, m)]
        predicted = [predict_us(_winner(row), n, k, m, H200) for row in rows]
        assert rank_correlation(predicted, [row["us"] for row in rows]) == 1, f"{n}x{k}: {predicted}"
    for n, k in {(row["n"], row["k"]) for row in DATA["times"]}:
        rows = sorted((row for row in DATA["times"] if (row["n"], row["k"]) == (n, k)), key=lambda row: row["m"])
        predicted = [predict_us(_winner(row), n, k, row["m"], H200) for row in rows]
        assert predicted == sorted(predicted), f"{n}x{k}: more tokens are faster: {predicted}"


def test_pruning_keeps_one_of_a_tiling_and_repeats_its_probes():
    found = tilings(SM90, 1536, 7168, 8)
    kept, probes = prune(found, 1536, 7168, 8, H200, 10, 3)
    assert len({tiling_of(one) for one in kept + probes}) == 13
    us = [predict_us(one, 1536, 7168, 8, H200) for one in kept]
    assert us == sorted(us) and us[-1] <= min(predict_us(one, 1536, 7168, 8, H200) for one in probes)
    assert prune(list(reversed(found)), 1536, 7168, 8, H200, 10, 3)[1] == probes
    assert prune(found[:2], 1536, 7168, 8, H200, 10, 3)[1] == []


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1 and rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 2], [1, 2]) is None and rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)


def test_variants_differ_in_what_they_should():
    one = Candidate("split_k", replace(SplitKConfig(64, 64, 4, 7), token_stages=5))
    found = [variant.config for variant in variants(one, 7168)]
    assert {c.trigger for c in found} >= {2, 4, 6, 8, 10, 12} and len(set(found)) == len(found)
    assert {c.token_stages for c in found} == {0, 4, 5, 6} and {0, 4, 7} <= {c.prefetch for c in found}
    assert {(c.rows, c.split, c.token_columns) for c in found} == {(64, 4, 64)} and 6 in {c.stages for c in found}
    small = Candidate("split_k", SplitKConfig(56, 8, 4, 6, k_blocks=2))
    assert {1, 2} == {variant.config.k_blocks for variant in variants(small, 7168)}
    warps = variants(Candidate("fused_a", FusedAConfig(1, 8, 1, 4)), 7168)
    assert warps == [Candidate("fused_a", FusedAConfig(1, 8, 1, 4, trigger)) for trigger in (0, 1, 2)]
    dots = Candidate("skinny", SkinnyConfig(224, 2, 4, 8))
    assert variants(dots, 7168) == [dots]


@pytest.mark.parametrize("k, split, k_blocks, stages", [(7168, 4, 1, 13), (768, 1, 1, 12), (1536, 3, 1, 8), (1536, 3, 2, 4), (128, 1, 1, 3), (7168, 4, 2, 6)])
def test_a_ring_is_as_deep_as_half_an_sm_and_no_deeper_than_its_loads(k, split, k_blocks, stages):
    assert module.deepest_ring(SplitKConfig(56, 8, split, 3, k_blocks=k_blocks), k).stages == stages


def test_a_finalist_is_narrowed_to_the_tokens_that_it_serves():
    one = Candidate("split_k", SplitKConfig(64, 64, 4, 7, token_stages=5))
    narrow = one.narrowed(40)
    assert narrow.config == SplitKConfig(64, 40, 4, 7, token_stages=5) and narrow.invariance == one.invariance
    assert narrow.why_not(SM90, 1536, 7168, 40) is None and screened_width(40) == 64 and screened_width(17) == 32
    warps = Candidate("fused_a", FusedAConfig(1, 8, 1, 4))
    assert warps.narrowed(40) is warps
