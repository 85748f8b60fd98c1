"""Hy4: DeepSeek V3.2's shape with several streams between layers. A sub-layer reads a weighted sum of them, and what it gives is added to
each with a weight of its own (hyper-connections without a mixing of streams: Zhu et al., arXiv:2409.19606). Attention has sinks and a gate.

Every rank has the whole streams, between layers as one row of a token: T tokens, N streams, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.linear import split_heads
from pelton.layers.rope import Rope
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton.quantization.interface import LinearShard
from pelton_plugins.models.deepseek import DeepseekDecoderLayer, DeepseekV32ForCausalLM, MLAAttention
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.hybrid import renamed
from pelton_plugins.models.indexer import Choice, Indexer
from pelton_plugins.models.moe import check_fields, grouped_routing, shared_experts
from pelton_plugins.models.normed import head_shard
from pelton_plugins.models.text_parts import TEXT, check_text

_RELEASED = {
    ".hc_pre.hc_": ".hc_", ".learnable_sink_param": ".sinks", ".linear_gate.": ".gate_proj.", ".hc_attn_layer.hc_": ".attn_hc.",
    ".hc_mlp_layer.hc_": ".ffn_hc.", ".hc_head_": ".hc_",
}  # fmt: skip
"""Parts of a released checkpoint's names, and what stands there in transformers' own."""


class HyperConnection(nn.Module):
    """Weights of the streams, of all of them together, normed without a weight: sigmoid(scale * product + base), [T, N] each."""

    def __init__(
        self,
        num_weights: int,
        *,
        config: BuildConfig,
        prefix: str,
        names: tuple[str, str, str] = ("fn", "base", "scale"),
    ) -> None:
        """num_weights: how many times N, each with a scale of its own."""
        super().__init__()
        self.num_streams, self.eps = config.hf.hc_mult, config.hf.get("hc_eps", 1e-6)
        self.norm_eps, rows = config.hf.get("rms_norm_eps", 1e-5), num_weights * config.hf.hc_mult
        shapes = ((rows, self.num_streams * config.hf.hidden_size), (rows,), (num_weights,))
        made = [nn.Parameter(config.empty(*shape, dtype=torch.float32), requires_grad=False) for shape in shapes]
        self.matrix, self.base, self.scale = made
        for name, parameter in zip(names, made, strict=True):
            config.weights.expect(f"{prefix}.{name}", tuple(parameter.shape), parameter)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, N H] -> (their weighted sum [T, H], further weights [T, N] float32 or none of them)"""
        flat = streams.float()
        products = F.linear(flat, self.matrix) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        scaled = products.unflatten(1, (-1, self.num_streams)) * self.scale[:, None]
        weights = torch.sigmoid(scaled + self.base.view(-1, self.num_streams))
        taken = weights[:, 0] + self.eps
        read = (taken[:, :, None] * flat.unflatten(1, (self.num_streams, -1))).sum(1)
        return read.to(streams.dtype), weights[:, 1:].flatten(1)


class HYV4Attention(MLAAttention):
    def make_indexer(self, choice: Choice, rope: Rope, config: BuildConfig, prefix: str) -> Indexer:
        eps = config.hf.get("rms_norm_eps", 1e-5)
        return Indexer(choice, rope=rope, config=config, prefix=prefix, key_eps=eps, turns_last=True)

    def gate_shards(self, config: BuildConfig, prefix: str) -> list[LinearShard]:
        hf = config.hf
        return [head_shard(f"{prefix}.gate_proj", hf.num_attention_heads, hf.v_head_dim, hf.hidden_size, config)]

    def sinks(self, config: BuildConfig, prefix: str) -> Tensor:
        total = config.hf.num_attention_heads
        first, last = split_heads(total, config.parallel.rank, config.parallel.size, "num_attention_heads")
        sinks = nn.Parameter(config.empty(last - first, dtype=torch.float32), requires_grad=False)
        self.attention_sinks = sinks
        config.weights.expect(f"{prefix}.sinks", (total,), sinks, dim=0, start=first, stop=last)
        return sinks


class HYV4VLAttention(HYV4Attention):
    latent_eps = None


