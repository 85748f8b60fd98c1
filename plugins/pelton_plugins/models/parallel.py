"""Blocks whose attention and MLP read the same normed input, side by side."""

from __future__ import annotations

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.linear import MergedGateUp, QKVLinear, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope
from pelton.model.build import BuildConfig
from pelton.ops.interface import AddNorm, AddNormNeeds, AddNormTensors


class AddedNorm(nn.Module):
    """The end of the block below, and a norm whose output several matrices read (`add_norm`)."""

    def __init__(self, norm: RMSNorm, *, config: BuildConfig) -> None:
        super().__init__()
        needs = AddNormNeeds(dtype=config.dtype_name, norm=norm.spec, tp_size=config.parallel.size)
        tensors = AddNormTensors(norm.weight, None, config.all_reduce(norm.spec.size))
        self._add_norm: AddNorm = config.ops.bind("add_norm", needs, tensors)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (the normed sum, the sum), each [T, H]"""
        return self._add_norm(hidden, residual)


class ParallelDecoderLayer(nn.Module):
    """A subclass makes the norm and says what rope and window a layer has."""

    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads = hf.hidden_size, hf.num_attention_heads
        head_dim = hf.get("head_dim", hidden_size // num_heads)
        attention, mlp, bias = f"{prefix}.self_attn", f"{prefix}.mlp", bool(hf.get("attention_bias"))
        self.input_layernorm = self.make_norm(config, f"{prefix}.input_layernorm")
        self.add_norm = AddedNorm(self.input_layernorm, config=config)
        self.qkv_proj = QKVLinear(
            hidden_size, num_heads, hf.get("num_key_value_heads", num_heads), head_dim,
            norm=None, bias=bias, config=config, prefix=attention,
        )  # fmt: skip
        self.attn = AttentionLayer(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, head_dim, rope=self.rope(index, head_dim, config),
            sliding_window=self.sliding_window(index, config), config=config, prefix=f"{attention}.attn",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            num_heads * head_dim, hidden_size, bias=bias, config=config, prefix=f"{attention}.o_proj"
        )
        self.gate_up_proj = MergedGateUp(
            hidden_size,
            hf.intermediate_size,
            activation=hf.get("hidden_act", "silu"),
            norm=None,
            config=config,
            prefix=mlp,
        )
        self.down_proj = RowParallelLinear(hf.intermediate_size, hidden_size, config=config, prefix=f"{mlp}.down_proj")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        x, residual = self.add_norm(hidden, residual)
        attended = self.o_proj(self.attn(self.heads(self.qkv_proj(x, None)[0]), batch))
        return attended + self.down_proj(self.gate_up_proj(x, None)[0]), residual

    def heads(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and values in the order that rope wants."""
        return qkv

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        raise NotImplementedError

    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope | None:
        raise NotImplementedError

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        return None
