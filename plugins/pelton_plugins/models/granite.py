"""Granite: Llama's shape with multipliers of the embedding, of attention's logits, of what each sub-layer adds, and of the logits."""

from __future__ import annotations

from torch import Tensor

from pelton.attention.metadata import ForwardBatch
from pelton.model.build import BuildConfig, HFConfig
from pelton_plugins.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class GraniteDecoderLayer(LlamaDecoderLayer):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__(index, config=config, prefix=prefix)
        self.multiplier = float(config.hf.get("residual_multiplier", 1.0))

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        qkv, residual = self.qkv_proj(hidden, residual)
        hidden = self.o_proj(self.attn(qkv, batch)) * self.multiplier
        activated, residual = self.gate_up_proj(hidden, residual)
        return self.down_proj(activated) * self.multiplier, residual

    def attention_scale(self, config: BuildConfig) -> float | None:
        return float(config.hf.get("attention_multiplier", 1.0))


class GraniteForCausalLM(LlamaForCausalLM):
    layer_class = GraniteDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        self.logits_scaling = float(config.hf.get("logits_scaling", 1.0))

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        return super().compute_logits(hidden, rows) / self.logits_scaling

    def embedding_scale(self, hf: HFConfig) -> float | None:
        return float(hf.get("embedding_multiplier", 1.0))
