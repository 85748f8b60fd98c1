"""One attention layer's constants, and its call: from QKV's rows to attention's output.

Scale, window, soft cap, norms and rope are bound when the layer is made; cache views and backend when the KV pool is. The
step's shape comes with the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pelton.attention.cache_layer import register
from pelton.attention.interface import AttentionBackend, AttentionNeeds, BoundAttention
from pelton.attention.parts import bind_layer, spread_needs
from pelton.kv_cache.spec import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import Rope
from pelton.ops.interface import QkNormRopeWriteKv, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig

_FEW_TOKENS = 256


class AttentionLayer(nn.Module):
    """Decoder self-attention over the paged cache: a `CacheLayer`. Registers itself in `config.cache_layers` under `prefix`."""

    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], a view of the pool
    v_cache: Tensor
    backend: AttentionBackend
    attend: BoundAttention

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        config: BuildConfig,
        prefix: str,
        rope: Rope | None,
        scale: float | None = None,
        sliding_window: int | None = None,
        attention_chunk_size: int | None = None,
        soft_cap: float | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        shares: str | None = None,
    ) -> None:
        """num_heads, num_kv_heads: of this rank (`QKVLinear` says). scale: 1 / sqrt(head_dim) when None.

        attention_chunk_size: tokens attend to those before them in their own aligned chunk of so many; not with a window.
        shares: prefix of the layer whose keys and values it reads; it is called with the rows of its queries alone.
        sinks [num_heads]: logits of a key without a value. alibi_slopes [num_heads]: a logit gets slope * (key - query position).
        """
        super().__init__()
        self.layer_name, self.shares = prefix, shares
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.sinks, self.alibi_slopes = sinks, alibi_slopes
        self.metadata_index = self.group_id = -1
        self.block_size = config.block_size
        self.kv_dtype = config.dtype_name if config.kv_dtype == "auto" else config.kv_dtype
        self.needs = AttentionNeeds(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=config.block_size,
            dtype=config.dtype_name, kv_dtype=config.kv_dtype, sliding_window=sliding_window,
            attention_chunk_size=attention_chunk_size, logit_soft_cap=soft_cap, has_sinks=sinks is not None,
            has_alibi=alibi_slopes is not None,
        )  # fmt: skip
        self.parallel = config.parallel
        self.needs = spread_needs(self.needs, prefix, config.parallel)
        self.selection = config.attention.select(self.needs)
        self._write = self._bind_write(config, rope, q_norm, k_norm)
        register(self, config)

    def _bind_write(
        self, config: BuildConfig, rope: Rope | None, q_norm: RMSNorm | None, k_norm: RMSNorm | None
    ) -> QkNormRopeWriteKv:
        # Kept for backends whose kernel does the op's work as well.
        self.write_needs = QkNormRopeWriteKvNeeds(
            dtype=config.dtype_name, kv_dtype=self.kv_dtype, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, rotary_dim=rope.rotary_dim if rope else 0, q_norm=q_norm.spec if q_norm else None,
            k_norm=k_norm.spec if k_norm else None, writes_kv=self.shares is None,
        )  # fmt: skip
        self.write_tensors = QkNormRopeWriteKvTensors(
            rope.cos_sin if rope else None, q_norm.weight if q_norm else None, k_norm.weight if k_norm else None
        )
        bound: QkNormRopeWriteKv = config.ops.bind("qk_norm_rope_write_kv", self.write_needs, self.write_tensors)
        return bound

    def cache_spec(self) -> KVCacheSpec:
        """Keys and values of every token, or of those that later ones attend to."""
        kind: type[FullAttentionSpec] = FullAttentionSpec
        own: dict[str, int] = {}
        if self.sliding_window is not None:
            kind, own = SlidingWindowSpec, {"sliding_window": self.sliding_window}
        elif (size := self.needs.attention_chunk_size) is not None:
            kind, own = ChunkedLocalSpec, {"attention_chunk_size": size}
        num_ranks = self.needs.decode_context_parallel
        return kind(
            block_size=self.block_size * num_ranks, num_ranks=num_ranks, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, dtype=self.kv_dtype, **own,
        )  # fmt: skip

    def kv_spec(self) -> KVCacheSpec:
        """The old name of `cache_spec`."""
        return self.cache_spec()

    def bind_cache(self, views: tuple[Tensor, ...], metadata_index: int, backend: AttentionBackend) -> None:
        self.k_cache, self.v_cache = views
        self.metadata_index, self.group_id, self.backend = metadata_index, backend.group_id, backend
        self.attend = bind_layer(self, backend, self.parallel)

    def qk_norm_rope_write_kv(self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor) -> Tensor:
        """The fused op on this layer's cache: [T, num_heads, head_dim]."""
        return self._write(qkv, positions, slot_mapping, self.k_cache, self.v_cache)

    def forward(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, (num_heads + 2 num_kv_heads) head_dim], or [T, num_heads head_dim] of a layer that shares another's cache
        -> [T, num_heads head_dim]"""
        num_tokens = qkv.shape[0]
        # The product that reads it takes tiles of rows: memory goes on to a power of two of them where that is little.
        held = 1 << (num_tokens - 1).bit_length() if 0 < num_tokens <= _FEW_TOKENS else num_tokens
        output = torch.empty(held, self.num_heads, self.head_dim, dtype=qkv.dtype, device=qkv.device)
        if held != num_tokens:
            output = output[:num_tokens]
        if not batch.attention:  # the pass that measures memory, before there is a cache
            return output.zero_().flatten(1)
        slots = batch.slot_mappings[self.group_id]
        if batch.cut is None:
            metadata = batch.attention[self.metadata_index]
            self.attend.write_and_attend(qkv, batch.positions, slots, metadata, output)
        else:
            batch.cut(self, self.qk_norm_rope_write_kv(qkv, batch.positions, slots), output)
        return output.flatten(1)
