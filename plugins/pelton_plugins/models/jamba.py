"""Jamba: most layers are Mamba's, some have attention without a rope; a gated MLP or experts behind each."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig, HFConfig
from pelton.model.loading import LazyWeight
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.hybrid import MLP, Attention, HybridDecoder, Parts, head_dim_of
from pelton_plugins.models.selective import MambaMixer, rank_of
from pelton_plugins.models.stacked_experts import one_for_each_expert

_NAMES = ExpertNames(router="router")


class JambaMixer(MambaMixer):
    """Norms before steps are made, and of what is written and read."""

    def make_norms(self, config: BuildConfig, prefix: str) -> None:
        self.norms = nn.ModuleList(
            RMSNorm(size, config=config, prefix=f"{prefix}.{name}_layernorm")
            for name, size in zip(("dt", "b", "c"), self.sizes, strict=True)
        )

    def normed(self, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt, b, c = (norm(x) for norm, x in zip(self.norms, (dt, b, c), strict=True))
        return dt, b, c


class JambaForCausalLM(HybridDecoder):
    norm_name = "model.final_layernorm"

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if _is_every(index, hf, "attn_layer", 8, 4):
            mixer: nn.Module = Attention(
                norm, head_dim=head_dim_of(hf), rope=None, config=config, prefix=f"{prefix}.self_attn"
            )
        else:
            mixer = JambaMixer(
                norm, inner=hf.mamba_expand * hf.hidden_size, state_size=hf.mamba_d_state, conv_kernel=hf.mamba_d_conv,
                rank=rank_of(hf.get("mamba_dt_rank", "auto"), hf.hidden_size),
                has_conv_bias=bool(hf.get("mamba_conv_bias", True)), has_bias=bool(hf.get("mamba_proj_bias")),
                config=config, prefix=f"{prefix}.mamba",
            )  # fmt: skip
        return Parts(mixer, self.make_mlp(index, config, prefix))

    def make_mlp(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf, count, mlp = config.hf, config.hf.get("num_experts", 16), f"{prefix}.feed_forward"
        norm = self.make_norm(config, f"{prefix}.pre_ff_layernorm")
        if count == 1 or not _is_every(index, hf, "expert_layer", 2, 1):
            return MLP(norm, hf.intermediate_size, config=config, prefix=mlp)
        routing = RoutingSpec(num_experts=count, top_k=hf.get("num_experts_per_tok", 2), is_renormalized=False)
        return SparseMoe(
            hf.hidden_size, hf.intermediate_size, routing=routing, activation=hf.get("hidden_act", "silu"), norm=norm,
            config=config, prefix=mlp, names=_NAMES,
        )  # fmt: skip

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return super().load_weights(one_for_each_expert(weights, self.weights.expected()))


def _is_every(index: int, hf: HFConfig, what: str, period: int, offset: int) -> bool:
    return index % int(hf.get(f"{what}_period", period)) == int(hf.get(f"{what}_offset", offset))
