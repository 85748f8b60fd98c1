"""Gemma 2: as Gemma 3, with every other layer local, one rope, soft caps, and no norms of queries and keys."""

from __future__ import annotations

from typing import ClassVar

from pelton.layers.rope import Rope, get_rope
from pelton.model.build import BuildConfig
from pelton_plugins.models.gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM


class Gemma2DecoderLayer(Gemma3DecoderLayer):
    has_head_norms: ClassVar[bool] = False
    global_every: ClassVar[int] = 2

    def rope(self, is_local: bool, head_dim: int, config: BuildConfig) -> Rope:
        return get_rope(config, head_dim)


class Gemma2ForCausalLM(Gemma3ForCausalLM):
    layer_class = Gemma2DecoderLayer
