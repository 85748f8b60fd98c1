"""Multi-head latent attention: one latent a token in the cache, from which every head's key and value follow.

DeepSeek-AI, DeepSeek-V2 (arXiv:2405.04434), section 2.1. With u_h the rows of `kv_b_proj` that make head h's key from a latent c,
q . (u_h c) = (u_h^T q) . c: the query is brought to the latents' space once a step instead of each latent to the heads'. So
attention is that of many query heads over one key head of `latent_dim + rope_dim` numbers, whose first `latent_dim` are the
value, and what comes out is brought to the heads' values afterwards.

T tokens, H heads of this rank, N `nope_dim`, V `value_dim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.attention.parts import bind_layer, spread_needs
from pelton.kv_cache.spec import KVCacheSpec, MLASpec
from pelton.layers.rope import Rope
from pelton.ops.reference import rotate, write_rows

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig


class MLALayer(nn.Module):
    """A `CacheLayer` whose cache holds latents. Registers itself in `config.cache_layers` under `prefix`.

    Its backend's attention takes the absorbed query [T, H, latent_dim + rope_dim] and fills [T, H, latent_dim].
    """

    cache: Tensor  # [num_blocks, block_size, latent_dim + rope_dim], a view of the pool
    backend: AttentionBackend
    attend: BoundAttention

    def __init__(
        self,
        up: Tensor,
        *,
        latent_dim: int,
        rope_dim: int,
        nope_dim: int,
        value_dim: int,
        kv_norm: nn.Module | None,
        rope: Rope | None,
        scale: float,
        config: BuildConfig,
        prefix: str,
        is_interleaved: bool = True,
        chosen: Tensor | None = None,
        shares: str | None = None,
        sinks: Tensor | None = None,
        key_norm: nn.Module | None = None,
    ) -> None:
        """up [H, N + V, latent_dim]: from a latent to each head's key, then its value. kv_norm: of the latent, before it is kept.
        rope: None where no part of a key turns, and rope_dim is 0. is_interleaved: rope turns pairs (2i, 2i + 1), not
        (i, i + rope_dim / 2). chosen [tokens of a step, K] int32: the tokens of its row that each token attends to, where these are
        not all before it; an indexer fills it before the layer is called. shares: the layer whose latents it reads, by its prefix;
        then it has no kv_norm, and is given no latents. sinks [H]: a score of each head that takes a share of the weight and gives
        nothing. key_norm: of the part of the key that turns, before it does."""
        super().__init__()
        self.layer_name = prefix
        self.shares = shares
        self.num_heads = up.shape[0]
        self.latent_dim, self.rope_dim, self.nope_dim, self.value_dim = latent_dim, rope_dim, nope_dim, value_dim
        self.head_dim = latent_dim + rope_dim
        self.scale, self.is_interleaved = scale, is_interleaved
        self.metadata_index = self.group_id = -1
        self.block_size = config.block_size
        self.kv_dtype = config.dtype_name if config.kv_dtype == "auto" else config.kv_dtype
        self.up, self.kv_norm, self.rope, self.chosen, self.sinks = up, kv_norm, rope, chosen, sinks
        self.key_norm = key_norm
        self.needs = AttentionNeeds(
            head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=1, block_size=config.block_size,
            dtype=config.dtype_name, kv_dtype=config.kv_dtype, is_mla=True, latent_dim=latent_dim,
            is_sparse=chosen is not None, has_sinks=sinks is not None,
        )  # fmt: skip
        self.parallel = config.parallel
        self.needs = spread_needs(self.needs, prefix, config.parallel)
        self.selection = config.attention.select(self.needs)
        register(self, config)

    def cache_spec(self) -> KVCacheSpec:
        """A latent of every token, with the rotated part of its key."""
        num_ranks = self.needs.decode_context_parallel
        return MLASpec(
            block_size=self.block_size * num_ranks, num_ranks=num_ranks, latent_dim=self.head_dim, dtype=self.kv_dtype
        )

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        (self.cache,) = views
        self.metadata_index, self.group_id, self.backend = metadata_index, backend.group_id, backend
        self.attend = bind_layer(self, backend, self.parallel)

    def forward(self, query: Tensor, latents: Tensor | None, batch: ForwardBatch) -> Tensor:
        """query [T, H (N + rope_dim)], latents [T, latent_dim + rope_dim], None where they are another layer's -> [T, H V]"""
        num_tokens = query.shape[0]
        keys, values = self.up[:, : self.nope_dim], self.up[:, self.nope_dim :]
        cos_sin = None if self.rope is None else self.rope.cos_sin[batch.positions][:, None, :].chunk(2, dim=-1)
        absorbed = self._absorbed(query, keys, cos_sin)
        if latents is not None and batch.attention:
            write_rows(self._kept(latents, cos_sin), self.cache, batch.slot_mappings[self.group_id])
        output = torch.empty(num_tokens, self.num_heads, self.latent_dim, dtype=query.dtype, device=query.device)
        if not batch.attention:  # the pass that measures memory, before there is a cache: these are most of it
            output.zero_()
        elif batch.cut is None:
            self.attend(absorbed, batch.attention[self.metadata_index], output)
        else:
            batch.cut(self, absorbed, output)
        attended = torch.bmm(output.transpose(0, 1), values.transpose(1, 2))  # [H, T, V]
        return attended.transpose(0, 1).reshape(num_tokens, -1)

    def _absorbed(self, query: Tensor, keys: Tensor, cos_sin: Sequence[Tensor] | None) -> Tensor:
        """The query in the latents' space [T, H, latent_dim + rope_dim]."""
        heads = query.view(query.shape[0], self.num_heads, -1)
        plain, turned = heads[..., : self.nope_dim], heads[..., self.nope_dim :]
        absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)  # [T, H, latent_dim]
        if cos_sin is None:
            return absorbed.contiguous()
        return torch.cat([absorbed, rotate(self._halves(turned), *cos_sin)], dim=-1)

    def _kept(self, latents: Tensor, cos_sin: Sequence[Tensor] | None) -> Tensor:
        """A row of the cache for each token [T, latent_dim + rope_dim]."""
        assert self.kv_norm is not None, "a layer that is given latents norms them"
        normed: Tensor = self.kv_norm(latents[:, : self.latent_dim])
        if cos_sin is None:
            return normed
        key = latents[:, self.latent_dim :]
        if self.key_norm is not None:
            key = self.key_norm(key)
        turned = rotate(self._halves(key[:, None]), *cos_sin)[:, 0]
        return torch.cat([normed, turned], dim=-1)

    def _halves(self, x: Tensor) -> Tensor:
        """Pairs (2i, 2i + 1) brought to (i, i + rope_dim / 2). Query and key alike, so that no product changes."""
        return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if self.is_interleaved else x
