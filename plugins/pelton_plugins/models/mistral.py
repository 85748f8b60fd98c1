"""Mistral: Llama's shape, every layer with the same sliding window (or none). Ministral 3 scales queries by their position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class MistralDecoderLayer(LlamaDecoderLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str, **fields: Any) -> None:
        super().__init__(index, config=config, prefix=prefix, **fields)
        self.query_scales = _query_scales(config)

    def attend(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        if self.query_scales is not None:
            query = qkv[:, : self.attn.num_heads * self.attn.head_dim]
            query.copy_(query.float() * self.query_scales.index_select(0, batch.positions))
        return super().attend(qkv, batch)

    def sliding_window(self, index: int, config: BuildConfig) -> int | None:
        window: int | None = config.hf.get("sliding_window")
        return window


class MistralForCausalLM(LlamaForCausalLM):
    layer_class = MistralDecoderLayer


def _query_scales(config: BuildConfig) -> Tensor | None:
    """Return 1 + beta * log(1 + floor(position / length of pretraining)), [max_model_len, 1] float32. None: queries are not scaled."""
    rope = config.hf.get("rope_parameters") or config.hf.get("rope_scaling") or {}
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return None
    positions = torch.arange(config.max_model_len, dtype=torch.float32)
    steps = torch.floor(positions / rope["original_max_position_embeddings"])
    return (torch.log1p(steps) * beta + 1.0).unsqueeze(-1).to(config.device)
