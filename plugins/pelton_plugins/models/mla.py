"""Matrices of multi-head latent attention that lead from latents up to heads, each rank with its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pelton.layers.linear import ShardLinear
from pelton.quantization.plain import PlainWeights, decoded_weights
from pelton_plugins.models.normed import head_shard

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig


class HeadsLinear(ShardLinear):
    """This rank's heads of a matrix whose rows are heads' (`linear`)."""

    def __init__(self, in_features: int, num_heads: int, head_rows: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(head_shard(prefix, num_heads, head_rows, in_features, config), config=config)


class LatentUp(nn.Module):
    """From a latent to this rank's heads' keys and values, in the model's dtype: it is multiplied with queries and with what
    attention gives, not with latents."""

    def __init__(self, latent_dim: int, num_heads: int, head_rows: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        shard = head_shard(prefix, num_heads, head_rows, latent_dim, config)
        if config.adapters is not None:
            config.adapters.refuse(prefix, "it is multiplied with queries, not with rows of a step")
        start, stop = shard.rows
        self.weight = nn.Parameter(config.empty(stop - start, latent_dim), requires_grad=False)
        (decoded_weights(config) or PlainWeights()).expect(config, shard, self.weight)
        self.by_head = self.weight.data.view(-1, head_rows, latent_dim)  # [heads, head_rows, latent_dim]
