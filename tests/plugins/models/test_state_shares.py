"""Layers with states over ranks, each a thread with its own shards: what they give together is what one rank gives. Groups of heads are
split, copied, and spread over ranks."""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pelton_ranks import ThreadContext

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.kv_cache.spec import MambaSpec
from pelton.parallel.context import ParallelContext
from pelton.testing.model_driver import ModelDriver, TensorWeight

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention"], "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
MAMBA = {
    **COMMON, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
    "mamba_n_groups": 2,
}  # fmt: skip
DELTA_NET = {
    **COMMON, "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
SELECTIVE = {
    **COMMON,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
NEMOTRON = {
    **COMMON, "layers_block_type": ["mamba", "mlp", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 4,
    "ssm_state_size": 12, "conv_kernel": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16, "mlp_bias": True, "use_bias": True,
}  # fmt: skip
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # (architecture, ranks, fields)
    "mamba2-whole-groups": ("BambaForCausalLM", 2, {**MAMBA, "mamba_conv_bias": True, "mamba_proj_bias": True}),
    "mamba2-one-group": ("BambaForCausalLM", 2, {**MAMBA, "mamba_n_groups": 1}),
    "mamba2-groups-over-ranks": ("BambaForCausalLM", 4, MAMBA),
    "mamba2-gate-alone": ("FalconH1ForCausalLM", 4, {**MAMBA, "mamba_d_ssm": 64, "ssm_multipliers": [1.2, 0.9, 0.8, 1.1, 0.7]}),
    "mamba2-norm-first": ("FalconH1ForCausalLM", 4, {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "key_multiplier": 0.6}),
    "delta-whole-groups": ("Qwen3NextForCausalLM", 2, DELTA_NET),
    "delta-groups-over-ranks": ("Qwen3NextForCausalLM", 4, DELTA_NET),
    "delta-parts": ("Qwen3_5ForCausalLM", 4, DELTA_NET),
    "delta-tensors": ("OlmoHybridForCausalLM", 4, {**DELTA_NET, "num_key_value_heads": 4}),
    "selective": ("JambaForCausalLM", 4, {**SELECTIVE, "num_experts": 1}),
    "ungated-experts": ("NemotronHForCausalLM", 2, NEMOTRON),
    "ungated-experts-whole": ("NemotronHForCausalLM", 4, {**NEMOTRON, "ep": True}),
    "convolution": ("Lfm2ForCausalLM", 4, {**COMMON, "layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "gated-heads": ("Lfm3ForCausalLM", 4, {
        **COMMON, "layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3, "sliding_window": 24,
    }),
    "key-delta-bounded": ("BailingHybridForCausalLM", 4, {
        **COMMON, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }),
    "recurrent-units": ("RecurrentGemmaForCausalLM", 4, {
        **COMMON, "block_types": ["recurrent", "attention"], "attention_window_size": 24, "lru_width": 40,
    }),
    "delta-one-tensor": ("LaraMiniForCausalLM", 4, {
        **DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    }),
    "mamba2-and-shared-blocks": ("Zamba2ForCausalLM", 4, {
        **COMMON, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_key_value_heads": 4, "head_dim": 16,
        "attention_head_dim": 16, "use_shared_attention_adapter": True, "adapter_rank": 6, "mamba_d_state": 12,
        "add_bias_linear": True,
    }),
    "lightning": ("MiniMaxForCausalLM", 4, {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def random_weights(expected: dict[str, tuple[int, ...]]) -> list[tuple[str, TensorWeight]]:
    """The same tensor for a name, whichever rank asks."""
    found = []
    for name, shape in expected.items():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = shape[-1] ** -0.5 if len(shape) > 1 and not name.endswith("A_log") else 1.0
        found.append((name, TensorWeight(torch.randn(shape, generator=random) * scale)))
    return found


def make(plugins: Any, architecture: str, fields: dict[str, Any], parallel: ParallelContext) -> ModelDriver:
    fields = {**fields, "architectures": [architecture]}
    settings = EngineConfig.from_flat(
        tensor_parallel_size=parallel.size, enable_expert_parallel=bool(fields.pop("ep", False)) and parallel.size > 1
    )
    return ModelDriver(
        hf_config=fields, weights=random_weights, plugins=plugins, parallel=parallel, engine_config=settings
    )


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_give_what_one_does(model_plugins: Any, token_ids: list[int], name: str) -> None:
    architecture, size, fields = CASES[name]
    tokens = [token % 96 for token in token_ids]
    steps = [tokens[:50], tokens[50:51], tokens[51:70]]

    def run(driver: ModelDriver) -> torch.Tensor:
        return torch.cat([driver.step({"a": part})["a"] for part in steps])

    alone = make(model_plugins, architecture, fields, ParallelContext())
    expected, barrier = run(alone), threading.Barrier(size)
    shared: list[Any] = [None] * size
    drivers = [
        make(model_plugins, architecture, fields, ThreadContext(rank, size, shared, barrier)) for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(run, drivers):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    whole = sum(spec.state_bytes for spec in specs(alone))
    held = [sum(spec.state_bytes for spec in specs(driver)) for driver in drivers]
    assert len(set(held)) == 1, "ranks plan alike"
    assert sum(held) >= whole
    if name.endswith(("whole-groups", "selective", "convolution", "lightning", "experts")):
        assert sum(held) == whole, "nothing is held twice"


def specs(driver: ModelDriver) -> list[MambaSpec]:
    found = [layer.cache_spec() for layer in driver.build.cache_layers.values()]
    return [spec for spec in found if isinstance(spec, MambaSpec)]


@pytest.mark.parametrize(
    ("architecture", "fields", "size", "message"),
    [
        ("BambaForCausalLM", MAMBA, 3, "mamba_n_heads is 8, which does not divide by tensor_parallel_size 3"),
        (
            "BambaForCausalLM",
            {**MAMBA, "mamba_n_heads": 12, "mamba_d_head": "auto", "mamba_expand": 3, "mamba_n_groups": 6},
            4,
            "mamba_n_groups is 6, which tensor_parallel_size 4 neither divides nor is a multiple of",
        ),
        ("Qwen3_5ForCausalLM", DELTA_NET, 3, "linear_num_value_heads is 8, which does not divide"),
        ("Lfm2ForCausalLM", {**COMMON, "layer_types": ["conv"] * 2}, 3, "hidden_size is 32, which does not divide"),
        ("NemotronHForCausalLM", {**NEMOTRON, "ep": True, "n_routed_experts": 2, "n_groups": 2}, 4, "there are 2 experts"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(
    model_plugins: Any, architecture: str, fields: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(model_plugins, architecture, fields, ParallelContext(0, size))


def test_ranks_that_share_tokens_of_a_cache_are_refused(model_plugins: Any) -> None:
    parallel = ParallelContext(0, 4)
    parallel.context = SimpleNamespace(size=2)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2, and a state has no tokens"):
        make(model_plugins, "BambaForCausalLM", MAMBA, parallel)
