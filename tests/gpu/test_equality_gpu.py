"""Greedy ids on the GPU equal transformers' float32 greedy ids on the GPU, in every graph mode and level, whatever happens
to the batch (DESIGN section 10, rule 1). Excepted is what follows a token whose best two logits lie within 1e-4 of each
other in transformers; such ties are listed.

    pytest tests/gpu -p no:xdist
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pelton_common_prefix import PrefixReads, check_common_prefix, prefix_reads, prefix_reference
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts, small_pool

from pelton import LLM, SamplingParams
from pelton.config import CUDAGraphMode
from pelton_platforms.device.graphs.captures import FullGraphs, PiecewiseGraphs

__all__ = ["prefix_reads"]  # a fixture

pytestmark = pytest.mark.gpu

MODES = list(CUDAGraphMode)
WHOLE = (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)
PIECES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE)


def engine(reference: GapReference, **settings: Any) -> LLM:
    return make_llm(reference.path, **({"device": "cuda", "kv_cache_memory_bytes": 2**26} | settings))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were replayed whole, and how many in pieces."""
    counts: Counter[str] = Counter()
    for kind, name in ((FullGraphs, "whole"), (PiecewiseGraphs, "pieces")):
        monkeypatch.setattr(kind, "run", _counted(kind.run, name, counts))
    return counts


def _counted(run: Any, name: str, counts: Counter[str]) -> Any:
    def counted(self: Any, mode: CUDAGraphMode, *args: Any) -> Any:
        counts[name] += mode is not CUDAGraphMode.NONE
        return run(self, mode, *args)

    return counted


def check_everything(llm: LLM, reference: GapReference, num_alone: int = 3) -> None:
    """Together, again with all of it in the prefix cache, continued, and some alone."""
    prompts, params = reference.prompts, greedy(reference.num_tokens)
    reference.check(generate(llm, prompts, params))
    again = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    reference.check([list(o.outputs[0].token_ids) for o in again])
    assert sum(o.num_cached_tokens or 0 for o in again) >= 16 * sum((len(p) - 1) // 16 for p in prompts) // 2
    longer = [p + out[:30] for p, out in zip(prompts, reference.outputs, strict=True)]
    reference.check(generate(llm, longer, greedy(reference.num_tokens - 30)), start=30)
    llm.reset_prefix_cache()
    for index in range(1, len(prompts), len(prompts) // num_alone):
        [ids] = generate(llm, [prompts[index]], params)
        reference.check([ids if i == index else out for i, out in enumerate(reference.outputs)])
    assert llm.kv_cache_usage() == 0.0


def test_ties_of_the_reference_are_few(reference: GapReference) -> None:
    assert len(reference.ties) <= 2, reference.ties


@pytest.mark.parametrize("mode", MODES)
def test_every_graph_mode(reference: GapReference, mode: CUDAGraphMode, replays: Counter[str]) -> None:
    with engine(reference, cudagraph_mode=mode) as llm:
        started = replays.copy()
        check_everything(llm, reference)
    replays -= started
    assert (replays["whole"] > 100) == (mode in WHOLE)
    assert (replays["pieces"] > 0) == (mode in PIECES)


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_level(references: Any, family: str, level: int, replays: Counter[str]) -> None:
    reference = references(family)
    with engine(reference, compilation_config={"level": level}) as llm:
        reference.check(generate(llm, reference.prompts, greedy(reference.num_tokens)))
    assert (replays["whole"] > 50) == (level >= 2)
    assert (replays["pieces"] > 0) == (level >= 1)


@pytest.mark.parametrize(
    "mode, overlap",
    [
        pytest.param(CUDAGraphMode.NONE, True, id="NONE"),
        pytest.param(CUDAGraphMode.FULL, True, id="FULL"),
        pytest.param(CUDAGraphMode.FULL_AND_PIECEWISE, True, id="FULL_AND_PIECEWISE"),
        pytest.param(CUDAGraphMode.FULL_AND_PIECEWISE, False, id="FULL_AND_PIECEWISE-no-overlap"),
    ],
)
def test_chunks_and_preemption(reference: GapReference, mode: CUDAGraphMode, overlap: bool) -> None:
    with engine(
        reference, cudagraph_mode=mode, async_scheduling=overlap, max_model_len=384, max_num_batched_tokens=40,
        num_gpu_blocks_override=small_pool(reference.family),
    ) as llm:  # fmt: skip
        reference.check(generate(llm, reference.prompts, greedy(reference.num_tokens)))
        assert llm.num_preemptions() > 0
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL], ids=str)
def test_a_prompt_alone_is_replayed(reference: GapReference, mode: CUDAGraphMode, monkeypatch: Any) -> None:
    """Its size's graph is captured with the second prompt, and replayed with other prompts, shorter and longer."""
    keys, run = [], FullGraphs.run

    def noted(self: FullGraphs, mode: CUDAGraphMode, key: Any, call: Any) -> Any:
        keys.extend([key] if key.is_prompt and key in self else [])
        return run(self, mode, key, call)

    monkeypatch.setattr(FullGraphs, "run", noted)
    with engine(reference, cudagraph_mode=mode, enable_prefix_caching=False) as llm:
        for _ in range(3):
            found = [generate(llm, [prompt], greedy(8))[0] for prompt in reference.prompts]
            reference.check([ids + output[8:] for ids, output in zip(found, reference.outputs, strict=True)])
    assert len(set(keys)) >= 4 and len(keys) >= 2 * len(set(keys))


