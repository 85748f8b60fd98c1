"""Falcon-H1: in every layer Mamba-2 and attention side by side behind one norm, then a gated MLP; multipliers of nearly everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.bamba import mixer_head_dim
from pelton_plugins.models.hybrid import HybridDecoder, Parts, head_dim_of
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.parallel import AddedNorm
from pelton_plugins.models.shares import Share, row_shard
from pelton_plugins.models.state_space import Mamba2Mixer, dt_limit


class FalconH1Mixer(Mamba2Mixer):
    """Mamba-2 whose input, and each part of its first product, have multipliers; with a gated norm or with a gate alone."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        hf = config.hf
        inner = int(hf.get("mamba_d_ssm", hf.get("mamba_expand", 2) * hf.hidden_size))
        super().__init__(
            num_heads=hf.mamba_n_heads, head_dim=mixer_head_dim(config, inner), state_size=hf.mamba_d_state,
            num_groups=hf.mamba_n_groups, conv_kernel=hf.mamba_d_conv, norm=None,
            has_conv_bias=bool(hf.get("mamba_conv_bias", True)), has_bias=bool(hf.get("mamba_proj_bias")),
            has_output_bias=bool(hf.get("projectors_bias")), dt_limit=dt_limit(config),
            has_gated_norm=bool(hf.get("mamba_rms_norm")), config=config, prefix=prefix,
        )  # fmt: skip
        self.norms_first = bool(hf.get("mamba_norm_before_gate", True))
        self.input_multiplier = float(hf.get("ssm_in_multiplier", 1.0))
        sizes = torch.tensor([self.inner, self.inner, self.shared, self.shared, self.num_heads])
        multipliers = torch.tensor(hf.get("ssm_multipliers", [1.0] * 5), dtype=config.dtype)
        self.multipliers = multipliers.repeat_interleave(sizes).to(config.device)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:  # type: ignore[override]
        """[T, H], normed -> [T, H]"""
        return self.mixed(self.in_proj(x * self.input_multiplier) * self.multipliers, batch)

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if self.norm_weight is None or not self.norms_first:
            return super().gated(mixed, gate)
        normed = self.group_norm(mixed.float()) * self.norm_weight
        return (normed * F.silu(gate.float())).to(mixed.dtype)


class FalconH1Mixers(nn.Module):
    """The norm, and the two that read it."""

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, attention = config.hf, f"{prefix}.self_attn"
        size, num_heads, num_kv_heads = hf.hidden_size, hf.num_attention_heads, hf.num_key_value_heads
        head_dim, bias = head_dim_of(hf), bool(hf.get("attention_bias"))
        self.input_norm, self.add_norm = norm, AddedNorm(norm, config=config)
        self.mamba = FalconH1Mixer(config=config, prefix=f"{prefix}.mamba")
        self.qkv_proj = QKVLinear(
            size, num_heads, num_kv_heads, head_dim, norm=None, bias=bias, config=config, prefix=attention
        )
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            rope=get_rope(config, head_dim),
            config=config,
            prefix=f"{attention}.attn",
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, size, bias=bias, config=config, prefix=f"{attention}.o_proj"
        )
        first = self.qkv_proj.num_heads * head_dim
        self.keys = slice(first, first + self.qkv_proj.num_kv_heads * head_dim)
        names = ("key", "attention_in", "attention_out", "ssm_out")
        self.multipliers = {name: float(hf.get(f"{name}_multiplier", 1.0)) for name in names}

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.add_norm(hidden, residual)
        by = self.multipliers
        qkv, _ = self.qkv_proj(x * by["attention_in"], None)
        qkv[:, self.keys] *= by["key"]
        attended = self.o_proj(self.attn(qkv, batch)) * by["attention_out"]
        return self.mamba(x, batch) * by["ssm_out"] + attended, residual


class FalconH1MLP(nn.Module):
    """A gated MLP with multipliers of the gate and of what it gives."""

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf, self.input_norm = config.hf, norm
        width, bias = hf.intermediate_size, bool(hf.get("mlp_bias"))
        own = Share.split(width, "intermediate_size", config)
        parts = [row_shard(f"{prefix}.{name}_proj", own, hf.hidden_size) for name in ("gate", "up")]
        self.gate_up_proj = NormedLinear(parts, norm=norm, bias=bias, config=config)
        self.down_proj = RowParallelLinear(
            width, hf.hidden_size, bias=bias, config=config, prefix=f"{prefix}.down_proj"
        )
        self.multipliers = [float(one) for one in hf.get("mlp_multipliers", (1.0, 1.0))]

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.gate_up_proj(hidden, residual)
        gate, up = product.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate * self.multipliers[0]) * up) * self.multipliers[1], residual


class FalconH1ForCausalLM(HybridDecoder):
    norm_name = "model.final_layernorm"

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.logit_scale = float(config.hf.get("lm_head_multiplier", 1.0))

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        mixers = FalconH1Mixers(self.make_norm(config, f"{prefix}.input_layernorm"), config=config, prefix=prefix)
        norm = self.make_norm(config, f"{prefix}.pre_ff_layernorm")
        return Parts(mixers, FalconH1MLP(norm, config=config, prefix=f"{prefix}.feed_forward"))

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        return super().compute_logits(hidden, rows) * self.logit_scale

    def embedding_scale(self, hf: HFConfig) -> float | None:
        return float(hf.get("embedding_multiplier", 1.0))
