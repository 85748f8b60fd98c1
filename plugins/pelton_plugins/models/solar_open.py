"""Solar Open: Llama's attention, and in every layer experts as DeepSeek-V3's, with shared ones beside them."""

from __future__ import annotations

from pelton.model.build import BuildConfig
from pelton_plugins.models.glm4_moe import Glm4MoeDecoderLayer
from pelton_plugins.models.moe import MoeForCausalLM, check_fields


class SolarOpenForCausalLM(MoeForCausalLM):
    layer_class = Glm4MoeDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_fields(config.hf, use_qk_norm=False, first_k_dense_replace=0)
        super().__init__(config=config, prefix=prefix)
