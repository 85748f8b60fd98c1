"""Skipped steps leave what as many single steps would have left."""

from __future__ import annotations

import random

import pytest

from pelton.messages.step import ModelOutput
from pelton.testing.scheduler import Harness, make_request

TOKEN = 7


def grown(overlap: int, *, skips: bool, seed: int, prefix_caching: bool = True) -> tuple[dict, list, int]:
    """Serve random requests, with steps that are skipped where they may be. (tokens, times of ends, free blocks at the end)."""
    rng = random.Random(seed)
    harness = Harness(num_blocks=40, max_steps_in_flight=overlap, prefix_caching=prefix_caching)
    scheduler = harness.scheduler
    step, ends, num_told, arrivals, num_skipped = 0, [], {}, [], 0
    for index in range(10):
        arrivals.append((rng.randrange(60), make_request(f"r{index}", rng.randrange(2, 20), rng.randrange(2, 40))))
    arrivals.sort(key=lambda pair: pair[0])
    while arrivals or scheduler.has_unfinished_requests() or harness.open:
        while arrivals and arrivals[0][0] <= step:
            request = arrivals.pop(0)[1]
            num_told[request.request_id] = 0
            scheduler.add_request(request)
        while len(harness.open) < overlap and (output := scheduler.schedule()) is not None:
            harness.open.append((output, None))
        if not harness.open:
            step += 1
            continue
        # What comes at a step is in the last that is opened there: no step is skipped past it.
        most = arrivals[0][0] - step - 1 if arrivals else 1000
        most = scheduler.skipper.most(most) if skips and len(harness.open) == overlap else 0
        if most > 0:
            scheduler.skipper.skip(most, TOKEN)
            for request in scheduler._table.running:
                num_told[request.request_id] += most
            step += most
            num_skipped += most
            continue
        output, _ = harness.open.popleft()
        result = result_of(output)
        for told in scheduler.update(output, result):
            num_told[told.request_id] += len(told.new_token_ids)
            if told.finish_reason is not None:
                ends.append((step, told.request_id))
        step += 1
    assert bool(num_skipped) == skips
    return num_told, ends, harness.kv.num_free_blocks


def result_of(output):
    return ModelOutput(step_id=output.step_id, token_ids=[[TOKEN] if samples else [] for samples in output.samples])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [1, 2])
def test_a_skip_is_as_many_steps(overlap, prefix_caching):
    for seed in range(20):
        one_by_one = grown(overlap, skips=False, seed=seed, prefix_caching=prefix_caching)
        assert grown(overlap, skips=True, seed=seed, prefix_caching=prefix_caching) == one_by_one


def test_nothing_is_skipped_while_a_request_waits_or_a_prompt_is_computed():
    harness = Harness(max_num_seqs=1)
    harness.scheduler.add_request(make_request("a", 6, 20))
    first = harness.scheduler.schedule()
    assert harness.scheduler.skipper.most(100) == 0  # its prompt is in the open step
    harness.scheduler.update(first, result_of(first))
    harness.scheduler.schedule()
    assert harness.scheduler.skipper.most(100) == 18  # of 20: one is there, and one is in the open step
    harness.scheduler.add_request(make_request("b", 6, 20))
    assert harness.scheduler.skipper.most(100) == 0


def test_skips_end_before_blocks_run_out():
    harness = Harness(num_blocks=5)  # 16 tokens
    harness.scheduler.add_request(make_request("a", 6, 10))
    first = harness.scheduler.schedule()
    harness.scheduler.update(first, result_of(first))
    harness.scheduler.schedule()
    assert harness.scheduler.skipper.most(100) == 8
