"""Mamba-2: a norm and a layer with a state, and nothing else; no attention anywhere."""

from __future__ import annotations

from torch import nn

from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton_plugins.models.hybrid import HybridDecoder
from pelton_plugins.models.state_space import Mamba2Mixer, dt_limit


class BackboneDecoder(HybridDecoder):
    """The names that Mamba's checkpoints have."""

    embedding_name = "backbone.embeddings"
    layers_name = "backbone.layers"
    norm_name = "backbone.norm_f"

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(config.hf.hidden_size, eps=eps_of(config), config=config, prefix=prefix)


class Mamba2ForCausalLM(BackboneDecoder):
    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        return Mamba2Mixer(
            num_heads=hf.num_heads, head_dim=hf.head_dim, state_size=hf.state_size, num_groups=hf.n_groups,
            conv_kernel=hf.conv_kernel, norm=self.make_norm(config, f"{prefix}.norm"),
            has_conv_bias=bool(hf.get("use_conv_bias", True)), has_bias=bool(hf.get("use_bias")),
            dt_limit=dt_limit(config), eps=eps_of(config), fields=("num_heads", "n_groups"), config=config, prefix=f"{prefix}.mixer",
        )  # fmt: skip


def eps_of(config: BuildConfig) -> float:
    return float(config.hf.get("layer_norm_epsilon", 1e-5))
