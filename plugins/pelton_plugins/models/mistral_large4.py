"""Mistral Large 4, text: DeepSeek V3.2's shape whose queries have no latent, and grow with the logarithm of their position. Some layers
turn nothing, some read the latents of a layer before, and factors of the rope's frequencies are learned.

T tokens, H heads of this rank, J heads of the indexer, D numbers of each, N `qk_nope_head_dim`, R `qk_rope_head_dim`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.linear import RowParallelLinear, split_heads
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import FREQUENCIES, Rope, get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.deepseek import DeepseekDecoderLayer, DeepseekForCausalLM, scale_of
from pelton_plugins.models.encoder_layers import LayerNorm
from pelton_plugins.models.experts import SparseMoe
from pelton_plugins.models.indexer import Choice, Indexer
from pelton_plugins.models.latent_attention import MLALayer
from pelton_plugins.models.mla import LatentUp
from pelton_plugins.models.moe import check_fields, num_experts, shared_experts
from pelton_plugins.models.normed import BareLinear, NormedLinear, head_shard, whole_shard
from pelton_plugins.models.parallel import AddedNorm
from pelton_plugins.models.text_parts import TEXT, check_text

_QUERY_NORM_EPS = 1e-6  # of the indexer; config.json's rms_norm_eps is of the others
_RELEASED = (
    ("tok_embeddings.", "model.embed_tokens."), ("lerope.alpha", "model.rotary_emb.alpha"), ("output.", "lm_head."),
    ("layers.", "model.layers."), ("norm.", "model.norm."),
)  # fmt: skip
"""How names of a released checkpoint begin, and what stands there in transformers' own."""
_RELEASED_PARTS = {
    "attention": "self_attn", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp",
    "gate": "mlp.gate", "experts": "mlp.experts", "shared_experts": "mlp.shared_experts", "wq": "q_proj", "wo": "o_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa", "wkv_b": "kv_b_proj", "kv_a_norm": "kv_a_layernorm", "ssmax_scaling": "softmax_scaling",
    "s": "scale", "b": "bias", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
}  # fmt: skip
"""The same of the parts of a layer's names, between dots."""
_OTHERS = (
    r"(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm|mtp_dspark|model\.vision_tower|"
    r"model\.multi_modal_projector)\..*"
)


class PositionScale(nn.Module):
    """Factors of each head's queries: scale * log(position + 1) + bias. Nakanishi, Scalable-Softmax (arXiv:2501.19399)."""

    def __init__(self, num_heads: int, heads: tuple[int, int], *, config: BuildConfig, prefix: str) -> None:
        """heads: of `num_heads`, those of this rank."""
        super().__init__()
        first, last = heads
        self.line = nn.Parameter(config.empty(2, last - first, dtype=torch.float32), requires_grad=False)
        for name, target in zip(("scale", "bias"), self.line.data, strict=True):
            config.weights.expect(f"{prefix}.{name}", (num_heads,), target, dim=0, start=first, stop=last)

    def forward(self, queries: Tensor, positions: Tensor) -> Tensor:
        """queries [T, H, numbers of a head]"""
        scale, bias = self.line
        factors = torch.log(positions + 1.0)[:, None] * scale + bias
        return (queries.float() * factors[:, :, None]).to(queries.dtype)


class HiddenIndexer(Indexer):
    """An indexer whose queries are made of what the attention reads, normed once more."""

    def __init__(self, choice: Choice, *, rope: Rope | None, config: BuildConfig, prefix: str) -> None:
        size = config.hf.hidden_size
        super().__init__(choice, rope=rope, config=config, prefix=prefix, query_size=size)
        self.is_interleaved = True
        self.q_input_norm = LayerNorm(size, config=config, prefix=f"{prefix}.q_input_norm", eps=_QUERY_NORM_EPS)
        every = (0, self.num_heads)
        self.scaling = PositionScale(self.num_heads, every, config=config, prefix=f"{prefix}.softmax_scaling")

    def queries(self, source: Tensor, positions: Tensor) -> Tensor:
        """source [T, hidden size] -> [T, J, D], before rope."""
        normed = self.q_input_norm(source).to(source.dtype)
        scaled: Tensor = self.scaling(super().queries(normed, positions), positions)
        return scaled


