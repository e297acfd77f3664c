"""Local shapes of the BF16 linears of the models that have tables, for any tensor-parallel size.

From the public model configurations. A column-parallel linear shards N, a row-parallel one K, a replicated one
neither. Some weights are packed: their N is made of parts that lie one after the other, sharded or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True)
class Extent:
    """``count`` units of ``unit`` elements; what is sharded is whole units (heads, for example)."""

    count: int
    unit: int = 1
    what: str = "elements"

    @property
    def size(self) -> int:
        return self.count * self.unit

    def local(self, tp: int, sharded: bool) -> int:
        return self.size // tp if sharded else self.size


@dataclass(frozen=True)
class Part:
    """One piece of N."""

    name: str
    extent: Extent
    sharded: bool


@dataclass(frozen=True)
class LinearGeometry:
    """One linear before it is sharded. N is the parts, then zero rows up to a multiple of ``pad_to``."""

    name: str
    parts: tuple[Part, ...]
    k: Extent
    sharding: str
    pad_to: int = 1

    def sharded_extents(self) -> tuple[tuple[str, Extent], ...]:
        """What a TP size must divide."""
        packed = len(self.parts) > 1
        columns = tuple((f"N of {p.name}" if packed else "N", p.extent) for p in self.parts if p.sharded)
        return (*columns, ("K", self.k)) if self.sharding == ROW else columns


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a local weight."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ProjectionShape:
    """A linear as one rank holds it: weight [n, k]. ``rows`` says what is where in a packed weight."""

    name: str
    n: int
    k: int
    sharding: str
    rows: tuple[RowRange, ...] = ()


@dataclass(frozen=True)
class ModelGeometry:
    """The linears of one model family."""

    name: str
    title: str
    hidden: int
    linears: tuple[LinearGeometry, ...]


def _column(name: str, n: Extent, k: int) -> LinearGeometry:
    return LinearGeometry(name, (Part(name, n, True),), Extent(k), COLUMN)


def _row(name: str, n: int, k: Extent) -> LinearGeometry:
    return LinearGeometry(name, (Part(name, Extent(n), False),), k, ROW)


def _replicated(name: str, n: int, k: int) -> LinearGeometry:
    return LinearGeometry(name, (Part(name, Extent(n), False),), Extent(k), REPLICATED)


def _kimi_k3() -> ModelGeometry:
    hidden, q_lora_rank, kv_lora_rank, rope_dim, latent_moe = 7168, 1536, 512, 64, 3584
    heads = Extent(96, 128, "heads")  # KDA heads, and the value heads of MLA: 96 of 128 both
    fused_qkv_a = q_lora_rank + kv_lora_rank + rope_dim
    dense, shared, vocab = Extent(33792), Extent(6144), Extent(163840)
    linears = (
        LinearGeometry(
            "in_proj_qkvgfab",
            (
                Part("q", heads, True),
                Part("k", heads, True),
                Part("v", heads, True),
                Part("g", heads, True),
                Part("f_a", Extent(128), False),
                Part("beta", Extent(heads.count, what="heads"), True),
            ),
            Extent(hidden),
            COLUMN,
            pad_to=16,
        ),
        _column("f_b_proj", heads, 128),
        _row("kda_o_proj", hidden, heads),
        _row("mla_o_proj", hidden, heads),
        _replicated("fused_qkv_a_proj", fused_qkv_a, hidden),
        _column("q_b_proj", Extent(96, 192, "heads"), q_lora_rank),
        _column("mla_g_proj", heads, hidden),
        # fused_qkv_a_proj and mla_g_proj in one packed weight; each row range is used alone as well.
        LinearGeometry(
            "fused_qkv_a_g_proj",
            (Part("fused_qkv_a_proj", Extent(fused_qkv_a), False), Part("mla_g_proj", heads, True)),
            Extent(hidden),
            COLUMN,
        ),
        _replicated("routed_expert_down_proj", latent_moe, hidden),
        _replicated("routed_expert_up_proj", hidden, latent_moe),  # with the residual epilogue
        _column("shared_gate_up_proj", Extent(shared.count, 2, "gate and up rows"), hidden),
        _row("shared_down_proj", hidden, shared),
        _column("dense_gate_up_proj", Extent(dense.count, 2, "gate and up rows"), hidden),
        _row("dense_down_proj", hidden, dense),
        _column("lm_head", vocab, hidden),
        _replicated("mtp_eh_proj", hidden, 2 * hidden),
    )
    return ModelGeometry("kimi_k3", "Kimi-K3", hidden, linears)


def _glm_5_3_flash() -> ModelGeometry:
    hidden, q_lora_rank, kv_lora_rank, low_rank = 4096, 1536, 512, 128
    kda_heads, mla_heads = Extent(64, 128, "heads"), Extent(64, 256, "heads")
    indexer_heads, indexer_head_dim = 32, 128
    dense, shared, vocab = Extent(12288), Extent(2048), Extent(154880)
    linears = (
        LinearGeometry(
            "kda_qkv", tuple(Part(name, kda_heads, True) for name in ("q", "k", "v")), Extent(hidden), COLUMN
        ),
        _replicated("kda_f_a", low_rank, hidden),
        _replicated("kda_g_a", low_rank, hidden),
        _column("kda_beta", Extent(kda_heads.count, what="heads"), hidden),
        _column("kda_f_b", kda_heads, low_rank),
        _column("kda_g_b", kda_heads, low_rank),
        _row("kda_o_proj", hidden, kda_heads),
        _replicated("dsa_fused_qkv_a", q_lora_rank + kv_lora_rank, hidden),
        _column("dsa_q_b", mla_heads, q_lora_rank),
        _row("dsa_o_proj", hidden, mla_heads),
        _replicated("indexer_wq_b", indexer_heads * indexer_head_dim, q_lora_rank),
        _replicated("indexer_wk", indexer_head_dim, hidden),
        _replicated("indexer_weights", indexer_heads, hidden),
        _column("dense_gate_up", Extent(dense.count, 2, "gate and up rows"), hidden),
        _row("dense_down", hidden, dense),
        _column("shared_gate_up", Extent(shared.count, 2, "gate and up rows"), hidden),
        _row("shared_down", hidden, shared),
        _column("lm_head", vocab, hidden),
        _replicated("mtp_eh_proj", hidden, 2 * hidden),
    )
    return ModelGeometry("glm_5_3_flash", "GLM-5.3-Flash", hidden, linears)


MODELS: Mapping[str, ModelGeometry] = MappingProxyType(
    {model.name: model for model in (_kimi_k3(), _glm_5_3_flash())}
)


def model_geometry(model: str) -> ModelGeometry:
    """The geometry of a model family. ValueError, naming those known, for any other name."""
    found = MODELS.get(model) if isinstance(model, str) else None
    if found is None:
        raise ValueError(f"unknown model {model!r}: known are {', '.join(MODELS)}")
    return found


def projection_shapes(model: str, tp: int) -> list[ProjectionShape]:
    """The local shapes at tensor-parallel size ``tp``; two linears of one shape are two entries.

    ValueError for an unknown model, and for a tp that does not divide a sharded extent: it names both.
    """
    geometry = model_geometry(model)
    if type(tp) is not int or tp < 1:
        raise ValueError(f"tp is {tp!r}: need an integer >= 1")
    return [_local(geometry, linear, tp) for linear in geometry.linears]


def _local(model: ModelGeometry, linear: LinearGeometry, tp: int) -> ProjectionShape:
    for axis, extent in linear.sharded_extents():
        if extent.count % tp:
            units = f" ({extent.count} {extent.what} of {extent.unit})" if extent.unit > 1 else f" {extent.what}"
            raise ValueError(f"{model.name} {linear.name}: {axis}, {extent.size}{units}, is not divisible by tp {tp}")
    rows, n = [], 0
    for part in linear.parts:
        size = part.extent.local(tp, part.sharded)
        rows.append(RowRange(part.name, n, n + size))
        n += size
    if pad := -n % linear.pad_to:
        rows.append(RowRange("pad", n, n + pad))
        n += pad
    return ProjectionShape(
        name=linear.name,
        n=n,
        k=linear.k.local(tp, linear.sharding == ROW),
        sharding=linear.sharding,
        rows=tuple(rows) if len(rows) > 1 else (),
    )
