"""Requests whose own numbers are NaN, among others: they fail alone, and what they leave in their blocks reaches nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import generate, greedy, make_llm, make_prompts

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 12
GOOD = make_prompts(VOCAB_SIZE, (3, 16, 33, 70, 40))


@pytest.fixture(scope="module", params=["llama", "mistral"])
def spoilt_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int, list[list[int]]]:
    """A checkpoint, a token whose embedding is NaN, and what it answers to good prompts. Mistral's layers have windows."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("spoilt")
    make_tiny_checkpoint(path, request.param, with_tokenizer=False, tie_word_embeddings=False)
    with make_llm(str(path), enforce_eager=True) as llm:
        expected = generate(llm, GOOD, greedy(NUM_TOKENS))
    spoilt = min(
        set(range(VOCAB_SIZE)) - {token for tokens in (*GOOD, *expected) for token in tokens} - {11, 12, 20, 21}
    )
    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][spoilt] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return str(path), spoilt, expected


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "native"},
        {"attention_backend": "sdpa"},
        {"attention_backend": "native", "max_num_batched_tokens": 16},
        {"attention_backend": "native", "enforce_eager": True, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_they_fail_alone_and_their_blocks_serve_others(
    spoilt_model: tuple[str, int, list[list[int]]], settings: dict[str, Any]
) -> None:
    (path, spoilt, expected), params = spoilt_model, greedy(NUM_TOKENS)
    bad = [[spoilt], [*GOOD[3][:32], spoilt, 20, 21], [11] * 15 + [spoilt] + [12] * 30]
    with make_llm(path, num_gpu_blocks_override=14, max_model_len=128, max_num_seqs=4, **settings) as llm:
        for _ in range(3):  # in blocks that the others had, in other orders
            mixed = [GOOD[0], bad[0], GOOD[1], bad[2], GOOD[2], bad[1], GOOD[4]]
            outputs = llm.generate([{"prompt_token_ids": p} for p in mixed], params, use_tqdm=False)
            for prompt, output in zip(mixed, outputs, strict=True):
                (completion,) = output.outputs
                if spoilt in prompt:
                    assert completion.finish_reason == "error" and not completion.token_ids
                else:
                    assert list(completion.token_ids) == expected[GOOD.index(prompt)]
        (output,) = llm.generate([{"prompt_token_ids": GOOD[3]}], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected[3]
        assert not output.num_cached_tokens, "a prefix of a request that failed is not found"
