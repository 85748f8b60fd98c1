"""The one decoder layer of an EAGLE head, which reads its input as it is: what is normed before it differs between the versions.

T = tokens, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import get_rope

if TYPE_CHECKING:
    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig


class EagleLayer(nn.Module):
    """Attention over its own keys and values, and an MLP: Llama's, whatever the model is."""

    def __init__(self, input_size: int, names: Collection[str], *, config: BuildConfig, prefix: str) -> None:
        """input_size: of what attention reads; names: the checkpoint's, which say where there is a bias."""
        super().__init__()
        self._parallel = config.parallel
        hf, attention = config.hf, f"{prefix}.self_attn"
        hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim = hf.get("head_dim", hidden_size // num_heads)
        self.qkv_proj = QKVLinear(
            input_size, num_heads, hf.get("num_key_value_heads", num_heads), head_dim, norm=None,
            bias=f"{attention}.q_proj.bias" in names, config=config, prefix=attention,
        )  # fmt: skip
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=get_rope(config, head_dim), config=config,
            prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=f"{attention}.o_proj.bias" in names,
            config=config,
            prefix=f"{attention}.o_proj",
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, config=config, prefix=f"{prefix}.post_attention_layernorm")
        self.gate_up_proj = MergedGateUp(
            hidden_size,
            hf.intermediate_size,
            activation=hf.get("hidden_act", "silu"),
            norm=self.post_attention_layernorm,
            config=config,
            prefix=f"{prefix}.mlp",
        )
        self.down_proj = RowParallelLinear(
            hf.intermediate_size, hidden_size, config=config, prefix=f"{prefix}.mlp.down_proj"
        )

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, input_size], residual [T, H], which may be overwritten -> [T, H]"""
        qkv, _ = self.qkv_proj(x, None)
        activated, residual = self.gate_up_proj(self.o_proj(self.attn(qkv, batch)), residual)
        hidden: Tensor = self._parallel.all_reduce(self.down_proj(activated))
        return hidden + residual
