"""Greedy ids with drafts equal transformers' float32 greedy ids on the GPU, in every kind of graph mode, made here or there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pelton_drafts import eagle, eagle3, medusa
from pelton_e2e import generate, greedy, make_llm, small_pool

from pelton import SamplingParams
from pelton_platforms.device.graphs.captures import FullGraphs

pytestmark = pytest.mark.gpu

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3, "min_acceptance_rate": 0.0,
}  # fmt: skip


def counts(llm: Any) -> dict[str, int]:
    return {metric.name.partition("spec_decode_")[2]: getattr(metric, "value", 0) for metric in llm.get_metrics()}


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {"cudagraph_mode": "FULL_AND_PIECEWISE"}),
        ("llama", {"cudagraph_mode": "FULL", "async_scheduling": False}),
        ("llama", {"cudagraph_mode": "NONE"}),
        ("qwen3", {"cudagraph_mode": "FULL_AND_PIECEWISE", "drafts_on_device": False}),
        ("gemma3", {"cudagraph_mode": "FULL_AND_PIECEWISE"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_greedy_ids_are_those_without_drafts(
    references: Any, family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, settings, keys, run = references(family), dict(settings), [], FullGraphs.run

    def noted(self: FullGraphs, mode: Any, key: Any, call: Any) -> Any:
        keys.append(key.uniform_query_len)
        return run(self, mode, key, call)

    monkeypatch.setattr(FullGraphs, "run", noted)
    speculation = NGRAM | {"drafts_on_device": settings.pop("drafts_on_device", None)}
    with make_llm(
        reference.path, device="cuda", speculative_config=speculation, disable_log_stats=False, **settings
    ) as llm:
        keys.clear()
        reference.check(generate(llm, reference.prompts, greedy(reference.num_tokens)))
        found = counts(llm)
        assert llm.kv_cache_usage() == 0.0
    assert 0 < found["num_accepted_tokens"] < found["num_draft_tokens"]
    assert (keys.count(4) > 10) == (settings["cudagraph_mode"] != "NONE")


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("method", ["draft_model", "medusa", "eagle", "eagle3"])
def test_drafts_from_weights_of_their_own(references: Any, tmp_path: Path, method: str, mode: str) -> None:
    reference = references("llama")
    makers = {"medusa": medusa, "eagle": eagle, "eagle3": eagle3}
    model = makers[method](tmp_path / "head", reference.path) if method in makers else reference.path
    with make_llm(
        reference.path, device="cuda", disable_log_stats=False, cudagraph_mode=mode, max_num_batched_tokens=64,
        speculative_config={"method": method, "model": model, "num_speculative_tokens": 3, "min_acceptance_rate": 0.0},
    ) as llm:  # fmt: skip
        reference.check(generate(llm, reference.prompts, greedy(reference.num_tokens)))
        found = counts(llm)
    assert found["num_draft_tokens"] > 0
    assert method != "draft_model" or found["num_accepted_tokens"] > 0.9 * found["num_draft_tokens"]


def test_chunks_and_preemption(references: Any) -> None:
    reference = references("llama")
    with make_llm(
        reference.path, device="cuda", speculative_config=NGRAM, max_model_len=384, max_num_batched_tokens=40,
        num_gpu_blocks_override=small_pool("llama"),
    ) as llm:  # fmt: skip
        reference.check(generate(llm, reference.prompts, greedy(reference.num_tokens)))
        assert llm.num_preemptions() > 0


def test_seeded_samples_are_those_without_drafts(references: Any) -> None:
    """In float32, where a number decides between two tokens as it does without drafts but for the last bits."""
    reference = references("llama")
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=11, max_tokens=32, ignore_eos=True)
    found = []
    for speculation in ({}, {"speculative_config": NGRAM}):
        with make_llm(reference.path, device="cuda", **speculation) as llm:
            found.append(generate(llm, reference.prompts, params))
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= len(reference.prompts) - 1
