"""RecurrentGemma: of three layers two have real-gated linear recurrent units, and one has attention in a window; a gated MLP behind each.
De et al., Griffin (arXiv:2402.19427)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from pelton.errors import ConfigError
from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.reference import ACTIVATIONS
from pelton_plugins.models.hybrid import MLP, Attention, HybridDecoder, Parts, head_dim_of
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, row_shard
from pelton_plugins.models.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch

_DECAY = -8.0
"""What the logarithm of a decay is at most, in units of softplus of the layer's parameter."""
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


class RecurrentBlock(StateLayer):
    """Two products, of one convolution and recurrence, of the other an activation; the product of both, and the last matrix. Ranks share
    out heads: gates are made of a head's numbers alone. T tokens, E numbers of this rank, H heads of W numbers each.

    `RgLruParams` in `pelton_backends.sdpa.rg_lru` is all that a backend reads here.
    """

    attention_type: ClassVar[str] = "rg_lru"

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(config=config, prefix=prefix)
        hf, size, self.input_norm = config.hf, config.hf.hidden_size, norm
        num_heads, total = hf.num_attention_heads, hf.get("lru_width") or size
        if total % num_heads:
            raise ConfigError(
                f"lru_width is {total}, which num_attention_heads {num_heads} does not divide. Fix config.json."
            )
        heads, width = Share.split(num_heads, "num_attention_heads", config), total // num_heads
        own = heads.times(width)
        self.inner, self.width = own.count, width
        shards = [row_shard(f"{prefix}.linear_{name}", own, size) for name in "xy"]
        self.in_proj = NormedLinear(shards, norm=norm, bias=True, config=config)
        self.make_convolution({"conv_1d": [own]}, hf.get("conv1d_width", 4), has_bias=True)
        self.rates = self.parameter("rg_lru.recurrent_param", own, dtype=torch.float32)
        self.input_gate, self.decay_gate = (
            self.parameter(f"rg_lru.{name}_gate_weight", heads, width, width) for name in ("input", "recurrent")
        )
        self.input_bias, self.decay_bias = (
            self.parameter(f"rg_lru.{name}_gate_bias", heads, width) for name in ("input", "recurrent")
        )
        self.activation = ACTIVATIONS[_activation(hf)]
        self.out_proj = RowParallelLinear(total, size, bias=True, config=config, prefix=f"{prefix}.linear_out")
        self.keep(self.conv_state(), ((own.count,), "float32"), num_heads=own.count, num_groups=1, head_dim=1)

    def gated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E], convolved -> the logarithm of the decay, and the gated input, both [T, E] float32."""
        of_heads = x.unflatten(1, (-1, self.width)).transpose(0, 1)  # [H, T, W]
        gate, decay = (
            torch.sigmoid(torch.baddbmm(bias[:, None], of_heads, weight).float()).transpose(0, 1).flatten(1)
            for weight, bias in ((self.input_gate, self.input_bias), (self.decay_gate, self.decay_bias))
        )
        return _DECAY * decay * F.softplus(self.rates), gate * x.float()

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        mixed = self.mix(product, self.inner, batch)
        return self.out_proj(mixed * self.activation(product[:, self.inner :])), residual


class RecurrentGemmaForCausalLM(HybridDecoder):
    norm_name = "model.final_norm"

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf, block = config.hf, f"{prefix}.temporal_block"
        norm = self.make_norm(config, f"{prefix}.temporal_pre_norm")
        if _has_attention(index, hf):
            head_dim = head_dim_of(hf)
            mixer: nn.Module = Attention(
                norm, head_dim=head_dim, rope=get_rope(config, head_dim), sliding_window=hf.attention_window_size,
                bias=bool(hf.get("attention_bias")), output_bias=True, config=config, prefix=block,
            )  # fmt: skip
        else:
            mixer = RecurrentBlock(norm, config=config, prefix=block)
        mlp = MLP(
            self.make_norm(config, f"{prefix}.channel_pre_norm"), hf.intermediate_size // 2, bias=True,
            activation=hf.get("hidden_activation", "gelu_pytorch_tanh"), config=config, prefix=f"{prefix}.mlp_block",
        )  # fmt: skip
        return Parts(mixer, mlp)

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(config.hf.hidden_size, unit_offset=True, config=config, prefix=prefix)

    def is_tied(self, hf: HFConfig) -> bool:
        return bool(hf.get("tie_word_embeddings", True))

    def embedding_scale(self, hf: HFConfig) -> float:
        """Rounded to bfloat16, in whichever dtype the model is."""
        return float(torch.tensor(hf.hidden_size**0.5, dtype=torch.bfloat16))

    def soft_cap(self, hf: HFConfig) -> float | None:
        return float(hf.get("logits_soft_cap", 30.0))


def _has_attention(index: int, hf: HFConfig) -> bool:
    """From `block_types`, which are repeated."""
    kinds = hf.get("block_types") or ("recurrent", "recurrent", "attention")
    kind = kinds[index % len(kinds)]
    if kind not in ("recurrent", "attention"):
        raise ConfigError(
            f"Layer {index} is {kind!r} in block_types; this model has recurrent, attention. Fix config.json."
        )
    return bool(kind == "attention")


def _activation(hf: HFConfig) -> str:
    name = hf.get("hidden_activation", "gelu_pytorch_tanh")
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_activation is {name!r}; this model has {', '.join(_ACTIVATIONS)}. Use another checkpoint."
        )
    return _ACTIVATIONS[name]