class HYV4DecoderLayer(DeepseekDecoderLayer):
    attention_class = HYV4Attention

    def __init__(self, index: int, *, choice: Choice | None, config: BuildConfig, prefix: str) -> None:
        super().__init__(index, choice=choice, config=config, prefix=prefix)
        hf = config.hf
        self.is_first, self.gives_nothing = index == 0, config.parallel.rank > 0
        self.num_streams, self.eps, self.magnitude = hf.hc_mult, hf.get("hc_eps", 1e-6), hf.get("hc_magnitude", 2.0)
        self.attn_hc = HyperConnection(2, config=config, prefix=f"{prefix}.attn_hc")
        self.ffn_hc = HyperConnection(2, config=config, prefix=f"{prefix}.ffn_hc")
        self.all_reduce = config.all_reduce(hf.hidden_size)

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=grouped_routing(hf), activation="silu_clamped",
            limit=float(hf.get("swiglu_limit", 10.0)), norm=self.post_attention_layernorm, config=config, prefix=prefix,
            shared=shared_experts(config, prefix), router_dtype=torch.float32,
        )  # fmt: skip

    def forward(self, streams: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, None]:  # type: ignore[override]
        """streams [T, N H], of the first layer the embedding [T, H] -> [T, N H]"""
        if self.is_first:
            streams = self._sum(streams).repeat(1, self.num_streams)
        x, weights = self.attn_hc(streams)
        streams = self._added(streams, weights, self.self_attn(self._given(x), None, batch)[0])
        x, weights = self.ffn_hc(streams)
        if self.experts is not None:
            output = self.experts(self._given(x), None, batch)[0]
        else:
            output = self.down_proj(self.gate_up_proj(self._given(x), None)[0])
        return self._added(streams, weights, output), None

    def _given(self, x: Tensor) -> Tensor:
        """Return this rank's part of what a sub-layer's norm reads, which sums over ranks: the first one's is all of it."""
        return x.zero_() if self.gives_nothing else x

    def _added(self, streams: Tensor, weights: Tensor, output: Tensor) -> Tensor:
        weights = weights * self.magnitude + self.eps
        added = weights[:, :, None] * self._sum(output).float()[:, None]
        return (added + streams.float().unflatten(1, (self.num_streams, -1))).to(streams.dtype).flatten(1)

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self.all_reduce is None else self.all_reduce(partial)


class HYV4ForCausalLM(DeepseekV32ForCausalLM):
    layer_class = HYV4DecoderLayer
    carries_residual: ClassVar[bool] = False

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        hf = config.hf
        check_fields(hf, attention_bias=False, hidden_act="silu")
        if hf.get("swiglu_limit", 10.0) <= 0:
            raise ConfigError(
                f"swiglu_limit is {hf.swiglu_limit}, and this model's experts clamp their gates to a positive one, such as 10. Use another "
                "checkpoint."
            )
        super().__init__(config=config, prefix=prefix)
        dtype, hidden_size, vocab_size = self._made_of
        self._made_of = dtype, hidden_size * hf.hc_mult, vocab_size  # stages give each other all streams
        self.gives_nothing = config.parallel.rank > 0
        config.weights.ignore(rf"{re.escape(prefix)}model\.mtp_layers\..*")
        if self._stage < self._last:
            config.weights.ignore(rf"{re.escape(prefix)}model\.hc_head\..*")
            return
        names = ("hc_fn", "hc_base", "hc_scale")
        self.hc_head = HyperConnection(1, config=config, prefix=f"{prefix}model.hc_head", names=names)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        streams, _ = self._forward(batch, None)
        if self._stage < self._last:
            return streams, None
        hidden, _ = self.hc_head(streams)
        return hidden.zero_() if self.gives_nothing else hidden, None

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(own_names(weights))


def own_names(weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
    """Yield tensors by the names of transformers, where a released checkpoint has others."""
    return renamed(weights, _RELEASED)


class HYV4VLDecoderLayer(HYV4DecoderLayer):
    attention_class = HYV4VLAttention


class HYV4VLForConditionalGeneration(HYV4ForCausalLM):
    """The text part of Hy4 with a part for images, whose tensors stay in the checkpoint. Pairs that turn lie beside each other, not half a
    head apart; a token of text has one number in each part of its position."""

    layer_class = HYV4VLDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "hy_v4_vl_text")
        super().__init__(config=config, prefix=prefix)
        config.weights.ignore(rf"{re.escape(prefix)}(vit|model\.(vit|vision_tower))\..*")

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(renamed(weights, {f"model.{TEXT}": "model."}))
