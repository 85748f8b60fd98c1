"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without a rope, an MLP without a gate, or experts without one."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from pelton.errors import ConfigError
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.hybrid import Attention
from pelton_plugins.models.mamba2 import BackboneDecoder, eps_of
from pelton_plugins.models.moe import grouped_routing
from pelton_plugins.models.state_space import Mamba2Mixer
from pelton_plugins.models.ungated import UngatedMLP, UngatedMoe

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Of `hybrid_override_pattern`, as released checkpoints have it."""
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""transformers' newer names of layers."""


class NemotronHForCausalLM(BackboneDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        config.weights.ignore(rf"({re.escape(prefix)})?mtp\..*")  # it predicts further tokens, and nobody reads it

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        kind = layer_kinds(config.hf)[index]
        if kind not in _MIXERS:
            raise ConfigError(f"Layer {index} is {kind!r} in config.json; this model has {', '.join(_MIXERS)}. Fix it.")
        activation = config.hf.get("mlp_hidden_act", "relu2")
        if activation != "relu2":
            raise ConfigError(f"mlp_hidden_act is {activation!r}; this model has relu2. Use another checkpoint.")
        return _MIXERS[kind](self.make_norm(config, f"{prefix}.norm"), config, f"{prefix}.mixer")

    def num_layers(self, hf: HFConfig) -> int:
        return len(layer_kinds(hf))


def layer_kinds(hf: HFConfig) -> list[str]:
    """From the list of layers, or from the pattern of letters."""
    kinds = hf.get("layers_block_type", hf.get("layer_types"))
    if kinds is None:
        kinds = [_LETTERS.get(letter, letter) for letter in hf.hybrid_override_pattern]
    return [_NAMES.get(kind, kind) for kind in kinds]


def _mamba(norm: RMSNorm, config: BuildConfig, prefix: str) -> nn.Module:
    hf = config.hf
    return Mamba2Mixer(
        num_heads=hf.mamba_num_heads, head_dim=hf.mamba_head_dim, state_size=hf.ssm_state_size, num_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel, norm=norm, has_conv_bias=bool(hf.get("use_conv_bias", True)),
        has_bias=bool(hf.get("use_bias")), dt_limit=(float(hf.get("time_step_min", 0.001)), float("inf")), eps=eps_of(config),
        fields=("mamba_num_heads", "n_groups"), config=config, prefix=prefix,
    )  # fmt: skip


def _attention(norm: RMSNorm, config: BuildConfig, prefix: str) -> nn.Module:
    head_dim = int(config.hf.get("head_dim", 128))
    return Attention(norm, head_dim=head_dim, rope=None, config=config, prefix=prefix)


def _mlp(norm: RMSNorm, config: BuildConfig, prefix: str) -> nn.Module:
    hf = config.hf
    return UngatedMLP(norm, hf.intermediate_size, bias=bool(hf.get("mlp_bias")), config=config, prefix=prefix)


def _moe(norm: RMSNorm, config: BuildConfig, prefix: str) -> nn.Module:
    hf = config.hf
    return UngatedMoe(
        norm, grouped_routing(hf), width=hf.moe_intermediate_size, shared_width=hf.moe_shared_expert_intermediate_size,
        latent_size=hf.get("moe_latent_size"), bias=bool(hf.get("mlp_bias")), config=config, prefix=prefix,
    )  # fmt: skip


_MIXERS: dict[str, Callable[[RMSNorm, BuildConfig, str], nn.Module]] = {
    "mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _moe,
}  # fmt: skip
