"""LFM2: most layers are short convolutions between two gates, the others have attention; an MLP behind each, or experts (LFM2-MoE)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.hybrid import MLP, Attention, HybridDecoder, Parts, head_dim_of, layer_kind
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, shards_of
from pelton_plugins.models.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction="expert_bias")


class ShortConvMixer(StateLayer):
    """Product, gate, convolution, gate, product; ranks share out its channels."""

    attention_type: ClassVar[str] = "short_conv"
    state_names: ClassVar[tuple[str, ...]] = ("conv_states",)

    def __init__(
        self, norm: RMSNorm, *, config: BuildConfig, prefix: str, post_norm: RMSNorm | None = None, taps: int = 3
    ) -> None:
        """post_norm: of the sub-layer before, where it has one. taps: where config.json does not say."""
        super().__init__(config=config, prefix=prefix)
        hf, size, self.input_norm = config.hf, config.hf.hidden_size, norm
        bias = bool(hf.get("conv_bias"))
        own = Share.split(size, "hidden_size", config)
        shards = shards_of(f"{prefix}.in_proj", [own] * 3, size)
        self.in_proj = NormedLinear(shards, norm=norm, post_norm=post_norm, bias=bias, config=config)
        self.make_convolution({"conv": [own]}, hf.get("conv_L_cache", taps), has_bias=bias)
        self.out_proj = RowParallelLinear(size, size, bias=bias, config=config, prefix=f"{prefix}.out_proj")
        self.keep(self.conv_state(), num_heads=own.count, num_groups=1, head_dim=1)

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        return self.out_proj(self.mix(product, product.shape[1] // 3, batch)), residual


class Lfm2ForCausalLM(HybridDecoder):
    norm_name = "model.embedding_norm"

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        norm = self.make_norm(config, f"{prefix}.operator_norm")
        if _has_attention(index, hf):
            head_dim, attention = head_dim_of(hf), f"{prefix}.self_attn"
            q_norm, k_norm = (
                RMSNorm(head_dim, eps=_eps(hf), config=config, prefix=f"{attention}.{one}_layernorm") for one in "qk"
            )
            mixer: nn.Module = Attention(
                norm, head_dim=head_dim, rope=get_rope(config, head_dim), q_norm=q_norm, k_norm=k_norm, output="out_proj",
                config=config, prefix=attention,
            )  # fmt: skip
        else:
            mixer = ShortConvMixer(norm, config=config, prefix=f"{prefix}.conv")
        return Parts(mixer, self.make_mlp(index, config, prefix))

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        return self.make_dense(_mlp_width(config.hf), config, prefix)

    def make_dense(self, width: int, config: BuildConfig, prefix: str) -> nn.Module:
        norm = self.make_norm(config, f"{prefix}.ffn_norm")
        return MLP(norm, width, names=("w1", "w3"), down="w2", config=config, prefix=f"{prefix}.feed_forward")

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(config.hf.hidden_size, eps=_eps(config.hf), config=config, prefix=prefix)

    def is_tied(self, hf: HFConfig) -> bool:
        return bool(hf.get("tie_embedding", hf.get("tie_word_embeddings", True)))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        if index < hf.get("num_dense_layers", 2):
            return self.make_dense(hf.intermediate_size, config, prefix)
        norm = self.make_norm(config, f"{prefix}.ffn_norm")
        routing = RoutingSpec(
            num_experts=hf.num_experts, top_k=hf.num_experts_per_tok, scoring="sigmoid",
            is_renormalized=bool(hf.get("norm_topk_prob", True)), scale=float(hf.get("routed_scaling_factor", 1.0)),
            has_correction=bool(hf.get("use_expert_bias", True)),
        )  # fmt: skip
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, routing=routing, activation="silu", norm=norm, names=_NAMES,
            config=config, prefix=f"{prefix}.feed_forward",
        )  # fmt: skip


def _has_attention(index: int, hf: HFConfig) -> bool:
    kind = layer_kind(index, hf, "conv")
    return (
        kind == "full_attention" if kind is not None else index in hf.get("full_attn_idxs", range(hf.num_hidden_layers))
    )


def _eps(hf: HFConfig) -> float:
    return float(hf.get("norm_eps", 1e-5))


def _mlp_width(hf: HFConfig) -> int:
    """Return the width of the dense MLP: two thirds of what config.json says, times a factor, up to a multiple of some number."""
    width = int(hf.get("block_ff_dim", hf.get("intermediate_size", 12288)))
    if not hf.get("block_auto_adjust_ff_dim", True):
        return width
    multiple = int(hf.get("block_multiple_of", 256))
    width = int(hf.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple
