"""Layers whose rope turns neighbours (2i, 2i + 1) of a head, where the kernels turn (i, i + half).

Rows of q and k are brought into the kernels' order once they are loaded: logits of attention do not depend on the order of a head's
numbers, as long as it is that of both. Where rows do not lie as they are (blocks) or adapters add to them, each step's q and k are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.layers.linear import QKVLinear
from pelton.layers.rope import Rope
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Neighbours:
    """The order of one layer's rows, and who brings them into it."""

    def __init__(self, qkv_proj: QKVLinear, head_dim: int, rope: Rope, config: BuildConfig) -> None:
        head = torch.arange(head_dim)
        turned = head[: rope.rotary_dim]
        head = torch.cat([turned[::2], turned[1::2], head[rope.rotary_dim :]])
        num_turned = qkv_proj.num_heads + qkv_proj.num_kv_heads
        heads = (torch.arange(num_turned)[:, None] * head_dim + head).flatten()
        values = torch.arange(len(heads), len(heads) + qkv_proj.num_kv_heads * head_dim)
        self.rows = torch.cat([heads, values]).to(config.device)
        self._qkv_proj, self._has_adapters = qkv_proj, config.adapters is not None
        self.is_done = False

    def weights_loaded(self) -> None:
        tensors = {name: tensor for name, tensor in self._qkv_proj.named_parameters(recurse=False) if tensor.dim()}
        tensors.pop("order", None)  # of columns
        self.is_done = not self._has_adapters and all(len(tensor) == len(self.rows) for tensor in tensors.values())
        if self.is_done:
            for tensor in tensors.values():
                tensor.data.copy_(
                    tensor.data.view(torch.uint8).view(len(tensor), -1)[self.rows].view(tensor.dtype).view(tensor.shape)
                )

    def __call__(self, qkv: Tensor) -> Tensor:
        return qkv if self.is_done else qkv.index_select(1, self.rows)


class InterleavedDecoderLayer(LlamaDecoderLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str, **fields: object) -> None:
        super().__init__(index, config=config, prefix=prefix, **fields)  # type: ignore[arg-type]
        head_dim = self.attn.head_dim
        rope = self.rope(index, head_dim, config)
        assert rope is not None
        self.neighbours = Neighbours(self.qkv_proj, head_dim, rope, config)

    def attend(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        return super().attend(self.neighbours(qkv), batch)


class InterleavedForCausalLM(LlamaForCausalLM):
    layer_class = InterleavedDecoderLayer

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        used = super().load_weights(weights)
        for layer in self.layers:
            layer.neighbours.weights_loaded()  # type: ignore[union-attr,operator]
        return used
