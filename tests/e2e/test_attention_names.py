"""Attention backends by vLLM's names answer as transformers does in float32, whatever happens to the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pelton_e2e import Reference, generate, greedy, make_llm, references_in

from pelton.errors import ConfigError

NUM_TOKENS = 5
LENGTHS = (1, 16, 33, 70)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


@pytest.mark.parametrize(
    "family, name",  # Gemma 2 has windows and soft caps
    [("gemma2", "FLEX_ATTENTION"), ("gemma2", "TORCH_SDPA"), ("llama", "TORCH_SDPA"), ("llama", "CPU_ATTN")],
)
def test_a_named_backend_answers_as_transformers(made: Callable[[str], Reference], family: str, name: str) -> None:
    """Batched, in chunks, with preemption; then each prompt alone, with prefix hits."""
    reference = made(family)
    tight = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 12, "max_model_len": 80}
    with make_llm(reference.path, attention_backend=name, **tight) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[2:]]
        assert alone == reference.outputs[2:]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("TREE_ATTN", "drafts that branch"),
        ("FLASH_ATTN", "for this model and device there is"),
        ("FLASHMLA", "for this model and device"),
    ],
)
def test_a_name_that_cannot_serve_says_why(made: Callable[[str], Reference], name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_llm(made("llama").path, attention_backend=name)
