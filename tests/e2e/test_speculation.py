"""Speculation with n-grams: the same ids in every mode, greedy or sampled, and counts that add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pelton_e2e import Reference, generate, make_llm, small_pool

from pelton import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(params=["llama", "gemma3"])  # the two shapes of caches: full attention, and windows beside it
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def repeating(reference: Reference) -> list[list[int]]:
    """Prompts with their own answers in them, twice: drafts are right for a while, and wrong behind it."""
    pairs = zip(reference.prompts, reference.outputs, strict=True)
    return [(prompt + output) * 2 + prompt for prompt, output in pairs if len(prompt) < 60]


@pytest.fixture(scope="module")
def undrafted(references: Callable[[str], Reference]) -> Callable[[str], list[list[int]]]:
    """From family to the greedy ids of `repeating` without drafts."""

    @cache
    def get(family: str) -> list[list[int]]:
        reference = references(family)
        with make_llm(reference.path) as llm:
            return generate(llm, repeating(reference))

    return get


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="overlap"),
        pytest.param({"drafts_on_device": True}, id="on-device"),
        pytest.param(
            {"drafts_on_device": True, "max_num_batched_tokens": 16, "cudagraph_mode": "NONE"},
            id="on-device-chunked-eager",
        ),
        pytest.param({"async_scheduling": False, "max_num_batched_tokens": 16}, id="chunked-no-overlap"),
        pytest.param({"max_num_seqs": 1, "cudagraph_mode": "NONE"}, id="alone-eager"),
        pytest.param({"tensor_parallel_size": 2, "drafts_on_device": True}, id="two-ranks"),
    ],
)
def test_greedy_ids_are_those_without_drafts(
    reference: Reference, undrafted: Callable[[str], list[list[int]]], settings: dict[str, Any]
) -> None:
    prompts, settings = repeating(reference), dict(settings)
    speculation = NGRAM | {"drafts_on_device": settings.pop("drafts_on_device", None)}
    expected = undrafted(reference.family)
    with make_llm(reference.path, speculative_config=speculation, disable_log_stats=False, **settings) as llm:
        assert generate(llm, prompts) == expected
        metrics = {(metric.name, str(metric.labels)): getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert llm.kv_cache_usage() == 0.0
    found = {name: sum(v for (n, _), v in metrics.items() if n.endswith(name)) for name in COUNTERS}
    assert 0 < found["num_accepted_tokens"] < found["num_draft_tokens"] <= 4 * found["num_drafts"]
    assert found["num_accepted_tokens_per_pos"] == found["num_accepted_tokens"]


COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


@pytest.mark.parametrize("on_device", [False, True])
def test_seeded_samples_are_those_without_drafts(llama: Reference, on_device: bool) -> None:
    """A draft is kept when it equals the token that is sampled in its place, by a number that rests on (seed, position)."""
    prompts = repeating(llama)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=48, ignore_eos=True)
    with make_llm(llama.path) as llm:
        expected = generate(llm, prompts, params)
    with make_llm(llama.path, speculative_config=NGRAM | {"drafts_on_device": on_device}) as llm:
        assert generate(llm, prompts, params) == expected


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_survive_preemption(reference: Reference, on_device: bool) -> None:
    with make_llm(
        reference.path,
        speculative_config=NGRAM | {"drafts_on_device": on_device},
        max_model_len=384,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=small_pool(reference.family),
    ) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        assert llm.num_preemptions() > 0
