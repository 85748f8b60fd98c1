"""A layer with the gated delta rule: linear attention whose state forgets, and replaces what it knows of a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from pelton.layers.linear import RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, shards_by_group, shards_of
from pelton_plugins.models.state_layer import StateLayer, check_groups

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig
    from pelton.quantization.interface import LinearShard


class GatedDeltaNet(StateLayer):
    """Product, convolution, delta rule, norm of each head and its gate, product: T tokens, E = num_heads * head_dim, of this rank.

    `DeltaParams` in `pelton_backends.sdpa.delta_rule` is all that a backend reads here.
    """

    attention_type: ClassVar[str] = "delta_rule"
    output_name: ClassVar[str] = "out_proj"

    def __init__(self, norm: RMSNorm, *, config: BuildConfig, prefix: str, max_beta: float = 1.0) -> None:
        """norm: of the sub-layer's input, which the first product reads."""
        super().__init__(config=config, prefix=prefix)
        hf, self.input_norm, self.max_beta = config.hf, norm, max_beta
        num_heads, num_groups = hf.linear_num_value_heads, hf.linear_num_key_heads
        check_groups(num_heads, num_groups)
        heads = Share.split(num_heads, "linear_num_value_heads", config)
        groups = Share.copied(num_groups, "linear_num_key_heads", config)
        self.num_heads, self.head_dim = heads.count, hf.linear_value_head_dim
        self.num_groups, self.state_size = groups.count, hf.linear_key_head_dim
        values, keys = heads.times(self.head_dim), groups.times(self.state_size)
        self.inner = values.count
        self.in_proj = NormedLinear(self.projections(prefix, heads, groups, hf.hidden_size), norm=norm, config=config)
        self.make_taps(keys, values, hf.linear_conv_kernel_dim)
        self.dt_bias = self.parameter("dt_bias", heads, dtype=torch.float32)
        self.a_log = self.parameter("A_log", heads, dtype=torch.float32)
        self.norm = self.make_norm(config, prefix)
        self.out_proj = RowParallelLinear(
            values.total, hf.hidden_size, config=config, prefix=f"{prefix}.{self.output_name}"
        )
        self.keep(
            self.conv_state(), ((self.num_heads, self.state_size, self.head_dim), "float32"), num_heads=self.num_heads,
            num_groups=self.num_groups, head_dim=self.head_dim,
        )  # fmt: skip

    def projections(self, prefix: str, heads: Share, groups: Share, hidden_size: int) -> Sequence[LinearShard]:
        """q, k and v, then rows that make b, those that make a, and the gate."""
        keys, values = groups.times(self.state_size), heads.times(self.head_dim)
        parts = {"qkv": [keys, keys, values], "b": [heads], "a": [heads], "z": [values]}
        return [
            shard for name, rows in parts.items() for shard in shards_of(f"{prefix}.in_proj_{name}", rows, hidden_size)
        ]

    def make_taps(self, keys: Share, values: Share, taps: int) -> None:
        self.make_convolution({"conv1d": [keys, keys, values]}, taps)

    def make_norm(self, config: BuildConfig, prefix: str) -> RMSNorm:
        return RMSNorm(self.head_dim, config=config, prefix=f"{prefix}.norm")

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        mixed = self.mix(product, self.inner, batch).unflatten(-1, (-1, self.head_dim))
        gate = product[:, -self.inner :].unflatten(-1, (-1, self.head_dim))
        gated = self.norm(mixed) * F.silu(gate.float())
        return self.out_proj(gated.to(mixed.dtype).flatten(1)), residual


class GroupedDeltaNet(GatedDeltaNet):
    """The same in a checkpoint that has two matrices, in which the rows of each head of keys follow each other (Qwen3-Next)."""

    def projections(self, prefix: str, heads: Share, groups: Share, hidden_size: int) -> Sequence[LinearShard]:
        keys, total = Share.whole(self.state_size), heads.total // groups.total
        # Where ranks have copies of a group, each has some of its heads.
        first = heads.start % total
        own = Share(total, first, first + heads.count // groups.count)
        values = own.times(self.head_dim)
        q, k, v, gate = shards_by_group(f"{prefix}.in_proj_qkvz", groups, [keys, keys, values, values], hidden_size)
        b, a = shards_by_group(f"{prefix}.in_proj_ba", groups, [own, own], hidden_size)
        return [*q, *k, *v, *b, *a, *gate]
