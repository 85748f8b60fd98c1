"""Conformance of this package's whole-step kernel."""

from __future__ import annotations

from typing import Any, ClassVar

from pelton.plugins import load_plugins
from pelton.model.registry import find_model
from pelton.testing.step_kernel import StepKernelConformance

from pelton_skeleton.kernel import SkeletonStep


class TestSkeletonStep(StepKernelConformance):
    kernel_class = SkeletonStep
    model_class = find_model(load_plugins(only=[]).entries("pelton_models"), "LlamaForCausalLM").resolve()
    hf_config: ClassVar[dict[str, Any]] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
