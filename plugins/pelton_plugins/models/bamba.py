"""Bamba: most layers are Mamba-2's, some have attention with half of each head turned; a gated MLP follows each."""

from __future__ import annotations

from torch import nn

from pelton.errors import ConfigError
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.hybrid import MLP, Attention, HybridDecoder, Parts, head_dim_of, layer_kind
from pelton_plugins.models.state_space import Mamba2Mixer, dt_limit


class BambaForCausalLM(HybridDecoder):
    norm_name = "model.final_layernorm"

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        norm = self.make_norm(config, f"{prefix}.input_layernorm")
        if has_attention(index, hf):
            head_dim = head_dim_of(hf)
            mixer: nn.Module = Attention(
                norm, head_dim=head_dim, rope=get_rope(config, head_dim), bias=bool(hf.get("attention_bias")), config=config,
                prefix=f"{prefix}.self_attn",
            )  # fmt: skip
        else:
            mixer = bamba_mixer(norm, config, f"{prefix}.mamba")
        mlp = MLP(
            self.make_norm(config, f"{prefix}.pre_ff_layernorm"), hf.intermediate_size, bias=bool(hf.get("mlp_bias")),
            config=config, prefix=f"{prefix}.feed_forward",
        )  # fmt: skip
        return Parts(mixer, mlp)


def bamba_mixer(norm: RMSNorm, config: BuildConfig, prefix: str) -> Mamba2Mixer:
    """A layer of Mamba-2 by the names that Bamba has for its fields."""
    hf = config.hf
    return Mamba2Mixer(
        num_heads=hf.mamba_n_heads, head_dim=mixer_head_dim(config, int(hf.mamba_expand * hf.hidden_size)),
        state_size=hf.mamba_d_state, num_groups=hf.mamba_n_groups, conv_kernel=hf.mamba_d_conv, norm=norm,
        has_conv_bias=bool(hf.get("mamba_conv_bias", True)), has_bias=bool(hf.get("mamba_proj_bias")),
        dt_limit=dt_limit(config), config=config, prefix=prefix,
    )  # fmt: skip


def mixer_head_dim(config: BuildConfig, inner: int) -> int:
    """inner: numbers of all heads."""
    hf = config.hf
    found = hf.get("mamba_d_head", "auto")
    size = inner // hf.mamba_n_heads if found == "auto" else int(found)
    if size * hf.mamba_n_heads != inner:
        raise ConfigError(
            f"mamba_n_heads is {hf.mamba_n_heads} and mamba_d_head {found}, which do not make {inner} numbers (mamba_expand times "
            "hidden_size, or mamba_d_ssm). Fix config.json."
        )
    return size


def has_attention(index: int, hf: HFConfig) -> bool:
    """From `layer_types`, or from the older list of layers."""
    kind = layer_kind(index, hf)
    return kind == "full_attention" if kind is not None else index in (hf.get("attn_layer_indices") or ())
