"""Data parallelism over processes of this host: greedy ids equal transformers' float32 greedy ids, whichever engine computes them."""

from __future__ import annotations

import os
import signal

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts
from pelton_pages import settings

from pelton import LLM
from pelton.messages.outputs import EngineOutputs
from pelton.metrics.snapshot import Counter
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))
    prompts = make_prompts(VOCAB_SIZE, (1, 5, 16, 33, 129, 200))
    made = Reference("llama", path, prompts, *greedy_reference(path, prompts, NUM_TOKENS))
    assert made.min_top2_gap > 1e-4
    return made


def generated(llm: LLM) -> dict[str, float]:
    """Tokens by engine."""
    return {
        metric.labels["engine"]: metric.value
        for metric in llm.get_metrics()
        if isinstance(metric, Counter) and metric.name == "pelton_generation_tokens"
    }


def test_two_engines_answer_as_transformers_and_one_that_dies_comes_back(reference: Reference) -> None:
    found = settings("parallelism.md", "smollm2", "-dp")
    with make_llm(reference.path, **found, max_num_batched_tokens=48, disable_log_stats=False) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert generated(llm) == {"0": 3 * NUM_TOKENS, "1": 3 * NUM_TOKENS}
        if len(os.sched_getaffinity(0)) >= 2:
            held = [os.sched_getaffinity(engine.client.pid) for engine in llm.llm_engine.client._engines]
            assert held[0] and held[1] and not held[0] & held[1], "each has cores of its own, where there are enough"
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs  # with prefix hits
        assert llm.reset_prefix_cache() and llm.kv_cache_usage() == 0.0
        second, get_outputs = llm.llm_engine.client._engines[1].client, llm.llm_engine.client.get_outputs

        def once_all_are_sent(timeout_s: float | None = None) -> EngineOutputs:
            patch.undo()
            second.kill("the test kills it")
            return get_outputs(timeout_s)

        os.kill(second.pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.llm_engine.client, "get_outputs", once_all_are_sent)
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False
            )  # fmt: skip
        assert [output.error is not None for output in outputs] == [False, True] * 3
        assert "was killed by SIGKILL. Cause: the test kills it" in outputs[1].error.message
        assert [list(output.outputs[0].token_ids) for output in outputs[::2]] == reference.outputs[::2]
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_ranks_within_engines(reference: Reference) -> None:
    with make_llm(reference.path, data_parallel_size=2, tensor_parallel_size=2, disable_log_stats=False) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert generated(llm) == {"0": 3 * NUM_TOKENS, "1": 3 * NUM_TOKENS}
