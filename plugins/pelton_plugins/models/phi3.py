"""Phi-3 and Phi-4: Llama's shape; q, k and v are one tensor of the checkpoint, and so are gate and up; often a part of a head turns."""

from __future__ import annotations

from typing import ClassVar

from pelton.layers.rope import Rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.llama import LlamaForCausalLM
from pelton_plugins.models.longrope import get_long_rope
from pelton_plugins.models.mistral import MistralDecoderLayer


class Phi3DecoderLayer(MistralDecoderLayer):
    merged_qkv: ClassVar[str | None] = "qkv_proj"
    merged_gate_up: ClassVar[str | None] = "gate_up_proj"

    def rope(self, index: int, head_dim: int, config: BuildConfig) -> Rope:
        return get_long_rope(config, head_dim)


class Phi3ForCausalLM(LlamaForCausalLM):
    layer_class = Phi3DecoderLayer
