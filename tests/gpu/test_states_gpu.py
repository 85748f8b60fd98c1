"""Layers with states on the GPU: greedy ids equal transformers' float32 ids, captured and not, over blocks that others have
left; in bfloat16 log-probabilities are as near to float32 as transformers' own.

The kernels alone: `pytest tests/backends/triton/test_states.py`, which takes the GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pelton_e2e import GapReference, generate, greedy, make_llm, make_prompts
from pelton_precision import assert_near_float32

from pelton.config import CUDAGraphMode
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_TOKENS = 32
LENGTHS = (1, 2, 16, 17, 48, 63, 65, 129, 200, 300)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {
        "num_heads": 2, "head_dim": 64, "n_groups": 1, "state_size": 128, "tie_word_embeddings": False,
    }),
    # One group: transformers before 5.24 takes the norm of several as if they were one.
    "mamba2-odd": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 24, "conv_kernel": 3}),
    "bamba": ("Bamba", {
        "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "attn_layer_indices": [1, 3],
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
    "qwen3_next": ("Qwen3Next", {
        "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "mlp_only_layers": [0, 1, 2, 3],
    }),
    "kimi_linear": ("KimiLinear", {
        "num_key_value_heads": 4, "linear_head_dim": 32, "linear_num_heads": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }),
    "bailing_hybrid": ("BailingHybrid", {
        "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}),
    "minimax": ("MiniMax", {
        "head_dim": 64, "num_local_experts": 6, "num_experts_per_tok": 2, "block_size": 32,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    }),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": 24}),
    "recurrent_gemma": ("RecurrentGemma", {
        "block_types": ["recurrent", "attention"], "attention_window_size": 24, "lru_width": 80,
    }),
}  # fmt: skip
BACKENDS = {
    "qwen3_next": "triton_delta_rule", "kimi_linear": "triton_key_delta_rule",
    "bailing_hybrid": "triton_key_delta_rule", "jamba": "triton_selective_scan",
    "lfm2": "triton_short_conv", "lfm3": "triton_short_conv", "recurrent_gemma": "triton_rg_lru", "minimax": "triton_lightning",
}  # fmt: skip
"""Others': triton_state."""


@torch.inference_mode()
def continuations(path: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """transformers' greedy ids, each from all tokens before it, and the gap between the best two logits at each."""
    from transformers import AutoModelForCausalLM

    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(DEVICE)
    outputs, gaps = [], []
    for prompt in prompts:
        tokens, differences = list(prompt), []
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([tokens], device=DEVICE)
            best = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
            differences.append(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        outputs.append(tokens[len(prompt) :])
        gaps.append(differences)
    return outputs, gaps


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GapReference:
    import transformers

    family, fields = MODELS[request.param]
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param), config_class=getattr(transformers, f"{family}Config"),
        model_class=getattr(transformers, f"{family}ForCausalLM"), with_tokenizer=False, **fields,
    )  # fmt: skip
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    return GapReference(request.param, str(path), prompts, *continuations(str(path), prompts))


@pytest.mark.parametrize(
    "settings",
    [
        *(
            pytest.param({"cudagraph_mode": mode}, id=f"captured-{mode}")
            for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        ),
        pytest.param({"enforce_eager": True, "max_num_batched_tokens": 48}, id="eager-chunked"),
        pytest.param({"cudagraph_mode": CUDAGraphMode.FULL, "max_num_batched_tokens": 48}, id="captured-chunked"),
    ],
)
def test_ids_equal_transformers(reference: GapReference, settings: dict[str, Any]) -> None:
    with make_llm(reference.path, device=DEVICE, max_num_seqs=4, **settings) as llm:
        for _ in range(3):  # graphs that are captured when their size comes again are replayed in the third round
            reference.check(generate(llm, reference.prompts, greedy(NUM_TOKENS)))
        assert BACKENDS.get(reference.family, "triton_state") in llm.llm_engine.info.report.attention_backend
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_logprobs_are_near_float32(reference: GapReference, mode: str) -> None:
    if reference.family not in ("bamba", "qwen3_next"):
        pytest.skip("pelton_precision patches transformers' attention, of which it knows these two models'")
    found = assert_near_float32(reference.path, reference.prompts, "bfloat16", DEVICE, cudagraph_mode=mode)
    print(f"{reference.family} {mode}: {found}")
