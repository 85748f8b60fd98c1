"""ERNIE 4.5 with experts: neighbours of a head turn; experts by softmax scores and a correction, with shared ones beside them."""

from __future__ import annotations

import re

import torch

from pelton.errors import ConfigError
from pelton.model.build import BuildConfig, HFConfig
from pelton.ops.moe import RoutingSpec
from pelton_plugins.models.experts import ExpertNames, SparseMoe
from pelton_plugins.models.interleaved import InterleavedDecoderLayer, InterleavedForCausalLM
from pelton_plugins.models.moe import MoeDecoderLayer, MoeForCausalLM, check_fields, shared_experts

_NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_is_row=True)
_SMALL = 1e-9
"""No sum of chosen scores is as small as that."""


class Ernie4_5_MoeDecoderLayer(InterleavedDecoderLayer, MoeDecoderLayer):
    def has_experts(self, index: int, hf: HFConfig) -> bool:
        last = hf.get("moe_layer_end_index", -1)
        last = hf.num_hidden_layers - 1 if last == -1 else last
        is_chosen = (index + 1) % hf.get("moe_layer_interval", 1) == 0
        return bool(is_chosen and hf.get("moe_layer_start_index", 1) <= index <= last)

    def make_experts(self, config: BuildConfig, prefix: str) -> SparseMoe:
        """The router is float32, as transformers keeps it."""
        hf = config.hf
        return SparseMoe(
            hf.hidden_size, hf.moe_intermediate_size, activation=hf.get("hidden_act", "silu"), names=_NAMES,
            routing=RoutingSpec(num_experts=hf.moe_num_experts, top_k=hf.moe_k, has_correction=True),
            norm=self.post_attention_layernorm, config=config, prefix=prefix, router_dtype=torch.float32,
            shared=shared_experts(config, prefix, hf.get("moe_num_shared_experts", 2)),
        )  # fmt: skip


class Ernie4_5_MoeForCausalLM(InterleavedForCausalLM, MoeForCausalLM):
    layer_class = Ernie4_5_MoeDecoderLayer

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        check_fields(config.hf, use_bias=False)
        smallest = config.hf.get("moe_norm_min", 0.0)
        if smallest > _SMALL:
            raise ConfigError(
                f"moe_norm_min is {smallest}; this model divides by the sum of the chosen experts' scores as it is, which is the same "
                f"up to {_SMALL}. Use another checkpoint."
            )
        super().__init__(config=config, prefix=prefix)
        config.weights.ignore(rf"{re.escape(prefix)}model\.mtp_.*")  # it predicts further tokens, and nobody reads it
