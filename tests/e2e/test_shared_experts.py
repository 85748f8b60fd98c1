"""Engines that share their experts (`-dp N -ep`): greedy ids equal transformers' float32 greedy ids, whoever has work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import Reference, generate, greedy, make_llm, references_in

from pelton import LLM
from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint

NUM_TOKENS = 16
LENGTHS = (1, 5, 16, 33, 129, 200)
TWO = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


def counts(llm: LLM) -> list[dict[str, int]]:
    """Of the first rank of each engine."""
    return [engine.client.call("worker.lock_step_counts") for engine in llm.llm_engine.client._engines]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3_moe"])
def test_ids_equal_transformers(made: Callable[[str], Reference], family: str) -> None:
    reference = made(family)
    with make_llm(reference.path, **TWO, max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        before = counts(llm)
        assert (
            generate(llm, reference.prompts[-1:], greedy(NUM_TOKENS)) == reference.outputs[-1:]
        )  # alone, a prefix hit
        after = counts(llm)
        ran, idle = (
            {name: after[engine][name] - before[engine][name] for name in before[engine]} for engine in range(2)
        )
        assert ran["steps"] == idle["dummy_steps"] >= NUM_TOKENS and idle["steps"] == 0
        time.sleep(0.2)
        assert counts(llm) == after, "engines sleep while nobody has work"
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_takes_its_group_along_and_all_come_back(
    started: tuple[LLM, Reference], how: signal.Signals
) -> None:
    llm, reference = started
    engines = llm.llm_engine.client._engines
    lost_at: list[float] = []

    def lose() -> None:
        lost_at.append(time.monotonic())
        os.kill(engines[1].client.pid, how)

    threading.Timer(0.3, lose).start()
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
    outputs = llm.generate(prompts, greedy(300), use_tqdm=False)
    assert time.monotonic() - lost_at[0] < 1.5
    messages = [output.error.message for output in outputs if output.error is not None]
    assert len(messages) == len(prompts)
    assert any("Engine 1, which ran this request, is gone" in message for message in messages)
    assert any("Cause: engine 1, with which it shares its experts, is gone." in message for message in messages)
    deadline = time.monotonic() + 30
    while not all(engine.is_up for engine in engines):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.fixture(scope="module")
def started(made: Callable[[str], Reference]) -> Iterator[tuple[LLM, Reference]]:
    reference = made("qwen3_moe")
    with make_llm(reference.path, **TWO) as llm:
        yield llm, reference


def test_ranks_of_engines(made: Callable[[str], Reference]) -> None:
    """Four ranks; experts that every token takes stay split over those of one engine."""
    reference = made("qwen2_moe")
    settings = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "max_num_batched_tokens": 48}
    with make_llm(reference.path, **TWO, **settings, tensor_parallel_size=2) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline_parallel_size": 2}, "does not go with engines that share their experts"),
        ({"data_parallel_size_local": 1}, "are all on one host"),
    ],
)
def test_what_does_not_go(made: Callable[[str], Reference], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_llm(made("qwen3_moe").path, **TWO, **settings)


def test_a_model_without_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        make_llm(str(make_tiny_checkpoint(tmp_path / "llama", "llama")), **TWO)
