"""Decode context parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids, with the KV cache of a head
spread over ranks token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, references_in
from pelton_lora import merged_checkpoint

from pelton import LoRARequest, SamplingParams
from pelton.errors import ConfigError

NUM_TOKENS = 16
LENGTHS = (1, 5, 16, 33, 129, 200)
SPREAD = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS, with_tokenizer=True)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3_moe"])
def test_two_ranks_with_a_half_of_the_cache_each(made: Callable[[str], Reference], family: str) -> None:
    """One key head, and latents: batched, with recorded steps; then each prompt alone, chunked, with prefix hits."""
    reference = made(family)
    with make_llm(reference.path, **SPREAD, max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[3:]]
        assert alone == reference.outputs[3:]
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_four_ranks_in_pairs_with_preemption_and_drafts(made: Callable[[str], Reference], family: str) -> None:
    """Two key heads on four ranks: each pair of ranks shares the cache of one. Every step may have a row of several tokens."""
    reference = made(family)
    with make_llm(
        reference.path, tensor_parallel_size=4, decode_context_parallel_size=2, max_model_len=256, max_num_batched_tokens=64,
        num_gpu_blocks_override=11, speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_it_samples_what_one_device_samples(made: Callable[[str], Reference]) -> None:
    """With seeds, filters, penalties and `n`; in as much memory a rank there is room for twice the tokens."""
    prompts = [{"prompt_token_ids": prompt} for prompt in made("qwen3").prompts]
    params = SamplingParams(temperature=0.9, seed=7, top_k=20, top_p=0.9, presence_penalty=0.4, n=2, max_tokens=20)

    def answers(**settings: Any) -> tuple[list[list[list[int]]], int]:
        with make_llm(made("qwen3").path, kv_cache_memory_bytes=2**22, **settings) as llm:
            outputs, info = llm.generate(prompts, params, use_tqdm=False), llm.llm_engine.info
            sampled = [[list(one.token_ids) for one in output.outputs] for output in outputs]
            return sampled, info.num_blocks * info.block_size

    (alone, room), (spread, spread_room) = answers(), answers(**SPREAD)
    assert spread == alone and spread_room == 2 * room


def test_adapters_and_sleep(made: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = made("qwen3")
    adapter, merged = merged_checkpoint(tmp_path, reference.path, seed=3, rank=8, strength=0.05)
    expected, _ = greedy_reference(merged, reference.prompts, NUM_TOKENS)
    with make_llm(reference.path, enable_lora=True, **SPREAD) as llm:
        llm.sleep(1)
        llm.wake_up()
        prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False, lora_request=LoRARequest("own", 1, adapter))
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected != reference.outputs


@pytest.mark.parametrize(
    "family, settings, said",
    [
        ("llama", SPREAD, "of 2 key heads tensor_parallel_size 2 keeps 1 copy each"),
        ("qwen3", {"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, "does not divide tensor_parallel_size 3"),
        ("qwen3", SPREAD | {"kv_transfer_config": {"kv_connector": "shared_storage"}}, "does not go with kv_transfer_config"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(
    made: Callable[[str], Reference], family: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"decode_context_parallel_size is 2.*{said}"):
        make_llm(made(family).path, **settings)
