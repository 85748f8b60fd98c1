"""Ranks of every kind with models of every kind, where no other test has the pair: each engine is batched and chunked, preempts, verifies
drafts and has adapters, all at once; then single requests find prefixes. Ids equal transformers', those of quantized weights one device's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import TIE, greedy, greedy_reference, make_llm, make_prompts
from pelton_lora import LLAMA_TARGETS, merged_checkpoint

from pelton import LLM, LoRARequest
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block
ATTENTION = LLAMA_TARGETS[:4]
WHOLE_BLOCKS = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
"""Four ranks have columns in blocks of 32."""
CROWDED = {
    "max_model_len": 256, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 21, "enable_lora": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    sizes: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    targets: tuple[str, ...] = LLAMA_TARGETS
    times: int = 1
    """How often each prompt is asked at once: requests of several engines have to crowd each."""


CASES = {
    "tp4-latents-experts": Case("deepseek_v3_moe", {"tensor_parallel_size": 4}, targets=("o_proj",)),
    "tp4-quantized": Case("llama", {"tensor_parallel_size": 4}, WHOLE_BLOCKS, "q8_0"),
    "tp2-gated-norms": Case("axk2", {"tensor_parallel_size": 2}, targets=("o_proj", "W_up")),
    "tp2-pp2-windows-of-latents": Case(
        "dots3_note", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, targets=("o_proj", "g_proj")
    ),
    "tp2-sparse": Case("deepseek_v32", {"tensor_parallel_size": 2}, targets=("o_proj",)),
    "pp2-shared-choice": Case("glm_moe_dsa", {"pipeline_parallel_size": 2}, targets=("o_proj",)),
    "pp2-sparse": Case("deepseek_v32", {"pipeline_parallel_size": 2}, targets=("o_proj",)),
    "pp2-latents-experts": Case("deepseek_v3_moe", {"pipeline_parallel_size": 2}, targets=("o_proj",)),
    "tp2-pp2-quantized": Case(
        "llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, WHOLE_BLOCKS, "q8_0"
    ),
    "ep2-experts-joint-norms": Case(
        "minimax_m2", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, targets=ATTENTION
    ),
    "dp2-latents-experts": Case("deepseek_v3_moe", {"data_parallel_size": 2}, targets=("o_proj",), times=3),
    "dcp2-experts-quantized": Case(
        "qwen3_moe",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "num_gpu_blocks_override": 11},
        {**WHOLE_BLOCKS, "num_key_value_heads": 1}, "q8_0", ATTENTION,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    path: str
    adapter: str
    prompts: list[list[int]]
    expected: list[list[list[int]]]
    """Without the adapter, and with it."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Made]:
    found: dict[str, Made] = {}

    def get(case: Case) -> Made:
        key = f"{case.family} {case.fields} {case.quantization}"
        if key not in found:
            folder = tmp_path_factory.mktemp("made")
            path = str(make_tiny_checkpoint(folder / "base", case.family, with_tokenizer=False, **case.fields))
            adapter, merged = merged_checkpoint(folder, path, seed=3, rank=8, strength=0.05, targets=case.targets)
            prompts = make_prompts(VOCAB_SIZE, LENGTHS)
            if case.quantization is None:
                answers = [greedy_reference(one, prompts, NUM_TOKENS) for one in (path, merged)]
                assert min(gap for _, gap in answers) > TIE
                expected = [ids for ids, _ in answers]
            else:
                with make_llm(path, quantization=case.quantization, enable_lora=True) as llm:
                    expected = [ask(llm, prompts, lora) for lora in (None, LoRARequest("own", 1, adapter))]
            assert expected[0] != expected[1]
            found[key] = Made(path, adapter, prompts, expected)
        return found[key]

    return get


def ask(llm: LLM, prompts: list[list[int]], lora: Any) -> list[list[int]]:
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, greedy(NUM_TOKENS), use_tqdm=False, lora_request=lora)
    assert not [output.error for output in outputs if output.error is not None]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_one_device(make: Callable[[Case], Made], name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = make(case)
    places = list(range(len(LENGTHS))) * case.times
    adapted = [bool((number + number // len(LENGTHS)) % 2) for number in range(len(places))]
    with make_llm(made.path, quantization=case.quantization, **{**CROWDED, **case.sizes}) as llm:
        lora = [LoRARequest("own", 1, made.adapter) if is_adapted else None for is_adapted in adapted]
        found = ask(llm, [made.prompts[place] for place in places], lora)
        assert found == [made.expected[is_adapted][place] for place, is_adapted in zip(places, adapted, strict=True)]
        assert llm.num_preemptions() > 0
        for is_adapted, place in ((False, 3), (True, 4)):  # each alone, twice
            for _ in range(2):
                own = LoRARequest("own", 1, made.adapter) if is_adapted else None
                assert ask(llm, [made.prompts[place]], own) == [made.expected[is_adapted][place]]
        assert llm.kv_cache_usage() == 0.0