def test_soft_caps_and_odd_sizes(variant: GapReference) -> None:
    with engine(variant) as llm:
        check_everything(llm, variant)
    with engine(variant, cudagraph_mode="NONE", block_size=48, max_num_batched_tokens=100) as llm:
        variant.check(generate(llm, variant.prompts, greedy(variant.num_tokens)))


def test_long_contexts_and_large_batches(tmp_path: Any) -> None:
    """Split KV over thousands of tokens beside short rows; more rows than any tile has."""
    from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

    path = make_tiny_checkpoint(tmp_path, "llama", head_dim=64, max_position_embeddings=8192)
    prompts = make_prompts(VOCAB_SIZE, (4097, 2500, 1000, *([40] * 24), *([130] * 12), *([3] * 12)), seed=1)
    reference = gap_reference("llama", str(path), prompts, 24, "cuda")
    settings = {"max_model_len": 8192, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**28}
    with engine(reference, **settings) as llm:
        reference.check(generate(llm, prompts, greedy(24)))
    with engine(reference, **settings, max_num_batched_tokens=1000, cudagraph_mode="FULL") as llm:
        reference.check(generate(llm, prompts, greedy(24)))


def test_eos_and_many_samples(llama: GapReference) -> None:
    eos = llama.outputs[3][20]
    cut = [out[: out.index(eos) + 1] if eos in out else out for out in llama.outputs]
    with engine(llama, hf_overrides={"eos_token_id": eos}, generation_config="pelton", max_num_seqs=5) as llm:
        assert generate(llm, llama.prompts, greedy(llama.num_tokens, ignore_eos=False)) == cut
        params = greedy(llama.num_tokens, temperature=1.0, top_k=1, n=3)
        outputs = llm.generate([{"prompt_token_ids": p} for p in llama.prompts], params, use_tqdm=False)
    assert [[list(c.token_ids) for c in o.outputs] for o in outputs] == [[ids] * 3 for ids in llama.outputs]


@pytest.fixture(scope="module")
def behind_a_prefix(tmp_path_factory: pytest.TempPathFactory) -> GapReference:
    """As many rows and shared tokens as it takes for cascade attention to be chosen."""
    from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("prefix") / "llama"
    path = make_tiny_checkpoint(folder, "llama", head_dim=64, max_position_embeddings=2048)
    return prefix_reference(str(path), VOCAB_SIZE, num_rows=32, prefix_len=1024, device="cuda")


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE], ids=str)
def test_a_prefix_of_all_requests_is_read_once(
    behind_a_prefix: GapReference, prefix_reads: PrefixReads, mode: CUDAGraphMode
) -> None:
    is_captured = mode is not CUDAGraphMode.NONE
    check_common_prefix(behind_a_prefix, prefix_reads, is_captured=is_captured, device="cuda", cudagraph_mode=mode)


SAMPLED = [
    pytest.param({"temperature": 0.9, "top_p": 0.95, "top_k": 50}, id="top-p-and-k"),
    pytest.param({"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3}, id="penalties"),
    pytest.param({"temperature": 1.0, "logit_bias": {17: 3.0}, "logprobs": 2, "frequency_penalty": 0.2}, id="bias"),
]  # fmt: skip


@pytest.mark.parametrize("params", SAMPLED)
def test_seeded_samples_depend_on_neither_batch_mode_nor_device(llama: GapReference, params: dict[str, Any]) -> None:
    prompts = [{"prompt_token_ids": p} for p in llama.prompts]
    each = [
        SamplingParams(seed=100 + i, max_tokens=24, ignore_eos=True, detokenize=False, **params)
        for i in range(len(prompts))
    ]
    results = []
    for settings in (
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"cudagraph_mode": "FULL", "max_num_seqs": 3, "max_num_batched_tokens": 64},
        {"device": "cpu"},
    ):
        with engine(llama, **settings) as llm:
            outputs = llm.generate(prompts, each, use_tqdm=False)
        results.append([list(o.outputs[0].token_ids) for o in outputs])
    assert results[1:] == results[:1] * 3
