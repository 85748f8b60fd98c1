"""Greedy ids equal transformers' float32 greedy ids, whatever happens to the batch (DESIGN section 10, rule 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import FAMILIES, NUM_NEW_TOKENS, Reference, generate, greedy, make_llm, small_pool

from pelton import SamplingParams

GREEDY = greedy()


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_has_no_ties(references: Callable[[str], Reference], family: str) -> None:
    assert references(family).min_top2_gap > 1e-4


@pytest.mark.covering(2)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_seqs": 1}, id="alone"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param(
            {"block_size": 8, "enable_prefix_caching": False, "long_prefill_token_threshold": 50}, id="no-prefix-cache"
        ),
        pytest.param({"disable_hybrid_kv_cache_manager": True, "max_num_batched_tokens": 128}, id="no-hybrid"),
    ],
)
def test_ids_equal_transformers(reference: Reference, settings: dict[str, Any], overlap: bool) -> None:
    with make_llm(reference.path, async_scheduling=overlap, **settings) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        assert llm.kv_cache_usage() == 0.0


def test_prefix_hits_change_nothing(reference: Reference) -> None:
    with make_llm(reference.path) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        # All of it again: whole prompts and outputs are in the cache now; and prompts that continue an earlier answer.
        again = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], GREEDY, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in again] == reference.outputs
        assert (
            sum(o.num_cached_tokens or 0 for o in again) >= 16 * sum((len(p) - 1) // 16 for p in reference.prompts) // 2
        )
        longer = [p + out[:12] for p, out in zip(reference.prompts, reference.outputs, strict=True)]
        assert generate(llm, longer, greedy(NUM_NEW_TOKENS - 12)) == [out[12:] for out in reference.outputs]


def test_forced_preemption_changes_nothing(reference: Reference) -> None:
    with make_llm(
        reference.path,
        max_model_len=384,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=small_pool(reference.family),
    ) as llm:
        assert generate(llm, reference.prompts) == reference.outputs
        assert llm.num_preemptions() > 0
        assert llm.kv_cache_usage() == 0.0


def test_eos_in_the_middle_of_a_batch(llama: Reference) -> None:
    eos = llama.outputs[3][12]
    expected = [out[: out.index(eos) + 1] if eos in out else out for out in llama.outputs]
    assert any(len(out) < NUM_NEW_TOKENS for out in expected)
    params = greedy(ignore_eos=False)
    with make_llm(llama.path, hf_overrides={"eos_token_id": eos}, generation_config="pelton", max_num_seqs=5) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in llama.prompts], params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    for output, ids in zip(outputs, expected, strict=True):
        assert output.outputs[0].finish_reason == ("stop" if ids[-1] == eos else "length")


def test_four_samples_of_one_prompt(reference: Reference) -> None:
    """top_k 1 is greedy in law, and n may be more than one."""
    params = SamplingParams(n=4, temperature=1.0, top_k=1, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)
    with make_llm(reference.path) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], params, use_tqdm=False)
    for output, ids in zip(outputs, reference.outputs, strict=True):
        assert [list(c.token_ids) for c in output.outputs] == [ids] * 4
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]


def test_one_prefix_of_64_requests_is_computed_once(llama: Reference) -> None:
    prefix = llama.prompts[-1][:256]
    prompts = [[*prefix, 10 + i, 11] for i in range(64)]
    one = greedy(4)
    with make_llm(llama.path, max_num_seqs=64, max_num_batched_tokens=2048) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], one, use_tqdm=False)
        assert sorted(o.num_cached_tokens or 0 for o in outputs) == [0] + [256] * 63
        together = [list(o.outputs[0].token_ids) for o in outputs]
    with make_llm(llama.path, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert generate(llm, prompts, one) == together


def test_seeded_sampling_does_not_depend_on_the_batch(llama: Reference) -> None:
    def params(i: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.9, top_p=0.95, top_k=50, seed=1000 + i, max_tokens=32, ignore_eos=True, detokenize=False
        )

    with make_llm(llama.path) as llm:
        prompts = [{"prompt_token_ids": p} for p in llama.prompts]
        together = llm.generate(prompts, [params(i) for i in range(16)], use_tqdm=False)
        ids = [list(o.outputs[0].token_ids) for o in together]
        assert len({tuple(x) for x in ids}) == 16
    with make_llm(llama.path, max_num_seqs=1, max_num_batched_tokens=64) as llm:
        for i in reversed(range(16)):
            [alone] = llm.generate([prompts[i]], params(i), use_tqdm=False)
            assert list(alone.outputs[0].token_ids) == ids[i]
