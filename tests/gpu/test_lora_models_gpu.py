"""Adapters on the GPU beyond Llama's shape: models that pool, Gemma 3n, shared experts, transformers' modules; captured, in any mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pelton_e2e import gap_reference, greedy, make_llm
from pelton_lora import LLAMA_TARGETS, merged_checkpoint
from pelton_transformers import make_checkpoint

from pelton import LLM, LoRARequest
from pelton.testing.models import make_tiny_checkpoint, make_tiny_encoder

pytestmark = pytest.mark.gpu

NUM_TOKENS = 16
_random = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(10, 300, (length,), generator=_random).tolist() for length in (1, 17, 60)]
GEMMA3N = (
    *LLAMA_TARGETS, "linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection",
    "modality_router", "prediction_coefs", "correction_coefs", "altup_projections.0", "altup_unembed_projections.1",
)  # fmt: skip
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "gemma3n": (make_tiny_checkpoint, GEMMA3N, {}),
    "qwen2_moe": (
        make_tiny_checkpoint,
        (*QKVO, *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down"))),
        {},
    ),
    "phi3": (make_checkpoint, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {"model_impl": "transformers"}),
    "stablelm": (make_checkpoint, LLAMA_TARGETS, {}),
}


@pytest.mark.parametrize("family", CASES)
def test_ids_equal_merged_weights(family: str, tmp_path: Path) -> None:
    make, targets, settings = CASES[family]
    options: dict[str, Any] = {"with_tokenizer": False} if make is make_tiny_checkpoint else {}
    if family == "gemma3n":
        options["vocab_size_per_layer_input"] = 320  # some versions of transformers look up ids beyond it
    path = str(make(tmp_path / "model", family, **options))
    adapter, merged = merged_checkpoint(tmp_path, path, seed=1, rank=8, strength=0.05, targets=targets)
    base, adapted = (gap_reference(family, one, PROMPTS, NUM_TOKENS, "cuda") for one in (path, merged))
    assert base.outputs != adapted.outputs
    with make_llm(path, device="cuda", enable_lora=True, max_loras=2, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in range(2)], greedy(NUM_TOKENS), use_tqdm=False,
                lora_request=[None, LoRARequest("mine", 1, adapter)] * len(PROMPTS),
            )  # fmt: skip
            found = [list(output.outputs[0].token_ids) for output in outputs]
            base.check(found[::2])
            adapted.check(found[1::2])


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_vectors_equal_merged_weights(family: str, tmp_path: Path) -> None:
    targets = {
        "bert": ("query", "key", "value", "output.dense"),
        "modernbert": ("Wqkv", "Wo", "Wi"),
        "qwen3": LLAMA_TARGETS,
    }
    make, options = (make_tiny_checkpoint, {"with_tokenizer": False}) if family == "qwen3" else (make_tiny_encoder, {})
    path = str(make(tmp_path / "model", family, **options))
    adapter, merged = merged_checkpoint(tmp_path, path, seed=1, rank=8, targets=targets[family])
    settings: dict[str, Any] = {
        "device": "cuda", "runner": "pooling", "pooling_type": "mean", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**24, "skip_tokenizer_init": True, "disable_log_stats": True,
    }  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def vectors(model: str, lora_request: Any = None, **more: Any) -> np.ndarray:
        with LLM(model=model, **settings, **more) as llm:
            given = prompts if lora_request is None else [prompt for prompt in prompts for _ in range(2)]
            for _ in range(2):
                outputs = llm.embed(given, lora_request=lora_request, use_tqdm=False)
            return np.array([output.outputs.embedding for output in outputs])

    mixed = vectors(path, [None, LoRARequest("mine", 1, adapter)] * len(prompts), enable_lora=True)
    plain, adapted = vectors(path), vectors(merged)
    assert np.abs(plain - adapted).max() > 0.01
    np.testing.assert_allclose(mixed[::2], plain, atol=5e-4)
    np.testing.assert_allclose(mixed[1::2], adapted, atol=5e-4)
