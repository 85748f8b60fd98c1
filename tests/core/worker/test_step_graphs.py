"""Decode steps with grammar rows: one graph to the logits, one from there, whatever was captured before or could not be."""

from __future__ import annotations

import numpy as np
import pytest
from pelton_worker_fakes import VOCAB, Driver, Running, make_runner, oracle_greedy

from pelton.config import CUDAGraphMode
from pelton.graphs.dispatcher import GraphDispatcher
from pelton.scheduler.output import GrammarMasks, SchedulerOutput
from pelton.testing.graphs import TapeRecorder

PROMPTS = [[7, 9], [3, 1, 4, 1, 5]]
EVERY_TOKEN = np.packbits(np.arange(64) < VOCAB, bitorder="little").tobytes()


@pytest.fixture
def driver() -> Driver:
    runner = make_runner(num_blocks=128)
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64)
    runner.use_graphs(dispatcher, TapeRecorder())
    return Driver(runner)


def prefill(driver: Driver) -> list[Running]:
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    return requests


def decode_with_masks(driver: Driver, requests: list[Running], **extra: object) -> None:
    rows = [(request, 1) for request in requests]
    output: SchedulerOutput = driver.plan(rows, grammar_rows=[0], **extra)
    assert driver.runner.execute(output) is None
    result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=EVERY_TOKEN, num_masks=[1]))
    driver.take(rows, None, result)


def test_graphs_with_and_without_a_common_prefix_each_have_their_own_tail(driver, monkeypatch):
    """Their logits lie at two addresses."""
    monkeypatch.setattr(driver.runner.graphs, "uses_common_prefix", lambda num_rows, blocks: True)
    requests = prefill(driver)
    for prefix in ([0], [0], [], [], [0], []):
        decode_with_masks(driver, requests, common_prefix_blocks=prefix)
    assert [request.output for request in requests] == [oracle_greedy(prompt, 7) for prompt in PROMPTS]


def test_logits_that_could_not_be_captured_are_sampled_without_a_graph(driver, monkeypatch):
    requests = prefill(driver)
    recorder = driver.runner.graphs.full._recorder
    end = recorder.end

    def fails_once():
        monkeypatch.setattr(recorder, "end", end)
        end()
        raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(recorder, "end", fails_once)
    for _ in range(3):
        decode_with_masks(driver, requests)
    assert [request.output for request in requests] == [oracle_greedy(prompt, 4) for prompt in PROMPTS]
