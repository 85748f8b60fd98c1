"""Decode context parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids, with the KV cache of a head
spread over ranks token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, references_in
from pelton_lora import merged_checkpoint

from pelton import LLM, LoRARequest, SamplingParams
from pelton.errors import ConfigError

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block
SPREAD = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
ROOM = 2**22  # bytes of KV cache


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS, with_tokenizer=True)


@pytest.fixture(scope="module")
def spread(made: Callable[[str], Reference]) -> Iterator[LLM]:
    """An engine of two ranks, for tests that leave it as it was."""
    with make_llm(
        made("qwen3").path, **SPREAD, enable_lora=True, max_num_batched_tokens=48, kv_cache_memory_bytes=ROOM
    ) as llm:
        yield llm


def check_ids(llm: LLM, reference: Reference) -> None:
    """Batched, with recorded steps; then each prompt alone, chunked, with prefix hits."""
    assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[3:]]
    assert alone == reference.outputs[3:]
    assert llm.kv_cache_usage() == 0.0


def test_two_ranks_with_a_half_of_the_one_key_heads_cache_each(made: Callable[[str], Reference], spread: LLM) -> None:
    check_ids(spread, made("qwen3"))


def test_two_ranks_with_a_half_of_the_latents_each(made: Callable[[str], Reference]) -> None:
    with make_llm(made("deepseek_v3_moe").path, **SPREAD, max_num_batched_tokens=48) as llm:
        check_ids(llm, made("deepseek_v3_moe"))


@pytest.mark.parametrize(
    "family, sizes", [("llama", SPREAD | {"tensor_parallel_size": 4}), ("deepseek_v2", SPREAD)], ids=["llama", "deepseek_v2"]
)  # fmt: skip
def test_preemption_and_drafts(made: Callable[[str], Reference], family: str, sizes: dict[str, int]) -> None:
    """Two key heads on four ranks: each pair of ranks shares the cache of one. Every step may have a row of several tokens."""
    reference = made(family)
    with make_llm(
        reference.path, **sizes, max_model_len=256, max_num_batched_tokens=64, num_gpu_blocks_override=11,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_it_samples_what_one_device_samples(made: Callable[[str], Reference], spread: LLM) -> None:
    """With seeds, filters, penalties and `n`; in as much memory a rank there is room for twice the tokens."""
    prompts = [{"prompt_token_ids": prompt} for prompt in made("qwen3").prompts]
    params = SamplingParams(temperature=0.9, seed=7, top_k=20, top_p=0.9, presence_penalty=0.4, n=2, max_tokens=20)

    def answers(llm: LLM) -> tuple[list[list[list[int]]], int]:
        outputs, info = llm.generate(prompts, params, use_tqdm=False), llm.llm_engine.info
        sampled = [[list(one.token_ids) for one in output.outputs] for output in outputs]
        return sampled, info.num_blocks * info.block_size

    with make_llm(made("qwen3").path, kv_cache_memory_bytes=ROOM) as llm:
        alone, room = answers(llm)
    assert answers(spread) == (alone, 2 * room)


def test_adapters_and_sleep(
    made: Callable[[str], Reference], spread: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = made("qwen3")
    adapter, merged = merged_checkpoint(tmp_path_factory.mktemp("own"), reference.path, seed=3, rank=8, strength=0.05)
    expected, _ = greedy_reference(merged, reference.prompts, NUM_TOKENS)
    spread.sleep(1)
    spread.wake_up()
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
    outputs = spread.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False, lora_request=LoRARequest("own", 1, adapter))
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected != reference.outputs


@pytest.mark.parametrize(
    "family, settings, said",
    [
        ("llama", SPREAD, "of 2 key heads tensor_parallel_size 2 keeps 1 copy each"),
        ("qwen3", {"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, "does not divide tensor_parallel_size 3"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(
    made: Callable[[str], Reference], family: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"decode_context_parallel_size is 2.*{said}"):
        make_llm(made(family).path, **settings)
