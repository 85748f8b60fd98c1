"""Models that run on transformers' modules give transformers' float32 greedy ids, whatever happens to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts
from pelton_transformers import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

NUM_TOKENS = 10  # prompts of 16, 40 and 90 go on over an end of a block
LENGTHS = (1, 5, 16, 17, 40, 90)

References = Callable[[str], GapReference]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """From a model_type to its checkpoint with transformers' answers."""
    made: dict[str, GapReference] = {}

    def get(model_type: str) -> GapReference:
        if model_type not in made:
            path = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type)
            prompts = make_prompts(VOCAB_SIZE, LENGTHS)
            made[model_type] = gap_reference(model_type, path, prompts, NUM_TOKENS, "cpu")
            assert len({token for output in made[model_type].outputs for token in output}) > 8
        return made[model_type]

    return get


def check(reference: GapReference, **settings: Any) -> None:
    """Chunked and batched, again with hits of the prefix cache, continued, and one alone."""
    prompts, params = reference.prompts, greedy(NUM_TOKENS)
    defaults = {"model_impl": "transformers", "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with make_llm(reference.path, **(defaults | settings)) as llm:
        reference.check(generate(llm, prompts, params))
        again = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        reference.check([list(o.outputs[0].token_ids) for o in again])
        if settings.get("enable_prefix_caching", True):
            assert sum(o.num_cached_tokens or 0 for o in again) >= 64
        longer = [p + out[:6] for p, out in zip(prompts, reference.outputs, strict=True)]
        reference.check(generate(llm, longer, greedy(NUM_TOKENS - 6)), start=6)
        llm.reset_prefix_cache()
        assert generate(llm, prompts[3:4], params) == reference.outputs[3:4]
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_ids_equal_transformers(references: References, model_type: str) -> None:
    reference = references(model_type)
    assert len(reference.ties) <= 1, reference.ties
    check(reference)


@pytest.mark.covering(2)
@pytest.mark.parametrize("model_type", ["phi3", "falcon", "gemma2", "mixtral", "opt"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 1, "max_num_batched_tokens": 512}, id="alone"),
        pytest.param({"async_scheduling": False, "block_size": 8}, id="small-blocks"),
        pytest.param({"disable_hybrid_kv_cache_manager": True, "enable_prefix_caching": False}, id="no-hybrid"),
    ],
)
def test_settings_change_nothing(
    references: References, model_type: str, settings: dict[str, Any], enforce_eager: bool
) -> None:
    check(references(model_type), enforce_eager=enforce_eager, **settings)