class MistralLarge4Attention(nn.Module):
    """Down to queries and, where the layer keeps latents of its own, to these; attention over latents, and the output product."""

    def __init__(
        self, index: int, norm: RMSNorm, *, choice: Choice, config: BuildConfig, prefix: str, layers_prefix: str
    ) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, value_dim = hf.hidden_size, hf.num_attention_heads, hf.v_head_dim
        rank, rope_dim, head_dim = hf.kv_lora_rank, hf.qk_rope_head_dim, hf.qk_nope_head_dim + hf.qk_rope_head_dim
        rope = get_rope(config, rope_dim)
        scale = head_dim**-0.5 * scale_of(rope) ** 2
        own_rope, turned = (rope, rope_dim) if _is_turned(index, hf) else (None, 0)
        source = cache_source(index, hf)
        shards = [head_shard(f"{prefix}.q_proj", num_heads, head_dim, hidden_size, config)]
        self.kv_a_layernorm: RMSNorm | None = None
        if source is None:
            shards.append(whole_shard(f"{prefix}.kv_a_proj_with_mqa", rank + turned, hidden_size))
            self.kv_a_layernorm = RMSNorm(rank, config=config, prefix=f"{prefix}.kv_a_layernorm")
        self.indexer: HiddenIndexer | None = None
        if index in choice.indexers:
            self.add_norm = AddedNorm(norm, config=config)
            self.down: NormedLinear | BareLinear = BareLinear(shards, config=config)
            self.indexer = HiddenIndexer(choice, rope=own_rope, config=config, prefix=f"{prefix}.indexer")
        else:
            self.down = NormedLinear(shards, norm=norm, config=config)
        heads = split_heads(num_heads, config.parallel.rank, config.parallel.size, "num_attention_heads")
        self.scaling = PositionScale(num_heads, heads, config=config, prefix=f"{prefix}.softmax_scaling")
        self.up = LatentUp(rank, num_heads, head_dim - turned + value_dim, config=config, prefix=f"{prefix}.kv_b_proj")
        self.attn = MLALayer(
            self.up.by_head, latent_dim=rank, rope_dim=turned, nope_dim=head_dim - turned, value_dim=value_dim,
            kv_norm=self.kv_a_layernorm, rope=own_rope, scale=scale, config=config, prefix=f"{prefix}.attn", chosen=choice.tokens,
            shares=None if source is None else f"{layers_prefix}.{source}.self_attn.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(num_heads * value_dim, hidden_size, config=config, prefix=f"{prefix}.o_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if self.indexer is None:
            product, residual = self.down(hidden, residual)
        else:
            hidden, residual = self.add_norm(hidden, residual)
            product = self.down(hidden)
            self.indexer(hidden, hidden, batch)
        query, *latents = product.split(self.down.sizes, dim=-1)
        query = self.scaling(query.unflatten(1, (self.attn.num_heads, -1)), batch.positions)
        return self.o_proj(self.attn(query, latents[0] if latents else None, batch)), residual


class MistralLarge4DecoderLayer(DeepseekDecoderLayer):
    def make_attention(self, index: int, choice: Choice | None, config: BuildConfig, prefix: str) -> nn.Module:
        assert choice is not None, "every layer has one"
        layers_prefix = prefix.removesuffix(f".{index}.self_attn")
        return MistralLarge4Attention(
            index, self.input_layernorm, choice=choice, config=config, prefix=prefix, layers_prefix=layers_prefix
        )

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        hf = config.hf
        routing = RoutingSpec(
            num_experts=num_experts(hf), top_k=hf.num_experts_per_tok, scale=hf.get("routed_scaling_factor", 1.0),
            num_groups=hf.get("n_group", 1), top_groups=hf.get("topk_group", 1), group_score="top2",
        )  # fmt: skip
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=routing, activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm, config=config, prefix=prefix, shared=shared_experts(config, prefix),
            router_dtype=torch.float32,
        )  # fmt: skip


