"""Matrices below each other that read one norm: for sub-layers whose first product is not keys, values and queries alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pelton.layers.linear import LinearModule, split_heads
from pelton.layers.norm import RMSNorm
from pelton.lora.layers import BaseProduct
from pelton.ops.interface import AddNormLinear, AddNormLinearNeeds, AddNormLinearTensors
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig


class NormedLinear(LinearModule):
    """This rank's rows of some matrices, below each other, and the norm before them (`add_norm_linear`)."""

    def __init__(
        self,
        shards: Sequence[LinearShard],
        *,
        norm: RMSNorm,
        config: BuildConfig,
        bias: bool = False,
        is_summed: bool = False,
        post_norm: RMSNorm | None = None,
    ) -> None:
        """shards: of whole columns. is_summed: every rank has the whole sum of what it is called with. post_norm: of the sub-layer before,
        where it has one."""
        weights = config.create_weights(shards, bias=bias)
        super().__init__(weights)
        self.sizes = [shard.rows[1] - shard.rows[0] for shard in shards]
        needs = AddNormLinearNeeds(
            dtype=config.dtype_name, norm=norm.spec, linear=weights.spec,
            tp_size=1 if is_summed else config.parallel.size, post_norm=post_norm.spec if post_norm else None,
        )  # fmt: skip
        all_reduce = None if is_summed else config.all_reduce(shards[0].num_cols)
        tensors = AddNormLinearTensors(norm.weight, weights, post_norm.weight if post_norm else None, all_reduce)
        self.add_norm_linear: AddNormLinear = config.ops.bind("add_norm_linear", needs, tensors)
        self.adapter = config.adapter_layer(shards, norm=norm, base=BaseProduct("add_norm_linear", needs, tensors))

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (products [T, rows of all], residual [T, H]); `sizes` has the rows of each."""
        return self._with_adapters(self.add_norm_linear)(hidden, residual)


class BareLinear(LinearModule):
    """The same without the norm: the product of what another layer has normed already (`linear`)."""

    def __init__(self, shards: Sequence[LinearShard], *, config: BuildConfig, bias: bool = False) -> None:
        weights = config.create_weights(shards, bias=bias)
        super().__init__(weights)
        self.sizes = [shard.rows[1] - shard.rows[0] for shard in shards]
        self._bind_bare(config, shards, weights)

    def forward(self, x: Tensor) -> Tensor:
        return self._bare_product(x)


def head_shard(name: str, num_heads: int, head_rows: int, num_cols: int, config: BuildConfig) -> LinearShard:
    """This rank's heads of a matrix whose rows are `num_heads` heads'."""
    first, last = split_heads(num_heads, config.parallel.rank, config.parallel.size, "num_attention_heads")
    return LinearShard(name, num_heads * head_rows, num_cols, (first * head_rows, last * head_rows), (0, num_cols))


def whole_shard(name: str, num_rows: int, num_cols: int) -> LinearShard:
    """A matrix that every rank has all of."""
    return LinearShard(name, num_rows, num_cols, (0, num_rows), (0, num_cols))
