"""Mixtures of experts: greedy ids equal transformers' float32 greedy ids, whatever happens to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2_moe", "deepseek_v3_moe", "gpt_oss")
NUM_TOKENS = 32
LENGTHS = (1, 5, 16, 33, 129, 200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """From family to its checkpoint with transformers' answers."""
    known: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in known:
            path = str(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, with_tokenizer=False))
            prompts = make_prompts(VOCAB_SIZE, LENGTHS)
            known[family] = Reference(family, path, prompts, *greedy_reference(path, prompts, NUM_TOKENS))
        return known[family]

    return get


@pytest.fixture(params=FAMILIES)
def reference(request: pytest.FixtureRequest, made: Callable[[str], Reference]) -> Reference:
    return made(request.param)


def test_reference_has_no_ties(reference: Reference) -> None:
    assert reference.min_top2_gap > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 1, "enforce_eager": True}, id="alone"),
        pytest.param({"max_num_batched_tokens": 16, "async_scheduling": False}, id="chunked"),
    ],
)
def test_ids_equal_transformers(reference: Reference, settings: dict[str, Any]) -> None:
    with make_llm(reference.path, **settings) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.kv_cache_usage() == 0.0


def test_prefix_hits_change_nothing(reference: Reference) -> None:
    with make_llm(reference.path) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        again = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in again] == reference.outputs
        assert sum(o.num_cached_tokens or 0 for o in again) >= 256


def test_preemption_changes_nothing(reference: Reference) -> None:
    with make_llm(reference.path, max_model_len=256, max_num_batched_tokens=64, num_gpu_blocks_override=1 + 20) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_quantization_of_experts_is_refused_with_its_reason(made: Callable[[str], Reference]) -> None:
    from pelton.errors import ConfigError

    with pytest.raises(ConfigError, match="experts, which this version keeps in the model's dtype"):
        make_llm(made("mixtral").path, quantization="fp8")
