"""Conformance of this package's model, with random weights."""

from __future__ import annotations

from pelton.testing.model import ModelConformance

from pelton_skeleton.model import SkeletonForCausalLM


class TestSkeletonForCausalLM(ModelConformance):
    model_class = SkeletonForCausalLM
    hf_config = {  # noqa: RUF012
        "architectures": ["SkeletonForCausalLM"], "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "rope_theta": 10000.0,
    }  # fmt: skip
