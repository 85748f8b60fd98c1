"""Every linear layer of every family takes adapters, or is refused with the reason: ids equal those of merged weights in float32.

What PEFT does not adapt (MLPs that it takes for experts, matrices of transformers' own classes) is merged by hand here.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import generate, greedy, make_llm, make_prompts
from pelton_lora import greedy_with_gap
from safetensors.torch import load_file, save_file

from pelton import LoRARequest
from pelton.errors import InvalidAdapterError
from pelton.testing.models import load_reference, make_tiny_checkpoint

EXPERT = r"(.*\.)?(mlp|block_sparse_moe|feed_forward)\.((experts|router|gate|shared_expert_gate|moe_statics)\b.*)"
REFUSED = {
    EXPERT: "belongs to a layer of experts",
    r".*kv_b_proj": "it is multiplied with queries",
    r".*indexer\.weights_proj": "it is kept in float32",
    r".*embed_tokens(_per_layer)?|lm_head": "embeddings and output heads take none",
}
"""The end of a matrix's name, without ".weight", and why it takes no adapter. All others take one."""
FAMILIES = (
    "mistral", "qwen2", "gemma3n", "deepseek_v2", "deepseek_v3", "deepseek_v2_moe", "deepseek_v3_moe", "deepseek_v32", "mixtral",
    "glm_moe_dsa", "axk2", "dots3_note", "qwen2_moe", "qwen3_moe", "glm4_moe", "llama4", "gpt_oss", "minimax_m2",
    "ernie4_5_moe",
)  # fmt: skip
RANK, SCALE, STRENGTH = 8, 2.0, 0.05


def reason_against(name: str) -> str | None:
    return next((why for pattern, why in REFUSED.items() if re.fullmatch(pattern, name)), None)


def save_adapter(folder: Path, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> LoRARequest:
    folder.mkdir()
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": tensor
        for name, pair in pairs.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": ".*"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, 1, str(folder))


def random_pair(weight: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(RANK, weight.shape[1], generator=random) * STRENGTH
    return a, torch.randn(weight.shape[0], RANK, generator=random) * STRENGTH


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_takes_an_adapter_or_says_why_not(family: str, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family, with_tokenizer=False)
    weights = load_file(path / "model.safetensors")
    matrices = {name.removesuffix(".weight"): weight for name, weight in weights.items() if weight.dim() == 2}
    random = torch.Generator().manual_seed(1)
    pairs = {name: random_pair(weight, random) for name, weight in matrices.items() if reason_against(name) is None}
    for name, (a, b) in pairs.items():
        weights[f"{name}.weight"] = matrices[name] + SCALE * (b @ a)
    shutil.copytree(path, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    prompts = make_prompts(320, (3, 40))
    expected, gap = greedy_with_gap(load_reference(tmp_path / "merged"), prompts, 12)
    assert gap > 1e-4, f"a tie of {gap}; take another seed"
    request = save_adapter(tmp_path / "all", pairs)
    with make_llm(str(path), enable_lora=True) as llm:
        adapted: list[Any] = [request, None, request, None]
        given = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(2)]
        outputs = llm.generate(given, greedy(12), use_tqdm=False, lora_request=adapted)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found[::2] == expected
        assert found[1::2] == generate(llm, prompts, greedy(12)) != expected
        kinds = {re.sub(r"\d+", "0", name): name for name in matrices if name not in pairs}
        for number, name in enumerate(kinds.values()):
            one = save_adapter(tmp_path / f"refused{number}", {name: random_pair(matrices[name], random)})
            with pytest.raises(
                InvalidAdapterError, match=rf"layer '{re.escape(name)}' takes no .*{reason_against(name)}"
            ):
                llm.add_lora(one)
