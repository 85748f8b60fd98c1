"""MiniMax-Text-01: lightning attention in some layers, attention in the others, experts in all; what a norm gives is the residual too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.hybrid import HybridDecoder, head_dim_of, layer_kind
from pelton_plugins.models.normed import BareLinear
from pelton_plugins.models.parallel import AddedNorm
from pelton_plugins.models.shares import Share, row_shard, shards_by_group
from pelton_plugins.models.state_layer import GroupRMS, StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch

_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class LightningAttention(StateLayer):
    """Product, states, norm over all heads, gate, product. `LightningParams` in `pelton_backends.sdpa.lightning` is all that a backend
    reads here."""

    attention_type: ClassVar[str] = "lightning"
    state_names: ClassVar[tuple[str, ...]] = ("states",)

    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        hf, size = config.hf, config.hf.hidden_size
        heads, dim = Share.split(hf.num_attention_heads, "num_attention_heads", config), head_dim_of(hf)
        inner = heads.times(dim)
        self.num_heads, self.head_dim, self.inner = heads.count, dim, inner.count
        q, k, v = shards_by_group(f"{prefix}.qkv_proj", heads, [Share.whole(dim)] * 3, size)
        gate = row_shard(f"{prefix}.output_gate", inner, size)
        self.in_proj = BareLinear([*q, *k, *v, gate], config=config)
        config.weights.ignore(
            rf"{prefix}\.(slope_rate|query_decay|key_decay|diagonal_decay)"
        )  # they follow from config.json
        slopes = 2.0 ** (-8.0 / heads.total * torch.arange(heads.start + 1, heads.stop + 1))
        self.slopes = (slopes * (1 - index / (hf.num_hidden_layers - 1 + 1e-5) + 1e-5)).to(config.device)
        self.norm_weight = self.parameter("norm.weight", inner)
        self.norm = GroupRMS(Share.whole(1), inner.total, 1e-6, config)
        self.out_proj = RowParallelLinear(inner.total, size, config=config, prefix=f"{prefix}.out_proj")
        self.keep(((heads.count, dim, dim), "float32"), num_heads=heads.count, num_groups=heads.count, head_dim=dim)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        product = self.in_proj(x)
        mixed = self.mix(product, self.inner, batch)
        normed = self.norm(mixed.float()).to(mixed.dtype) * self.norm_weight
        return self.out_proj(torch.sigmoid(product[:, -self.inner :]) * normed)


class MiniMaxAttention(nn.Module):
    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, head_dim = config.hf, head_dim_of(config.hf)
        size, num_heads, num_kv_heads = hf.hidden_size, hf.num_attention_heads, hf.num_key_value_heads
        self.qkv_proj = QKVLinear(size, num_heads, num_kv_heads, head_dim, norm=None, config=config, prefix=prefix)
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=get_rope(config, head_dim), config=config,
            prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * head_dim, size, config=config, prefix=f"{prefix}.o_proj")

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        attended: Tensor = self.o_proj(self.attn(self.qkv_proj(x, None)[0], batch))
        return attended


class MiniMaxDecoderLayer(nn.Module):
    """A layer returns the sum of its sub-layers, and no residual beside it: over ranks parts of it, the input being the first one's."""

    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, attention = config.hf, f"{prefix}.self_attn"
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(hf.hidden_size, config=config, prefix=f"{prefix}.{name}_layernorm")
            for name in ("input", "post_attention")
        )
        self.add_norm, self.has_input = AddedNorm(self.input_layernorm, config=config), config.parallel.rank == 0
        kind = layer_kind(index, hf) or ("linear_attention" if index % 2 else "full_attention")
        if kind == "full_attention":
            self.mixer: nn.Module = MiniMaxAttention(config=config, prefix=attention)
        else:
            self.mixer = LightningAttention(index, config=config, prefix=attention)
        self.experts = SparseMoe(
            hf.hidden_size, hf.intermediate_size, activation=hf.get("hidden_act", "silu"), names=_NAMES,
            routing=RoutingSpec(num_experts=hf.num_local_experts, top_k=hf.num_experts_per_tok),
            norm=self.post_attention_layernorm, config=config, prefix=f"{prefix}.block_sparse_moe",
        )  # fmt: skip
        names = (f"{kind.partition('_')[0]}_attn", "mlp")
        self.factors = [[float(hf.get(f"{name}_{which}_factor", 1)) for which in ("alpha", "beta")] for name in names]

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:
        (kept, new), (kept_mlp, new_mlp) = self.factors
        x, _ = self.add_norm(hidden, None)
        mixed = self.mixer(x, batch) * new
        result, x, _ = self.experts.with_input(x * kept + mixed if self.has_input else mixed, None, batch)
        return x * kept_mlp + result * new_mlp if self.has_input else result * new_mlp, None


class MiniMaxForCausalLM(HybridDecoder):
    carries_residual = False

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        return MiniMaxDecoderLayer(index, config=config, prefix=prefix)