class MistralLarge4ForConditionalGeneration(DeepseekForCausalLM):
    """The text part of a checkpoint that has one for images as well, whose tensors stay in it."""

    layer_class = MistralLarge4DecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_text(config, "mistral_large4_text")
        check_fields(config.hf, attention_bias=False)
        super().__init__(config=config, prefix=prefix)
        config.weights.ignore(prefix + _OTHERS)
        hf, weights = config.hf, config.weights
        self.rope = get_rope(config, hf.qk_rope_head_dim)
        if self.rope.parameters.rope_type not in FREQUENCIES:
            raise ConfigError(
                f"rope_type is {self.rope.parameters.rope_type!r}, whose frequencies change with the length, and this model has learned "
                f"factors of them; it has {', '.join(FREQUENCIES)}. Use another checkpoint."
            )
        self.alpha = nn.Parameter(config.empty(hf.qk_rope_head_dim // 2, dtype=torch.float32), requires_grad=False)
        weights.expect(f"{prefix}model.rotary_emb.alpha", tuple(self.alpha.shape), self.alpha)
        weights.finishers.append(self._turn)

    def make_choice(self, config: BuildConfig, layers: range) -> Choice:
        for index in layers:
            source = cache_source(index, config.hf)
            if source is not None and source not in layers:
                raise ConfigError(
                    f"Layer {index} reads the latents of layer {source} (kv_source_layers), which another pipeline stage has. Let a stage "
                    "have both, by pipeline_layer_partition."
                )
        return Choice(config, layers, reads_query_latent=False)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(own_names(weights))

    def _turn(self) -> None:
        """Make the rope's table anew, of frequencies times exp(alpha)."""
        parameters, table = self.rope.parameters, self.rope.cos_sin
        frequencies, scale = FREQUENCIES[parameters.rope_type](parameters)
        positions = torch.arange(len(table), dtype=torch.float32)
        angles = positions[:, None] * (frequencies * self.alpha.detach().cpu().exp())
        table.copy_(torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1))


def cache_source(index: int, hf: HFConfig) -> int | None:
    """Return the layer whose latents this one reads; None: its own."""
    sources = hf.get("kv_source_layers")
    if sources is None or sources[index] == index:
        return None
    turned = _is_turned(index, hf)
    giving = [
        other
        for other in range(index)
        if sources[other] == other and other in sources[other + 1 :] and _is_turned(other, hf) == turned
    ]
    if not giving or sources[index] != giving[-1]:
        raise ConfigError(
            f"kv_source_layers has {sources[index]} for layer {index}; layers that share read the last one before them that gives latents "
            f"and {'turns its keys' if turned else 'does not turn its keys'}, here {giving[-1] if giving else 'none'}. Fix config.json."
        )
    return giving[-1]


def _is_turned(index: int, hf: HFConfig) -> bool:
    """Return whether the layer has a rope: `no_rope_layers` has a 1 for it; without that every fourth has none."""
    turned = hf.get("no_rope_layers")
    return bool(turned[index]) if turned else (index + 1) % hf.get("no_rope_layer_interval", 4) != 0


def own_names(weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
    """Yield tensors by the names of the text model alone; a released checkpoint has others than transformers."""
    for name, weight in weights:
        for released, own in _RELEASED:
            if name.startswith(released):
                parts = (_RELEASED_PARTS.get(part, part) for part in name.removeprefix(released).split("."))
                name = own + ".".join(parts)
                break
        yield name.replace(f"model.{TEXT}", "model.", 1), weight
