"""A.X-K2: DeepSeek V3.2's shape with norms whose output a low-rank product of it gates, and attention whose gate is made of the query's
latent, as it is and normed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.deepseek import DeepseekDecoderLayer, DeepseekV32ForCausalLM, MLAAttention
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.hybrid import renamed
from pelton_plugins.models.indexer import Choice
from pelton_plugins.models.mla import HeadsLinear
from pelton_plugins.models.moe import check_fields, grouped_routing, shared_experts
from pelton_plugins.models.own_inputs import whole_matrix
from pelton_plugins.models.parallel import AddedNorm

_OWN = {
    "layernorm.norm.": "layernorm.", "layernorm.mlp.fc1.": "layernorm.W_down.", "layernorm.mlp.fc2.": "layernorm.W_up.",
    ".q_gate_proj.": ".q_b_proj.",
}  # fmt: skip
"""Parts of names in released checkpoints or of transformers, and what stands there in those expected here."""


class GatedNorm(AddedNorm):
    """y = norm(hidden + residual), times sigmoid(up(silu(down(y))))."""

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(norm, config=config)
        size, rank = norm.spec.size, config.hf.get("gated_norm_rank", 16)
        self.down = whole_matrix(size, rank, config=config, prefix=f"{prefix}.W_down")
        self.up = whole_matrix(rank, size, config=config, prefix=f"{prefix}.W_up")

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed, residual = super().forward(hidden, residual)
        gate = torch.sigmoid(self.up(F.silu(self.down(normed))).float())
        return (normed * gate).to(normed.dtype), residual


class AXK2Attention(MLAAttention):
    def make_query_product(self, config: BuildConfig, prefix: str) -> HeadsLinear:
        hf = config.hf
        self.query_dim = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        rows = self.query_dim + hf.v_head_dim
        return HeadsLinear(2 * hf.q_lora_rank, hf.num_attention_heads, rows, config=config, prefix=prefix)

    def make_add_norm(self, norm: RMSNorm, config: BuildConfig, prefix: str) -> AddedNorm:
        return GatedNorm(norm, config=config, prefix=f"{prefix.removesuffix('.self_attn')}.input_layernorm")

    def queries(self, compressed: Tensor, query_latent: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        product = self.q_b_proj(torch.cat([query_latent, compressed], dim=-1))
        heads = product.unflatten(1, (self.attn.num_heads, -1))
        return heads[..., : self.query_dim].flatten(1), heads[..., self.query_dim :].flatten(1)


class AXK2DecoderLayer(DeepseekDecoderLayer):
    attention_class = AXK2Attention

    def __init__(self, index: int, *, choice: Choice | None, config: BuildConfig, prefix: str) -> None:
        super().__init__(index, choice=choice, config=config, prefix=prefix)
        self.mlp_norm: GatedNorm | None = None
        if self.experts is not None:
            name = f"{prefix}.post_attention_layernorm"
            self.mlp_norm = GatedNorm(self.post_attention_layernorm, config=config, prefix=name)

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        made = SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=grouped_routing(hf), activation=hf.get("hidden_act", "silu"), norm=None,
            config=config, prefix=prefix, shared=shared_experts(config, prefix), router_dtype=torch.float32,
        )  # fmt: skip
        assert made.correction is not None, "the routing has one"
        config.weights.finishers.append(partial(_check_correction, prefix, made.routing, made.correction))
        return made

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.experts is None or self.mlp_norm is None:
            return super().forward(hidden, residual, batch)
        hidden, residual = self.self_attn(hidden, residual, batch)
        result: tuple[Tensor, Tensor] = self.experts(*self.mlp_norm(hidden, residual), batch)
        return result


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    layer_class = AXK2DecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        if config.hf.get("mlp_layer_types") is None:
            check_fields(config.hf, moe_layer_freq=1)
        super().__init__(config=config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(own_names(weights))


def own_names(weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
    """Yield tensors by the names that are expected here."""
    return renamed(weights, _OWN)


def _check_correction(prefix: str, routing: RoutingSpec, correction: nn.Parameter) -> None:
    """Refuse a correction with which the model would choose experts of groups that it has left out: these count as 0 there, and as less
    than any other here. Neither is chosen where, of whichever groups, there are enough experts that cannot fall below 0."""
    if routing.num_groups == 1:
        return
    counts = (correction.detach() >= 0).view(routing.num_groups, -1).sum(dim=1).sort().values
    if int(counts[: routing.top_groups].sum()) < routing.top_k:
        raise ConfigError(
            f"{prefix}.gate.e_score_correction_bias has so many numbers below 0 that experts of groups which are not chosen might be: "
            f"n_group is {routing.num_groups}, topk_group {routing.top_groups}, num_experts_per_tok {routing.top_k}. This version leaves "
            "them out. Use a checkpoint without groups."
        )
