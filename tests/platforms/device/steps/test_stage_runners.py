"""Stages of a pipeline as workers: which of them waits for which, and what they answer."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.errors import EngineError
from pelton.executor.interface import ExecutorContext
from pelton.kv_cache.planner import plan_kv_cache
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.parallel.communicator import GroupContext
from pelton.plugins import load_plugins
from pelton.testing.executor import VOCAB, new_request, tiny_model
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_plugins.executors.in_process import InProcessExecutor
from pelton_plugins.executors.multiproc.rank import own_plan
from pelton_plugins.executors.one_rank import OneRank

NUM_STAGES, WITHIN_S = 2, 90.0
Messages = defaultdict[tuple[int, int], "queue.Queue[Tensor]"]


class Stages(SimpleNamespace):
    """Between the threads of one process."""

    messages: Messages
    rank: int
    size: int = NUM_STAGES

    def send(self, tensor: Tensor, to: int) -> None:
        self.messages[self.rank, to].put(tensor.clone())

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self.messages[source, self.rank].get(timeout=WITHIN_S))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor] * self.size, dim)  # they start one after another, with layers that are alike


class Stage(InProcessExecutor):
    def __init__(self, rank: int, messages: Messages, model: Any, **settings: Any) -> None:
        self._stages = Stages(rank=rank, messages=messages)
        flat = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "load_format": "dummy",
            "enforce_eager": True,
            **settings,
        }
        config = EngineConfig.from_flat(pipeline_parallel_size=NUM_STAGES, **flat)
        super().__init__(ExecutorContext(config=config, model=model, plugins=load_plugins(only=[])))

    def check_sizes(self, context: ExecutorContext) -> None: ...

    def place(self, context: ExecutorContext, platform: Any) -> tuple[int, GroupContext]:
        stages: Any = self._stages
        return 0, GroupContext(OneRank(), stages)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stage, Stage]]:
    monkeypatch.setattr(CPUPlatform, "share_host", lambda *sizes: None)  # it binds a process of a rank's own to cores
    messages: Messages = defaultdict(queue.Queue)
    made = [Stage(rank, messages, tiny_model()) for rank in range(NUM_STAGES)]
    specs = {name: spec for stage in made for name, spec in stage.kv_cache_specs().items()}
    plan = plan_kv_cache(specs, 2**20, num_blocks_override=40, max_model_len=64)
    for stage in made:
        own = own_plan(plan, stage.kv_cache_specs())
        stage._run(lambda stage=stage, own=own: stage._worker.initialize_kv_cache(own))
    yield made[0], made[1]
    for stage in made:
        stage.shutdown()


def prompt(step_id: int, slot: int, tokens: list[int], **params: Any) -> SchedulerOutput:
    count = len(tokens)
    return SchedulerOutput(
        step_id=step_id, new=[new_request(slot, tokens, 1, **params)], slots=[slot], num_scheduled=[count], samples=[True],
        max_query_len=count, max_seq_len=count, total_num_scheduled_tokens=count,
    )  # fmt: skip


def decode(step_id: int, slots: list[int], seq_len: int) -> SchedulerOutput:
    ones = [1] * len(slots)
    return SchedulerOutput(
        step_id=step_id, slots=slots, num_scheduled=ones, samples=[True] * len(slots), max_query_len=1, max_seq_len=seq_len,
        total_num_scheduled_tokens=len(slots),
    )  # fmt: skip


def result(stage: Stage, output: SchedulerOutput) -> ModelOutput:
    return stage.execute(output).result(WITHIN_S)


PROMPTS = ([5, 6, 7, 8], [9, 10, 11])


def alone(num_steps: int) -> list[list[int]]:
    """What one device answers to both prompts."""
    config = EngineConfig.from_flat(max_num_seqs=4, max_num_batched_tokens=64, load_format="dummy", enforce_eager=True)
    executor = InProcessExecutor(ExecutorContext(config=config, model=tiny_model(), plugins=load_plugins(only=[])))
    try:
        executor.initialize_kv_cache(
            plan_kv_cache(executor.kv_cache_specs(), 2**20, num_blocks_override=40, max_model_len=64)
        )
        found = [
            executor.execute(prompt(slot, slot, tokens)).result().token_ids[0] for slot, tokens in enumerate(PROMPTS)
        ]
        for step in range(num_steps):
            told = executor.execute(decode(2 + step, [0, 1], 8 + step)).result().token_ids
            found = [tokens + new for tokens, new in zip(found, told, strict=True)]
        return found
    finally:
        executor.shutdown()


def test_a_stage_goes_on_with_the_next_step_before_the_last_one_has_begun(stages: tuple[Stage, Stage]) -> None:
    """Were each step to go through all stages before the next, the first would not end one here: the last has not been asked. What the
    last has sampled it takes with the step that needs it."""
    first, last = stages
    steps = [prompt(slot, slot, tokens) for slot, tokens in enumerate(PROMPTS)]
    order: list[str] = []
    for step in steps:
        assert result(first, step).token_ids == [[]]
        order.append(f"first stage ends {step.step_id}")
    found = []
    for step in steps:
        order.append(f"last stage begins {step.step_id}")
        found.append(result(last, step).token_ids[0])
    assert order.index("first stage ends 1") < order.index("last stage begins 0")
    for count in range(3):  # by turns: a step of one request while one of the other is in the last stage
        waiting = []
        for slot in (0, 1):
            step = decode(2 + 2 * count + slot, [slot], 8 + count)
            result(first, step)
            waiting.append(step)
        for slot, step in enumerate(waiting):
            found[slot] += result(last, step).token_ids[0]
    assert found == alone(3)


def test_a_step_that_fails_behind_the_stages_leaves_them_in_order(stages: tuple[Stage, Stage]) -> None:
    """Without masks; the steps before and after it go on, and nobody has to start again."""
    first, last = stages
    steps = [prompt(slot, slot, tokens) for slot, tokens in enumerate(PROMPTS)]
    steps[0].grammar_rows = [0]
    for step in steps:
        result(first, step)
    error = GrammarMasks(step_id=0, bitmask=b"", num_masks=[], error="no masks today")
    failing = last.execute(steps[0])
    last.sample(error)
    first.sample(error)
    with pytest.raises(EngineError, match="no masks today") as caught:
        failing.result(WITHIN_S)
    assert caught.value.others_go_on  # type: ignore[attr-defined]
    tokens = result(last, steps[1]).token_ids[0]
    again = prompt(2, 0, PROMPTS[0])
    result(first, again)
    found = [result(last, again).token_ids[0], tokens]
    last_step = decode(3, [0, 1], 8)
    result(first, last_step)
    told = result(last, last_step).token_ids
    assert [tokens + new for tokens, new in zip(found, told, strict=True)] == alone(1)


def test_masks_hold_up_the_last_stage_alone(stages: tuple[Stage, Stage]) -> None:
    first, last = stages
    step = prompt(0, 0, PROMPTS[0])
    step.grammar_rows = [0]
    result(first, step)
    result(first, prompt(1, 1, PROMPTS[1]))
    waiting = last.execute(step)
    words = bytearray(VOCAB // 8)
    words[2] = 1 << 3
    masks = GrammarMasks(step_id=0, bitmask=bytes(words), num_masks=[1])
    first.sample(masks)
    last.sample(masks)
    assert waiting.result(WITHIN_S).token_ids == [[2 * 8 + 3]]
