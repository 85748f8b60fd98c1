"""Weights without quantization, and the bias that most methods keep as they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig


class PlainWeights:
    """No quantization: one matrix [out, in] of the model's dtype."""

    name = "plain"

    def create(
        self, config: BuildConfig, shards: Sequence[LinearShard], *, bias: bool, is_vocabulary: bool = False
    ) -> LinearWeights:
        num_cols = shards[0].cols[1] - shards[0].cols[0]
        num_rows = sum(shard.rows[1] - shard.rows[0] + shard.padding for shard in shards)
        weight = _parameter(config, num_rows, num_cols)
        row = 0
        for shard in shards:
            count = shard.rows[1] - shard.rows[0]
            self.expect(config, shard, weight[row : row + count])
            row += count
            weight.data[row : row + shard.padding] = 0
            row += shard.padding
        bias_vector = make_bias(config, shards) if bias else None
        spec = LinearSpec(in_features=num_cols, out_features=num_rows, has_bias=bias_vector is not None)
        return LinearWeights(spec, {"weight": weight}, bias_vector)

    def expect(self, config: BuildConfig, shard: LinearShard, target: Tensor) -> None:
        """Tell `config.weights` what fills `target` [rows, columns], this rank's part of the matrix in the model's dtype."""
        is_row_parallel = shard.cols[1] - shard.cols[0] < shard.num_cols
        dim, (start, stop) = (1, shard.cols) if is_row_parallel else (0, shard.rows)
        shape = (shard.num_rows, shard.num_cols)
        config.weights.expect(f"{shard.name}.weight", shape, target, dim=dim, start=start, stop=stop)


def decoded_weights(config: BuildConfig) -> PlainWeights | None:
    """Return what fills matrices that an op reads in the model's dtype; None where the quantization method cannot decode."""
    method = config.quantization
    return method if isinstance(method, PlainWeights) else getattr(method, "decoded", None)


def make_bias(config: BuildConfig, shards: Sequence[LinearShard]) -> nn.Parameter | None:
    """The shards' bias in the model's dtype; None where another rank holds it."""
    counts = [shard.rows[1] - shard.rows[0] for shard in shards]
    is_row_parallel = shards[0].cols[1] - shards[0].cols[0] < shards[0].num_cols
    vector = None if is_row_parallel and config.parallel.rank else _parameter(config, sum(counts))
    row = 0
    for shard, count in zip(shards, counts, strict=True):
        part = None if vector is None else vector[row : row + count]
        config.weights.expect(
            f"{shard.name}.bias", (shard.num_rows,), part, dim=0, start=shard.rows[0], stop=shard.rows[1]
        )
        row += count
    return vector


def _parameter(config: BuildConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(config.empty(*shape), requires_grad=False)
