"""Llama 4, text: most layers attend within aligned chunks and turn neighbours of a head, the others turn nothing and scale their queries
by position; experts chosen by a sigmoid that scales what they read, and one that every token takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.linear import MergedGateUp, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.interface import NormSpec
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, GatedMLP, SparseMoe
from pelton_plugins.models.interleaved import Neighbours
from pelton_plugins.models.llama import LlamaForCausalLM
from pelton_plugins.models.moe import MoeDecoderLayer, num_experts
from pelton_plugins.models.stacked_experts import one_for_each_expert

_NAMES = ExpertNames(router="router")


class HeadNorm(RMSNorm):
    """The norm of a head without a weight: no checkpoint has one."""

    def __init__(self, size: int, *, config: BuildConfig) -> None:
        nn.Module.__init__(self)
        self.spec = NormSpec(size=size, eps=config.hf.get("rms_norm_eps", 1e-5))
        self.weight = nn.Parameter(torch.ones(size, dtype=config.dtype, device=config.device), requires_grad=False)


class Llama4DecoderLayer(MoeDecoderLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        self.is_turned = _is_turned(index, config.hf)
        super().__init__(index, config=config, prefix=prefix)
        head_dim, rope = self.attn.head_dim, self.rope(index, self.attn.head_dim, config)
        self.neighbours = None if rope is None else Neighbours(self.qkv_proj, head_dim, rope, config)
        self.query_scales: Tensor | None = None  # [max_model_len, 1], by position
        if rope is None and config.hf.get("attn_temperature_tuning", True):
            self.query_scales = _query_scales(config)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        hidden = self.o_proj(self.attn(self.heads(qkv, batch.positions), batch))
        if self.experts is not None:
            result: tuple[Tensor, Tensor] = self.experts(hidden, residual, batch)
            return result
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated), residual

    def heads(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Neighbours brought apart, or queries scaled by position. Norms of heads have no weight, so a rope before them or behind
        them is the same."""
        if self.neighbours is not None:
            return self.neighbours(qkv)
        if self.query_scales is not None:
            query = qkv[:, : self.attn.num_heads * self.attn.head_dim]
            query.copy_(query.float() * self.query_scales.index_select(0, positions))
        return qkv

    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        return get_rope(config, head_dim) if self.is_turned else None

    def attention_chunk_size(self, index: int, config: BuildConfig) -> int | None:
        """Return it for layers that `layer_types` calls chunked; without such a list, for those that turn."""
        hf = config.hf
        kinds = hf.get("layer_types")
        is_local = kinds[index] == "chunked_attention" if kinds else self.is_turned
        return hf.get("attention_chunk_size", 8192) if is_local else None

    def query_key_norms(self, head_dim: int, config: BuildConfig, prefix: str) -> tuple[RMSNorm | None, RMSNorm | None]:
        if not (config.hf.get("use_qk_norm", True) and self.is_turned):
            return None, None
        return HeadNorm(head_dim, config=config), HeadNorm(head_dim, config=config)

    def has_experts(self, index: int, hf: HFConfig) -> bool:
        chosen = hf.get("moe_layers")
        return index in chosen if chosen is not None else (index + 1) % hf.get("interleave_moe_layer_step", 1) == 0

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> None:
        hf, prefix = config.hf, f"{prefix.removesuffix('mlp')}feed_forward"
        self.experts = None
        if self.has_experts(index, hf):
            self.experts = self.make_experts(config, prefix)
            return
        width = hf.get("intermediate_size_mlp", 16384)
        self.gate_up_proj = MergedGateUp(
            hf.hidden_size, width, activation=hf.get("hidden_act", "silu"), norm=self.post_attention_layernorm,
            config=config, prefix=prefix,
        )  # fmt: skip
        self.down_proj = RowParallelLinear(width, hf.hidden_size, config=config, prefix=f"{prefix}.down_proj")

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf, activation = config.hf, config.hf.get("hidden_act", "silu")
        routing = RoutingSpec(
            num_experts=num_experts(hf), top_k=hf.get("num_experts_per_tok", 1), scoring="sigmoid", is_renormalized=False,
            scales_input=True,
        )  # fmt: skip
        shared = GatedMLP(
            hf.hidden_size, hf.intermediate_size, activation=activation, config=config, prefix=f"{prefix}.shared_expert"
        )
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, routing=routing, activation=activation, names=_NAMES,
            norm=self.post_attention_layernorm, config=config, prefix=prefix, shared=shared,
        )  # fmt: skip


class Llama4ForCausalLM(LlamaForCausalLM):
    layer_class = Llama4DecoderLayer

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        used = super().load_weights(one_for_each_expert(weights, self.weights.expected(), is_transposed=True))
        for layer in self.layers:
            if layer.neighbours is not None:
                layer.neighbours.weights_loaded()  # type: ignore[union-attr,operator]
        return used


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text part of a checkpoint that has one for images as well, whose tensors stay in it."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=f"{prefix}language_model.")
        config.weights.ignore(rf"{prefix}(vision_model|multi_modal_projector)\..*")


def _is_turned(index: int, hf: HFConfig) -> bool:
    """Return whether a layer has a rope: `no_rope_layers` has a 1 for each that does; where it is empty, every n-th has none."""
    turned = hf.get("no_rope_layers")
    if not turned:
        return (index + 1) % int(hf.get("no_rope_layer_interval") or 4) != 0
    if len(turned) != hf.num_hidden_layers:
        raise ConfigError(
            f"no_rope_layers has {len(turned)} numbers; expected one for each of {hf.num_hidden_layers} layers. Fix config.json."
        )
    return bool(turned[index])


def _query_scales(config: BuildConfig) -> Tensor:
    """[max_model_len, 1] float32: log(1 + floor((position + 1) / floor_scale)) * attn_scale + 1. Nakanishi, Scalable-Softmax
    (arXiv:2501.19399)."""
    positions = torch.arange(config.max_model_len, dtype=torch.float32)
    steps = torch.floor((positions + 1.0) / config.hf.get("floor_scale", 8192))
    return (torch.log1p(steps) * config.hf.get("attn_scale", 0.1) + 1.0).unsqueeze(-1).to(config.device)
