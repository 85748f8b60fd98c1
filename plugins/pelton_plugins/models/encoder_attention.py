"""Self-attention in both directions, without a cache: see `pelton.attention.encoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pelton.attention.encoder import ENCODER, EncoderBackend
from pelton.attention.interface import AttentionBackend, AttentionNeeds
from pelton.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.rope import Rope
    from pelton.model.build import BuildConfig


class EncoderAttention(nn.Module):
    """Self-attention of an encoder layer, on the rows of its QKV product."""

    backend: EncoderBackend

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        config: BuildConfig,
        prefix: str,
        num_kv_heads: int | None = None,
        rope: Rope | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        """scale: 1 / sqrt(head_dim) when None. sliding_window: how many places away a token sees, on either side."""
        super().__init__()
        self.layer_name = prefix
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window, self.rope = sliding_window, rope
        self.metadata_index = -1
        self.needs = AttentionNeeds(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=self.num_kv_heads, block_size=config.block_size,
            dtype=config.dtype_name, sliding_window=sliding_window, attention_type=ENCODER,
        )  # fmt: skip
        self.selection = config.attention.select(self.needs)
        if prefix in config.cacheless_layers:
            raise ConfigError(f"Two attention layers are named {prefix!r}; give each its own prefix.")
        config.cacheless_layers[prefix] = self

    def bind_backend(self, metadata_index: int, backend: AttentionBackend) -> None:
        """In a step, `ForwardBatch.attention[metadata_index]` is what `backend` built for it."""
        assert isinstance(backend, EncoderBackend)
        self.metadata_index, self.backend = metadata_index, backend

    def forward(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, (num_heads + 2 num_kv_heads) head_dim] -> [T, num_heads head_dim]"""
        num_tokens, num_kv = qkv.shape[0], self.num_kv_heads
        output = torch.empty(num_tokens, self.num_heads, self.head_dim, dtype=qkv.dtype, device=qkv.device)
        if not batch.attention:  # the pass that measures memory
            return output.zero_().flatten(1)
        heads = qkv.view(num_tokens, -1, self.head_dim)
        query, key, value = torch.split(heads, [self.num_heads, num_kv, num_kv], dim=1)
        if self.rope is not None:
            cos_sin = self.rope.cos_sin[batch.positions].unsqueeze(1)
            query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        metadata = batch.attention[self.metadata_index]
        return self.backend.attend(self, query, key, value, metadata, output).flatten(1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn pairs (i, i + D / 2) of each head by their token's angles, in float32. x [T, N, D]; cos_sin [T, 1, D]."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
