"""A layer of Mamba, the first: steps and what is read of a state come of each token by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from pelton.layers.linear import RowParallelLinear, ShardLinear
from pelton.layers.norm import RMSNorm
from pelton_plugins.models.normed import NormedLinear
from pelton_plugins.models.shares import Share, row_shard, shards_of
from pelton_plugins.models.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig


class MambaMixer(StateLayer):
    """Product, convolution, scan, gate, product: T tokens, E = inner numbers of each, of this rank, N of a state.

    Ranks add up what steps, B and C are made of. `ScanParams` in `pelton_backends.sdpa.selective_scan` is all that a backend reads here.
    """

    attention_type: ClassVar[str] = "selective_scan"

    def __init__(
        self,
        norm: RMSNorm,
        *,
        inner: int,
        state_size: int,
        rank: int,
        conv_kernel: int,
        has_conv_bias: bool,
        has_bias: bool,
        config: BuildConfig,
        prefix: str,
    ) -> None:
        """norm: of the sub-layer's input, which the first product reads. rank: numbers of which a token's steps are made."""
        super().__init__(config=config, prefix=prefix)
        size, self.input_norm = config.hf.hidden_size, norm
        own = Share.split(inner, f"the inner size of {prefix}", config)
        self.inner, self.sizes = own.count, [rank, state_size, state_size]
        shards = shards_of(f"{prefix}.in_proj", [own, own], size)
        self.in_proj = NormedLinear(shards, norm=norm, bias=has_bias, config=config)
        self.make_convolution({"conv1d": [own]}, conv_kernel, has_bias=has_conv_bias)
        self.x_proj = RowParallelLinear(inner, sum(self.sizes), config=config, prefix=f"{prefix}.x_proj")
        self.all_reduce = config.all_reduce(sum(self.sizes))
        self.dt_proj = ShardLinear(row_shard(f"{prefix}.dt_proj", own, rank), bias=True, config=config)
        self.make_norms(config, prefix)
        self.a_log = self.parameter("A_log", own, state_size, dtype=torch.float32)
        self.d = self.parameter("D", own, dtype=torch.float32)
        self.out_proj = RowParallelLinear(inner, size, bias=has_bias, config=config, prefix=f"{prefix}.out_proj")
        self.keep(
            self.conv_state(), ((own.count, state_size), "float32"), num_heads=own.count, num_groups=1, head_dim=1
        )

    def make_norms(self, config: BuildConfig, prefix: str) -> None:
        """Make what `normed` reads."""

    def normed(self, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dt, b, c

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E], convolved -> steps [T, E], B and C [T, N], all float32."""
        found = self.x_proj(x)
        if self.all_reduce is not None:
            found = self.all_reduce(found)
        dt, b, c = self.normed(*found.split(self.sizes, dim=-1))
        return F.softplus(self.dt_proj(dt.contiguous()).float()), b.float(), c.float()

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        product, residual = self.in_proj(hidden, residual)
        mixed = self.mix(product, self.inner, batch)
        return self.out_proj(mixed * F.silu(product[:, self.inner :])), residual


def rank_of(given: int | str, hidden_size: int) -> int:
    """ "auto" is a sixteenth of the hidden size."""
    return math.ceil(hidden_size / 16) if given == "auto" else int(given)
