"""Pipeline parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pelton_e2e import Reference, generate, greedy, make_llm, references_in

from pelton import LLM

NUM_TOKENS = 16
LENGTHS = (1, 5, 16, 33, 129, 200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS, with_tokenizer=True)


@pytest.mark.parametrize("family", ["cohere2", "olmo2", "gemma3", "glm4"])
def test_two_stages_answer_as_transformers(made: Callable[[str], Reference], family: str) -> None:
    """Batched, with recorded steps; then each prompt alone, chunked, with prefix hits. cohere2: only the last stage has a layer without
    a window. olmo2: layers hand over no residual. gemma3 and glm4: a layer's output has a norm that the next one applies."""
    reference = made(family)
    with make_llm(reference.path, pipeline_parallel_size=2, max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        alone = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in reference.prompts[3:]]
        assert alone == reference.outputs[3:]
        assert llm.kv_cache_usage() == 0.0


def test_stages_of_two_ranks_with_whole_experts(made: Callable[[str], Reference]) -> None:
    reference = made("deepseek_v3_moe")
    with make_llm(reference.path, pipeline_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_unequal_stages_with_preemption_and_drafts(made: Callable[[str], Reference]) -> None:
    reference = made("llama")
    with make_llm(
        reference.path, pipeline_parallel_size=3, pipeline_layer_partition=(1, 2, 1), max_model_len=256,
        max_num_batched_tokens=64, num_gpu_blocks_override=21,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_each_stage_has_its_own_weights_and_cache_alone(made: Callable[[str], Reference]) -> None:
    """Of four layers two stages have two each: what the ranks hold together is one model, and room for twice the tokens of one rank."""
    path = made("olmo2").path
    memory = {"kv_cache_memory_bytes": 2**20, "enforce_eager": True}
    with make_llm(path, **memory) as llm:
        whole, blocks = weights_and_blocks(llm)
    with make_llm(path, pipeline_parallel_size=2, **memory) as llm:
        staged, staged_blocks = weights_and_blocks(llm)
    assert whole <= staged <= 1.01 * whole  # the last norm is small, and everywhere
    assert staged_blocks == 2 * blocks


def weights_and_blocks(llm: LLM) -> tuple[int, int]:
    info = llm.llm_engine.info
    return info.report.weights_bytes, info.num_blocks
