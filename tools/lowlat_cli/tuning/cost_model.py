"""How long a candidate takes, predicted: good enough to leave out what cannot win, never to choose what does.

    split_k          time = fixed + p-norm(stream, in flight, busiest SM, read, steps) + waves + reduction + store
    fused_a, skinny  time = fixed + p-norm(stream, steps, read) + reduction              all in microseconds

``stream``: the weight's bytes at the rate of a streaming read. ``in flight``: the same where the rings hold too little of
it. ``busiest SM``: the tiles of the SM that has most. ``read``: all tiles out of L2, the tokens once for every tile of
weight rows. ``steps``: what one CTA needs for its slice of K, one stage after the other. A tuning run reports how the
ranking compared with what it measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lowlat_gemm.arch import DeviceProperties
from lowlat_gemm.kernels import fused_a, skinny, split_k
from lowlat_gemm.kernels.split_k import shared_memory_bytes

from .candidates import HALF_AN_SM, Candidate, tiling_of


@dataclass(frozen=True)
class StreamConstants:
    """Of ``fused_a`` and ``skinny``, no fit: a tuning run shows how well they order these.

    ``stream_share``: of the peak bandwidth, that a streaming read of cold weights reaches (the floor of the records
    in hw_matrix/records/sm90). ``fixed_us``: a launch's share that does not overlap its neighbours. ``norm``: how far
    the parts hide each other (1: not at all). ``fill_weight``: how much of the idle SMs' share is lost, the rest is made
    up by the CTAs of the next launch. ``l2_gbs``: rate at which L2 gives weight and token tiles. ``rank_us``: exchange of
    partial sums, for each doubling of the warps over K. ``latency_us``: of a loaded memory system, by Little's law.
    """

    stream_share: float = 0.92
    fixed_us: float = 0.75
    norm: float = 3.0
    fill_weight: float = 0.093
    l2_gbs: float = 14_000.0
    rank_us: float = 0.118
    latency_us: float = 1.0


@dataclass(frozen=True)
class SplitKConstants:
    """Fitted to the H200 times in conformance/data: 3,429 of split_k_sm90_screens.json, the near-best of each class most,
    and those of split_k_sm90_times.json.

    ``cluster_share``: of the SMs' places for CTAs, that clusters of three and more fill: a GPC's SMs are no multiple of
    them, and a launch that asks for more takes two waves.
    ``busy_stages``: of a ring, that request nothing: one is multiplied, one is on its way to be. ``sm_gbs``: the most
    that one SM takes. ``step_us``: a stage's barrier (of two blocks half as much again), ``product_us``: its products, for
    each block of 64 K, 8 token columns and row warpgroup. ``wave_us``: each wave after the first. ``rank_us``,
    ``reduce_gbs``: exchange of partial sums, a step for each doubling of the ranks and the bytes of one CTA.
    ``store_gbs``: of y.
    """

    stream_share: float = 0.9513
    fixed_us: float = 0.8379
    latency_us: float = 0.8188
    busy_stages: float = 1.5202
    sm_gbs: float = 81.1
    l2_gbs: float = 12_811.0
    step_us: float = 0.0666
    product_us: float = 0.009
    norm: float = 3.6396
    wave_us: float = 0.25
    rank_us: float = 0.1305
    reduce_gbs: float = 10.72
    store_gbs: float = 1_617.0
    cluster_share: float = 0.89


STREAM, SPLIT_K = StreamConstants(), SplitKConstants()


def predict_us(candidate: Candidate, n: int, k: int, m: int, device: DeviceProperties) -> float:
    """Microseconds of one launch in a chain of its own copies, cold weights."""
    predict = {split_k.NAME: _split_k_us, fused_a.NAME: _fused_a_us, skinny.NAME: _skinny_us}[candidate.backend]
    return predict(candidate.config, n, k, m, device)


def _stream_us(
    n: int, k: int, ctas: int, per_sm: int, in_flight: float, device: DeviceProperties, c: StreamConstants = STREAM
) -> float:
    """The weight through the SMs: ``ctas`` of which an SM holds ``per_sm``, each with ``in_flight`` bytes requested."""
    sms = device.sm_count
    if ctas > sms * per_sm:  # whole waves of full SMs
        waves = math.ceil(ctas / (sms * per_sm))
        fill = ctas / (waves * sms * per_sm)
    else:
        fill = ctas / (sms * math.ceil(ctas / sms))
    peak = 1e3 * (device.bandwidth_gbs or 4814.0) * c.stream_share  # bytes a microsecond
    resident = min(ctas, sms * per_sm)
    rate = min(peak, resident * in_flight / c.latency_us)
    return 2 * n * k / rate * (1 + c.fill_weight * (1 / fill - 1))


def _norm(p: float, *values: float) -> float:
    return sum(value**p for value in values) ** (1 / p)


def _split_k_us(config, n: int, k: int, m: int, device: DeviceProperties, c: SplitKConstants = SPLIT_K) -> float:
    clusters, token_tiles = -(-n // config.rows) * -(-m // config.token_columns), -(-m // config.token_columns)
    ctas = clusters * config.split
    per_sm = 2 if shared_memory_bytes(config) <= HALF_AN_SM else 1
    share = 1.0 if config.split <= 2 else c.cluster_share
    places = [max(1, int(share * device.sm_count * each / config.split)) for each in (1, per_sm)]  # for clusters
    waves = math.ceil(clusters / places[1])
    busiest = 1 if clusters <= places[0] else waves * per_sm  # CTAs of the SM that has most
    k_of_cta = math.ceil(math.ceil(k / split_k.K_UNIT) / config.split) * split_k.K_UNIT

    weight = 2 * n * k * token_tiles
    peak = 1e3 * (device.bandwidth_gbs or 4814.0) * c.stream_share  # bytes a microsecond
    requested = min((config.stages - c.busy_stages) * config.stage_k, k_of_cta) * config.rows * 2
    in_flight = weight * c.latency_us / (min(clusters, places[1]) * config.split * requested)
    busiest_sm = busiest * config.rows * k_of_cta * 2 / (c.sm_gbs * 1e3)
    read = (weight + 2 * ctas * k_of_cta * config.token_columns) / (c.l2_gbs * 1e3)
    warpgroups = -(-config.rows // split_k.WARPGROUP_ROWS)
    products = c.product_us * config.k_blocks * config.token_columns / 8 * warpgroups
    # A stage of two blocks costs its barrier less than twice.
    step = c.step_us * (1 + 0.5 * (config.k_blocks - 1)) + products
    steps = waves * math.ceil(k_of_cta / config.stage_k) * step
    exchanged = config.rows * config.token_columns * 4 * (config.split - 1) / config.split
    reduction = c.rank_us * math.log2(config.split) + exchanged / (c.reduce_gbs * 1e3)
    store = 2 * m * n / (c.store_gbs * 1e3)
    main = _norm(c.norm, weight / peak, in_flight, busiest_sm, read, steps)
    return c.fixed_us + main + c.wave_us * (waves - 1) + reduction + store


def _fused_a_us(config, n: int, k: int, m: int, device: DeviceProperties, c: StreamConstants = STREAM) -> float:
    config = fused_a.resolved(config, k)
    groups = fused_a.token_groups(m)
    token_tiles = -(-m // (groups * fused_a.TOKEN_GROUP))
    ctas = -(-n // config.rows) * token_tiles
    registers = fused_a.registers(config, groups) + fused_a.REGISTER_MARGIN
    per_sm = max(1, min(2048 // config.threads, 65_536 // (registers * config.threads)))
    in_flight = config.threads * config.unroll * config.row_tiles * 2 * 16
    blocks = math.ceil(k / fused_a.K_BLOCK / config.k_warps / config.unroll)
    waves = math.ceil(ctas / (device.sm_count * per_sm))
    stream = _stream_us(n, k, ctas, per_sm, in_flight, device, c)
    # A batch of loads waits for the memory once; the first is requested before the previous kernel has finished.
    steps = (waves * blocks - 1) * c.latency_us
    read = 2 * k * ctas * (config.rows + groups * fused_a.TOKEN_GROUP) / (c.l2_gbs * 1e3)
    exchange = c.rank_us / 2 * math.log2(config.k_warps)
    return c.fixed_us + _norm(c.norm, stream, steps, read) + exchange


def _skinny_us(config, n: int, k: int, m: int, device: DeviceProperties, c: StreamConstants = STREAM) -> float:
    ctas = -(-n // config.outputs_per_block)
    registers = skinny.registers(config, m) + skinny.REGISTER_MARGIN
    per_sm = max(1, min(2048 // config.block_size, 65_536 // (registers * config.block_size), 32))
    in_flight = config.chunk * config.outputs_per_block * 2
    stream = _stream_us(n, k, ctas, per_sm, in_flight, device, c)
    read = 2 * k * ctas * (config.outputs_per_block + m) / (c.l2_gbs * 1e3)
    # Products on CUDA cores: two a lane and clock, and the unpacking of both operands.
    products = m * n * k * 2 / (device.sm_count * 128 * 1.7e3)
    return c.fixed_us + _norm(c.norm, stream, products, read)


def prune(
    candidates: Sequence[Candidate], n: int, k: int, m: int, device: DeviceProperties, most: int, probes: int = 0
) -> tuple[list[Candidate], list[Candidate]]:
    """The ``most`` candidates with the least predicted time, best first, and ``probes`` random ones of the rest.

    Of ``split_k`` tilings that share rows and split only the best is looked at: the others are its ``variants``. The
    probes are the same on every run: they are there to show what the model would have lost.
    """
    ranked = sorted(candidates, key=lambda one: predict_us(one, n, k, m, device))
    first: dict = {}
    for one in ranked:
        first.setdefault(tiling_of(one), one)
    ranked = list(first.values())
    rest = ranked[most:]
    return ranked[:most], random.Random(f"{n}x{k}@{m}").sample(rest, min(probes, len(rest)))


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's: 1 for the same order, 0 for none; None for fewer than three pairs or no spread."""
    if len(predicted) < 3:
        return None
    a, b = _ranks(predicted), _ranks(measured)
    mean = (len(a) - 1) / 2
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return None if spread == 0 else sum((x - mean) * (y - mean) for x, y in zip(a, b)) / spread


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]
