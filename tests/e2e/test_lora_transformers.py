"""Adapters of models that run on transformers' modules: PEFT's merged weights are the oracle, token for token in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import TIE, generate, greedy, make_llm, make_prompts
from pelton_lora import greedy_with_gap, make_adapter
from pelton_transformers import VOCAB_SIZE, make_checkpoint
from safetensors.torch import save_file

from pelton import LoRARequest
from pelton.errors import ConfigError, InvalidAdapterError

NUM_TOKENS, LENGTHS = 8, (1, 17, 44)
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = (*QKVO, "gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "nemotron": (*QKVO, "up_proj", "down_proj"),
    "mixtral": QKVO,
    "qwen2_moe": QKVO,
    **dict.fromkeys(("stablelm", "gemma2", "olmo", "helium", "exaone4", "cohere"), GATED),
}


def run(llm: Any, prompts: list[list[int]], requests: list[LoRARequest | None]) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, greedy(NUM_TOKENS), use_tqdm=False, lora_request=requests)
    assert not [output.error for output in outputs if output.error is not None]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("model_type", TARGETS)
def test_ids_equal_merged_weights(model_type: str, tmp_path: Path) -> None:
    """In chunks, beside requests of another adapter and of none, and again with hits of the prefix cache."""
    path = make_checkpoint(tmp_path / "model", model_type)
    prompts, requests, expected = make_prompts(VOCAB_SIZE, LENGTHS), [], []
    for seed in (3, 2) if model_type == "olmo" else (1, 2):
        folder = tmp_path / f"adapter{seed}"
        merged = make_adapter(folder, path, seed=seed, target_modules=list(TARGETS[model_type]), strength=0.06)
        ids, gap = greedy_with_gap(merged, prompts, NUM_TOKENS)
        assert gap > TIE, f"a tie of {gap}; take another seed"
        requests.append(LoRARequest(folder.name, 1, str(folder)))
        expected.append(ids)
    with make_llm(path, model_impl="transformers", enable_lora=True, max_loras=2, max_num_batched_tokens=32) as llm:
        base = generate(llm, prompts, greedy(NUM_TOKENS))
        assert base != expected[0] != expected[1]
        for _ in range(2):
            found = run(llm, [one for one in prompts for _ in range(3)], [None, *requests] * len(prompts))
            assert [found[::3], found[1::3], found[2::3]] == [base, *expected]


@pytest.mark.parametrize(
    "model_type, name, shape, why",
    [
        ("qwen2_moe", "model.layers.0.mlp.experts.1.up_proj", (48, 64), "Experts of transformers"),
        ("phi3", "lm_head", (VOCAB_SIZE, 64), "embeddings and output heads take none"),
    ],
)
def test_other_matrices_say_why_they_take_none(
    model_type: str, name: str, shape: tuple[int, int], why: str, tmp_path: Path
) -> None:
    path, folder = make_checkpoint(tmp_path / "model", model_type), tmp_path / "adapter"
    folder.mkdir()
    pair = {"A": torch.ones(8, shape[1]), "B": torch.ones(shape[0], 8)}
    tensors = {f"base_model.model.{name}.lora_{letter}.weight": tensor for letter, tensor in pair.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ".*"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with (
        make_llm(path, model_impl="transformers", enable_lora=True) as llm,
        pytest.raises(InvalidAdapterError, match=rf"layer '{name}' takes no adapter: .*{why}"),
    ):
        llm.add_lora(LoRARequest("one", 1, str(folder)))


def test_a_model_none_of_whose_layers_takes_adapters_is_refused_at_the_start(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "gpt2")
    with pytest.raises(
        ConfigError, match=r"no layer of this model takes adapters \(.*it is Conv1D of transformers, whose"
    ):
        make_llm(path, model_impl="transformers", enable_lora=True)
