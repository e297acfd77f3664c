"""Kimi-K3's layers as one rank has them, by their BF16 projections: the stack that ``bench_layers`` times.

Norms, gates and residual additions are in. Attention (a sum with the decay in a KDA layer, the head of q in an MLA
layer, stand for it), routed experts and all-reduces are left out. Three KDA layers go before each MLA layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lowlat_gemm.models import projection_shapes

#: KDA layers before each MLA layer.
KDA_LAYERS = 3


@dataclass(frozen=True)
class Extents:
    """What one rank's layers are made of. ``heads``: local heads times their width; ``qkv_a``: rows of the MLA's first
    projection, ``q_lora`` of them the query's; ``f_a`` and ``beta``: the KDA's extra columns, ``pad`` after them."""

    hidden: int
    heads: int
    f_a: int
    beta: int
    pad: int
    qkv_a: int
    q_lora: int
    q_b: int
    latent: int
    shared: int

    @classmethod
    def of_kimi_k3(cls, tp: int) -> Extents:
        shapes = {shape.name: shape for shape in projection_shapes("kimi_k3", tp)}
        packed = {rows.name: rows.stop - rows.start for rows in shapes["in_proj_qkvgfab"].rows}
        return cls(
            hidden=shapes["in_proj_qkvgfab"].k,
            heads=packed["q"],
            f_a=packed["f_a"],
            beta=packed["beta"],
            pad=packed.get("pad", 0),
            qkv_a=shapes["fused_qkv_a_proj"].n,
            q_lora=shapes["q_b_proj"].k,
            q_b=shapes["q_b_proj"].n,
            latent=shapes["routed_expert_down_proj"].n,
            shared=shapes["shared_down_proj"].k,
        )

    def moe_weights(self) -> dict[str, tuple[int, int]]:
        return {
            "shared_gate_up_proj": (2 * self.shared, self.hidden),
            "shared_down_proj": (self.hidden, self.shared),
            "routed_expert_down_proj": (self.latent, self.hidden),
            "routed_expert_up_proj": (self.hidden, self.latent),
        }

    def kda_weights(self) -> dict[str, tuple[int, int]]:
        packed = 4 * self.heads + self.f_a + self.beta + self.pad
        own = {"in_proj_qkvgfab": (packed, self.hidden), "f_b_proj": (self.heads, self.f_a)}
        return own | {"kda_o_proj": (self.hidden, self.heads)} | self.moe_weights()

    def mla_weights(self) -> dict[str, tuple[int, int]]:
        own = {"fused_qkv_a_g_proj": (self.qkv_a + self.heads, self.hidden), "q_b_proj": (self.q_b, self.q_lora)}
        return own | {"mla_o_proj": (self.hidden, self.heads)} | self.moe_weights()


class TorchGemms:
    """What runs without the library."""

    def linear(self, name: str, x, weight):
        """x [M, K] @ weight [N, K].T; ``name``: the projection."""
        return F.linear(x, weight)

    def linear_residual(self, name: str, x, weight, residual):
        return torch.addmm(residual, x, weight.t())


class Stack:
    """The layers and one forward pass, x [M, hidden] -> [M, hidden]."""

    def __init__(self, extents: Extents, layers: int, device):
        self.extents, self.layers = extents, []
        generator = torch.Generator(device).manual_seed(0)
        for index in range(layers):
            is_mla = index % (KDA_LAYERS + 1) == KDA_LAYERS
            shapes = extents.mla_weights() if is_mla else extents.kda_weights()
            weights = {}
            for name, (n, k) in shapes.items():
                weights[name] = torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(generator=generator)
                weights[name].mul_(k**-0.5)
            self.layers.append((is_mla, weights))
        self.weight_bytes = sum(2 * weight.numel() for _, weights in self.layers for weight in weights.values())

    def weights(self):
        """Every matrix that a projection multiplies with, slices of packed ones by themselves."""
        for is_mla, weights in self.layers:
            for name, weight in weights.items():
                yield from self._attention_slices(weight) if name == "fused_qkv_a_g_proj" else (weight,)

    def _attention_slices(self, packed):
        return packed[: self.extents.qkv_a], packed[self.extents.qkv_a :]

    def _norm(self, x):
        return F.rms_norm(x, (x.shape[-1],), eps=1e-6)

    def forward(self, gemms: TorchGemms, x):
        h = x
        for is_mla, weights in self.layers:
            attention = self._mla if is_mla else self._kda
            h = h + attention(gemms, weights, self._norm(h))
            h = h + self._moe(gemms, weights, self._norm(h))
        return h

    def _kda(self, gemms, weights, x):
        e = self.extents
        packed = gemms.linear("in_proj_qkvgfab", x, weights["in_proj_qkvgfab"])
        _, _, v, gate, f_a, _ = packed.split([e.heads] * 4 + [e.f_a, e.beta + e.pad], dim=-1)
        decay = gemms.linear("f_b_proj", f_a, weights["f_b_proj"])  # rows of a wider buffer, as in the model
        return gemms.linear("kda_o_proj", self._norm(v + decay) * gate.sigmoid(), weights["kda_o_proj"])

    def _mla(self, gemms, weights, x):
        e = self.extents
        of_qkv_a, of_gate = self._attention_slices(weights["fused_qkv_a_g_proj"])
        latent = gemms.linear("fused_qkv_a_proj", x, of_qkv_a)
        gate = gemms.linear("mla_g_proj", x, of_gate)
        q = gemms.linear("q_b_proj", self._norm(latent[:, : e.q_lora]), weights["q_b_proj"])
        return gemms.linear("mla_o_proj", q[:, : e.heads] * gate.sigmoid(), weights["mla_o_proj"])

    def _moe(self, gemms, weights, x):
        gate, up = gemms.linear("shared_gate_up_proj", x, weights["shared_gate_up_proj"]).chunk(2, dim=-1)
        shared = gemms.linear("shared_down_proj", F.silu(gate) * up, weights["shared_down_proj"])
        latent = gemms.linear("routed_expert_down_proj", x, weights["routed_expert_down_proj"])
        name = "routed_expert_up_proj"
        return gemms.linear_residual(name, self._norm(latent), weights[name], shared)
