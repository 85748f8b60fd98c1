"""Engines that share their experts (`-dp N -ep`): greedy ids equal transformers' float32 greedy ids, whoever has work."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import Reference, eventually, generate, greedy, greedy_reference, make_llm, references_in
from safetensors.torch import load_file, save_file

from pelton import LLM
from pelton.errors import ConfigError
from pelton.messages.outputs import EngineOutputs
from pelton.testing.models import make_tiny_checkpoint

NUM_TOKENS = 10
LENGTHS = (1, 9, 16, 33, 125, 200)  # half of the prompts go on over an end of a block
TWO = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


def counts(llm: LLM) -> list[dict[str, int]]:
    """Of the first rank of each engine."""
    return [engine.client.call("worker.lock_step_counts") for engine in llm.llm_engine.client._engines]


def settled(llm: LLM) -> list[dict[str, int]]:
    """Counts once all engines have made the last step."""
    assert eventually(lambda: len({one["steps"] + one["dummy_steps"] for one in counts(llm)}) == 1)
    return counts(llm)


def balance_of(llm: LLM) -> dict[str, Any]:
    """Of the first rank."""
    found: dict[str, Any] = llm.llm_engine.client.call("worker.expert_balance")
    return found


def test_ids_equal_transformers(started: tuple[LLM, Reference]) -> None:
    check_ids(*started)


def test_ids_equal_transformers_with_experts_that_all_tokens_take(made: Callable[[str], Reference]) -> None:
    """Steps of many tokens send each to the engines alone that have its experts."""
    reference = made("deepseek_v3_moe")
    with make_llm(reference.path, **TWO) as llm:
        check_ids(llm, reference)
        assert all(found["swapped_layers"] > 0 for found in counts(llm))


def check_ids(llm: LLM, reference: Reference) -> None:
    """In a batch, alone, and in a batch again."""
    assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    before = settled(llm)
    assert generate(llm, reference.prompts[-1:], greedy(NUM_TOKENS)) == reference.outputs[-1:]  # alone, a prefix hit
    after = settled(llm)
    ran, idle = ({name: after[engine][name] - before[engine][name] for name in before[engine]} for engine in range(2))
    assert ran["steps"] == idle["dummy_steps"] >= NUM_TOKENS and idle["steps"] == 0
    time.sleep(0.2)
    assert counts(llm) == after, "engines sleep while nobody has work"
    assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    assert llm.kv_cache_usage() == 0.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_takes_its_group_along_and_all_come_back(
    started: tuple[LLM, Reference], how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, reference = started
    client, engines = llm.llm_engine.client, llm.llm_engine.client._engines
    get_outputs, lost = client.get_outputs, []

    def lose_one(timeout_s: float | None = None) -> EngineOutputs:
        found = get_outputs(timeout_s)
        if found.outputs and not lost:
            lost.append(engines[1].client.pid)
            os.kill(lost[0], how)
        return found

    monkeypatch.setattr(client, "get_outputs", lose_one)
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
    outputs = llm.generate(prompts, greedy(300), use_tqdm=False)
    messages = [output.error.message for output in outputs if output.error is not None]
    assert len(messages) == len(prompts)
    assert any("Engine 1, which ran this request, is gone" in message for message in messages)
    assert any("Cause: engine 1, with which it shares its experts, is gone." in message for message in messages)
    assert eventually(lambda: all(engine.is_up for engine in engines))
    assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.fixture(scope="module")
def started(made: Callable[[str], Reference]) -> Iterator[tuple[LLM, Reference]]:
    reference = made("qwen3_moe")
    with make_llm(reference.path, **TWO, max_num_batched_tokens=48) as llm:
        yield llm, reference


def test_ranks_of_engines(made: Callable[[str], Reference]) -> None:
    """Four ranks; experts that every token takes stay split over those of one engine."""
    reference = made("qwen2_moe")
    settings = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "max_num_batched_tokens": 48}
    with make_llm(reference.path, **TWO, **settings, tensor_parallel_size=2) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_a_draft_with_experts(made: Callable[[str], Reference]) -> None:
    """Each engine has all of the draft's: it makes drafts when the other makes none."""
    reference = made("qwen3_moe")
    speculation = {"method": "draft_model", "model": reference.path, "num_speculative_tokens": 2}
    with make_llm(reference.path, **TWO, speculative_config=speculation, max_num_batched_tokens=48) as llm:
        assert generate(llm, reference.prompts[:3], greedy(NUM_TOKENS)) == reference.outputs[:3]
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"data_parallel_size": 1, "enable_eplb": True}, "no rank has some of the experts whole"),
        ({"enable_eplb": True, "eplb_policy": "none"}, "eplb_config.policy is 'none'; available: default"),
        ({"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts is 2; use 0, or more with enable_eplb"),
        (
            {"eplb_config": {"enable_eplb": True, "num_redundant_experts": 99}},
            r"is 99, and model\.layers\.0\.mlp has .* Use at most",
        ),
        ({"eplb_config": {"step_interval": 0}}, "step_interval is 0; use at least 1"),
        ({"pipeline_parallel_size": 2}, "does not go with engines that share their experts"),
        ({"data_parallel_size_local": 1}, "are all on one host"),
    ],
)
def test_what_does_not_go(made: Callable[[str], Reference], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_llm(made("qwen3_moe").path, **(TWO | settings))


def test_a_model_without_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        make_llm(str(make_tiny_checkpoint(tmp_path / "llama", "llama")), **TWO)


SIZES = {"engines": TWO, "ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True}}


@pytest.mark.parametrize(
    ("family", "sizes", "num_copies"),
    [("qwen3_moe", "engines", 0), ("deepseek_v3_moe", "ranks", 0), ("qwen3_moe", "engines", 3)],
)
def test_experts_move_until_ranks_have_as_much_to_do(
    made: Callable[[str], Reference], family: str, sizes: str, num_copies: int, tmp_path: Path
) -> None:
    """The router gives half of the experts, nearly all of which one rank has, nearly all tokens: the first ones, or the last, of which
    there are no copies at the start. Ids stay, before, while and after moves, and engines know of the same ones."""
    folder, path = shutil.copytree(made(family).path, tmp_path / family), tmp_path / family / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        half = len(tensors[name]) // 2
        if name.endswith("e_score_correction_bias"):
            tensors[name][:half] += 1
        elif name.endswith("mlp.gate.weight") and family == "qwen3_moe":
            parts = tensors[name][:half], tensors[name][half:]
            chosen, others = reversed(parts) if num_copies else parts
            chosen[1::2] = -chosen[::2]  # of each pair one is above 0
            others *= 0.05
    save_file(tensors, path)
    prompts = made(family).prompts
    expected, gap = greedy_reference(str(folder), prompts, 32)
    assert gap > 1e-4
    eplb = {"enable_eplb": True, "step_interval": 12, "window_size": 8, "num_redundant_experts": num_copies}
    with make_llm(str(folder), **SIZES[sizes], eplb_config=eplb, max_num_batched_tokens=64) as llm:
        call = llm.llm_engine.client.call
        assert generate(llm, prompts, greedy(32)) == expected
        call("worker.expert_load", True)
        for _ in range(2):
            assert generate(llm, prompts, greedy(32)) == expected
        loads = call("worker.expert_load")
        halves = [[sum(load[: len(load) // 2]), sum(load[len(load) // 2 :])] for load in loads.values()]
        more, less = sorted(map(sum, zip(*halves, strict=True)), reverse=True)
        assert more > 1.5 * less, "the load is skewed"
        found = balance_of(llm)
        assert found["moves"] > 0
        first, *later = found["balance"]
        assert first < 0.85 and sum(later) / len(later) > first + 0.04, found
        for placement in found["placement"].values():
            assert len(placement) == len(set(placement)) + num_copies
        for engine in getattr(llm.llm_engine.client, "_engines", ()):
            assert engine.client.call("worker.expert_balance") == found


def test_copies_of_experts_that_a_checkpoint_has_in_one_tensor(made: Callable[[str], Reference]) -> None:
    """Of six experts on two ranks: the second begins with the last one and copies of the first four."""
    reference = made("gpt_oss")
    eplb = {"enable_eplb": True, "num_redundant_experts": 4, "step_interval": 16, "window_size": 16}
    with make_llm(reference.path, **SIZES["ranks"], eplb_config=eplb, max_num_batched_tokens=48) as llm:
        for _ in range(2):
            assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert balance_of(llm)["balance"]
