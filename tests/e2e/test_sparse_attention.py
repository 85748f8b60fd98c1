"""Attention to the tokens that an indexer chooses: what of it `test_cache_kinds.py` does not go through.

The indexer of the tiny checkpoint chooses 16 tokens of prompts with up to 200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts, references_in

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 17
LENGTHS = (3, 17, 40, 90, 200)
TOP_K = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    made: Callable[[str], Reference] = references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)
    found = made("deepseek_v32")
    assert found.min_top2_gap > 1e-4
    return found


@pytest.mark.parametrize("top_k", [8, 32, 512])
def test_another_number_of_chosen_tokens_gives_other_ids(reference: Reference, top_k: int) -> None:
    """So the choice of `test_ids_equal_transformers` counts. With as many tokens as are chosen or fewer, nothing changes."""
    with make_llm(reference.path, hf_overrides={"index_topk": top_k}) as llm:
        found = generate(llm, reference.prompts, greedy(NUM_TOKENS))
    assert all(own != ids for own, ids in zip(found[1:], reference.outputs[1:], strict=True))
    seen = max(min(top_k, TOP_K) - LENGTHS[0], 1)  # tokens from contexts that either choice has all of
    assert found[0][:seen] == reference.outputs[0][:seen]


def test_all_tokens_chosen_is_transformers_with_all(tmp_path: Any) -> None:
    path = str(make_tiny_checkpoint(tmp_path, "deepseek_v32", with_tokenizer=False, index_topk=300))
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected, _ = greedy_reference(path, prompts, NUM_TOKENS)
    with make_llm(path, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected


def test_the_indexers_keys_take_the_bytes_of_their_own_layers(reference: Reference) -> None:
    """48 numbers of a latent and 24 of an indexer's key for each token and layer."""
    with make_llm(reference.path, kv_cache_memory_bytes=4 * 16 * (48 + 24) * 4 * 100) as llm:
        assert llm.llm_engine.info.num_blocks == 100


@pytest.mark.parametrize("block_size", [1, 8, 48])
def test_block_sizes_change_nothing(reference: Reference, block_size: int) -> None:
    with make_llm(reference.path, block_size=block_size, max_num_batched_tokens=64) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_drafts_change_nothing(reference: Reference) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    repeated = [prompt + ids for prompt, ids in zip(reference.prompts, reference.outputs, strict=True)]
    with make_llm(reference.path) as llm:
        plain = generate(llm, repeated, greedy(NUM_TOKENS))
    with make_llm(reference.path, speculative_config=drafts) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert generate(llm, repeated, greedy(NUM_TOKENS)) == plain


@pytest.mark.parametrize(
    "settings, reason",
    [
        pytest.param({"kv_cache_dtype": "fp8_e4m3"}, "sdpa_sparse .*: kv dtype fp8_e4m3, only auto", id="8-bits"),
        pytest.param(
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2, and this model's indexer compares all tokens",
            id="shared-cache",
        ),
        pytest.param({"attention_backend": "sdpa_mla"}, "sdpa_mla' cannot serve this model", id="named"),
        pytest.param({"hf_overrides": {"q_lora_rank": None}}, "q_lora_rank is None", id="no-query-latent"),
    ],
)
def test_what_is_refused_says_why(reference: Reference, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(reference.path, **settings)
