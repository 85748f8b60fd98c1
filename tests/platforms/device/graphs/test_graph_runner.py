"""Captured decode steps give what others give: with grammar rows, side tables and logprobs, after captures that failed."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pelton_pinned import PinnedPrepare
from pelton_worker_fakes import VOCAB, Driver, Running, make_runner, oracle_greedy

from pelton.config import CUDAGraphMode
from pelton.messages.step import GrammarMasks, SchedulerOutput
from pelton.ops.speculation import LookupDraftsNeeds
from pelton.sampling.tails import FULL, GREEDY, Logits, Sample, Variant, Verify
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher

PROMPTS = [[7, 9], [3, 1, 4, 1, 5]]
EVERY_TOKEN = np.packbits(np.arange(64) < VOCAB, bitorder="little").tobytes()


@pytest.fixture
def driver() -> Driver:
    runner = make_runner(num_blocks=128)
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64)
    runner.use_graphs(dispatcher, FakeGraphRecorder())
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


def test_graphs_with_and_without_a_common_prefix_share_their_tail(driver, monkeypatch):
    monkeypatch.setattr(driver.runner.graphs, "uses_common_prefix", lambda num_rows, blocks: True)
    requests = prefill(driver)
    for prefix in ([0], [0], [], [], [0], []):
        decode_with_masks(driver, requests, common_prefix_blocks=prefix)
    assert [request.output for request in requests] == [oracle_greedy(prompt, 7) for prompt in PROMPTS]


def test_each_group_is_told_the_prefix_that_its_own_backend_reads_once(monkeypatch):
    """The others' backends, of windows say, would read it as all that a row sees."""
    runner = make_runner(block_sizes=(4, 8), kernel_block_sizes=(2, 8), num_blocks=128)
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64)
    graphs, told = runner.use_graphs(dispatcher, FakeGraphRecorder()), []
    driver = Driver(runner)
    for backend, wants in zip(runner.backends, (True, False), strict=True):
        wanted = lambda num_rows, length, wants=wants: wants and length >= 8  # noqa: E731
        monkeypatch.setattr(backend, "uses_common_prefix", wanted, raising=False)
    batch = runner.ops.forward_batch

    def note(*args):
        told.append(args[5].tolist() if isinstance(args[5], torch.Tensor) else None)
        return batch(*args)

    monkeypatch.setattr(runner.ops, "forward_batch", note)
    requests = prefill(driver)
    rows = [(request, 1) for request in requests]
    for prefix in ([2, 1], [1, 1], []):
        driver.take(rows, None, runner.execute(driver.plan(rows, common_prefix_blocks=prefix)))
    keys = [key for key in graphs.full._captured if key.has_common_prefix]
    assert len(keys) == 1 and [one for one in told if one is not None] == [[8, 0]] * 2, "run, then captured"


def test_all_graphs_that_end_at_logits_leave_them_in_one_place(driver):
    """A row of logits is 600 KB with a large vocabulary: a copy for each size would be gigabytes."""
    requests, places = prefill(driver), set()
    execute = driver.runner.execute

    def look(output: SchedulerOutput) -> object:
        result = execute(output)
        if result is None:
            places.add(driver.runner._program.left_logits(torch.arange(1), 1).data_ptr())
        return result

    driver.runner.execute = look
    for count in (1, 2, 2, 1):
        decode_with_masks(driver, requests[:count])
    assert len(places) == 1
    assert [request.output for request in requests] == [oracle_greedy(PROMPTS[0], 5), oracle_greedy(PROMPTS[1], 3)]


def test_a_call_graph_ends_before_its_logits_and_who_reads_them_computes_them() -> None:
    """Rows under masks, steps without any between them, steps of fewer rows: each has the logits of its own hidden states."""
    runner = make_runner(num_blocks=128)
    dispatcher = GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64)
    runner.use_graphs(dispatcher, CallGraphRecorder())
    driver, asked = Driver(runner), []
    compute = runner.model.compute_logits

    def note(hidden, rows):
        asked.append(len(rows))
        return compute(hidden, rows)

    runner.model.compute_logits = note
    requests = prefill(driver)
    for count in (2, 1, 2, 2, 1):
        decode_with_masks(driver, requests[:count])
        driver.step([(request, 1) for request in requests])
    assert [request.output for request in requests] == [oracle_greedy(PROMPTS[0], 11), oracle_greedy(PROMPTS[1], 9)]
    del asked[:]
    decode_with_masks(driver, requests)
    assert asked == [2], "once, where the masks are at hand"


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


def test_a_rare_size_takes_the_graph_of_a_larger_one_until_it_is_asked_for_often():
    runner = make_runner(num_blocks=128)
    runner.use_graphs(
        GraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64, sizes=[2, 3, 5, 6, 7]),
        FakeGraphRecorder(),
    )
    driver, prompts = Driver(runner), [[slot + 1, 2 * slot + 3] for slot in range(5)]
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    driver.step([(request, len(request.token_ids)) for request in requests])

    def sizes_after(num_rows: int, num_steps: int) -> list[int]:
        for _ in range(num_steps):
            driver.step([(request, 1) for request in requests[:num_rows]])
        return sorted(key.num_reqs for key in runner.graphs.full._captured)

    assert sizes_after(5, 1) == [7], "the largest up to the next power of two"
    assert sizes_after(3, 7) == [5, 7], "one for 3 and 4 rows, though 7 would do"
    assert sizes_after(4, 1) == [5, 7]
    assert sizes_after(3, 1) == [5, 7]
    assert sizes_after(3, 1) == [3, 5, 7]
    assert sizes_after(2, 1) == [2, 3, 5, 7], "a power of two is captured at once"
    counts = [13, 13, 12, 3, 2]
    assert [request.output for request in requests] == [
        oracle_greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)
    ]


def prompts_in_whole(driver: Driver) -> int:
    return sum(key.is_prompt for key in driver.runner.graphs.full._captured)


def test_a_prompt_alone_is_a_graph_once_its_size_has_come_twice():
    runner = make_runner(num_blocks=400)
    runner.use_graphs(
        GraphDispatcher(CUDAGraphMode.FULL, max_num_seqs=8, max_num_tokens=64, captures_prompts=True),
        FakeGraphRecorder(),
    )
    driver, seen = Driver(runner), []
    for index in range(4):
        request = driver.add(index % 3, [(3 * index + place) % VOCAB for place in range(17 + index % 8)])
        driver.step([(request, len(request.token_ids))])
        seen.append(prompts_in_whole(driver))
        driver.decode([request], 2)
        assert request.output == oracle_greedy(request.token_ids[: request.num_prompt_tokens], 3)
    assert seen == [0, 1, 1, 1]
    (graph,) = [captured.graph for key, captured in runner.graphs.full._captured.items() if key.is_prompt]
    assert graph.num_replays == 2

    chunked = driver.add(3, [(place * place) % VOCAB for place in range(40)])
    driver.step([(chunked, 20)])  # the beginning of a prompt is one alone
    assert graph.num_replays == 3
    driver.step([(chunked, 20)])  # the rest is not
    driver.decode([chunked], 2)
    pair = [driver.add(slot, [slot] * 10) for slot in (4, 5)]
    driver.step([(request, 10) for request in pair])  # nor are two
    assert graph.num_replays == 3
    assert chunked.output == oracle_greedy(chunked.token_ids[:40], 3)
    assert [request.output for request in pair] == [oracle_greedy([slot] * 10, 1) for slot in (4, 5)]


def test_a_large_step_waits_for_no_capture_but_its_own():
    graphs = make_runner(num_blocks=400, max_num_tokens=2048).use_graphs(
        GraphDispatcher(CUDAGraphMode.PIECEWISE, max_num_seqs=8, max_num_tokens=2048, max_piecewise_tokens=2048),
        FakeGraphRecorder(),
    )
    mode, key = graphs.dispatcher.dispatch(700, 3)
    assert graphs.at_hand(mode, key) == (mode, key)
    larger = replace(key, num_tokens=832)
    graphs.pieces._captured[larger] = None
    assert [graphs.at_hand(mode, key)[1] for _ in range(8)] == [larger] * 7 + [key]


def test_a_small_step_without_its_graph_captures_the_largest_that_may_stand_in():
    """One capture then serves all sizes on the way up: pieces of few tokens, and steps of decode however many rows they have."""
    graphs = make_runner(num_blocks=400, max_num_tokens=2048).use_graphs(
        GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, max_num_seqs=1024, max_num_tokens=2048), FakeGraphRecorder()
    )
    for tokens, rows, length in ((100, 3, 0), (600, 600, 1)):
        mode, key = graphs.dispatcher.dispatch(tokens, rows, length)
        larger = graphs.dispatcher.stand_ins(key)[-1]
        assert larger.num_tokens > key.num_tokens and graphs.at_hand(mode, key) == (mode, larger)


def test_the_pieces_of_a_prompt_that_could_not_be_captured_serve_it():
    graphs = make_runner(num_blocks=400).use_graphs(
        GraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, max_num_seqs=8, max_num_tokens=64, captures_prompts=True),
        FakeGraphRecorder(),
    )
    prompt = graphs.dispatcher.dispatch(20, 1, is_prompt=True)
    pieces = graphs.dispatcher.dispatch(20, 1)
    graphs.pieces._captured[pieces[1]] = None
    assert [graphs.at_hand(*prompt) for _ in range(3)] == [pieces, prompt, prompt]
    graphs.full._refusals._keys.add(prompt[1])
    assert graphs.at_hand(*prompt) == pieces


def test_room_for_captures_is_recorded_first_and_kept(driver):
    graphs = driver.runner.graphs
    graphs.make_room(1000)
    (room,) = graphs._recorder.graphs
    assert graphs._room is room
    assert max(result.nbytes for *_, results in room.ops for result in results) == 1000


def test_graphs_of_side_tables_that_moved_are_freed(driver):
    requests = [driver.add(slot, prompt, side_slot=slot, repetition_penalty=1.1) for slot, prompt in enumerate(PROMPTS)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    driver.decode(requests, 2)
    decode_with_masks(driver, requests)
    graphs = driver.runner.graphs
    masked = Sample(Variant(has_mask=True), is_apart=True)
    old = {key for key in graphs.full._captured if key.tail != Logits()}
    assert {key.tail for key in old} == {Sample(FULL), masked}
    late = driver.add(2, PROMPTS[0], side_slot=2)
    late.bad_words = [[1] * 20]
    driver.step([(late, 2)])
    driver.decode(requests, 2)
    decode_with_masks(driver, requests)
    assert not old & set(graphs.full._captured)
    found = {(key.tail, key.side_layout) for key in graphs.full._captured}
    assert found == {(Sample(FULL), 1), (Logits(), 0), (masked, 1)}
    graphs.warm_up(CUDAGraphMode.FULL, replace(next(iter(old)), num_tokens=8, num_reqs=8, tail=Sample(FULL)))
    assert {key.side_layout for key in graphs.full._captured if key.num_reqs == 8} == {1}


def new_request(driver: Driver, slot: int, side_slots: list[int], chooser: random.Random) -> Running:
    """Any of what a request may ask for. Words of 20 tokens make side tables move."""
    params: dict[str, Any] = chooser.choice([{}, {"temperature": 1.3, "top_p": 0.9}])
    if chooser.random() < 0.3:
        params = params | {"logprobs": chooser.choice([0, 3, 20, -1])}
    words, side_slot = [], -1
    if side_slots and chooser.random() < 0.4:
        side_slot, params = side_slots.pop(), params | {"repetition_penalty": 1.3}
        words = [[chooser.randrange(38) for _ in range(length)] for length in chooser.choice([(), (2,), (2, 20)])]
    length = chooser.randint(1, 9) if chooser.random() < 0.6 else chooser.randint(17, 24)
    prompt = [chooser.randrange(VOCAB) for _ in range(length)]
    request = driver.add(slot, prompt, seed=chooser.randrange(99), side_slot=side_slot, **params)
    request.bad_words = words
    return request


def random_steps(mode: CUDAGraphMode, seed: int, *, is_pinned: bool = False) -> list[object]:
    """What each step gave: tokens, errors, logprobs. is_pinned: decode steps read and write pinned memory."""
    chooser, runner = random.Random(seed), make_runner(block_sizes=(4, 8), kernel_block_sizes=(2, 8), num_blocks=2000)
    runner.model.poison = {39}
    if mode is not CUDAGraphMode.NONE:
        dispatcher = GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64, captures_prompts=True)
        recorder = FakeGraphRecorder()
        if is_pinned:
            runner.ops.prepare_inputs = PinnedPrepare(runner, recorder)
        graphs = runner.use_graphs(dispatcher, recorder)
        graphs.uses_common_prefix = lambda num_rows, blocks: True  # type: ignore[method-assign]
    driver, side_slots, given = Driver(runner), [0, 1, 2, 3], []
    running: dict[int, Running] = {}
    for _ in range(50):
        free = [slot for slot in range(8) if slot not in running]
        fresh = []
        if free and chooser.random() < 0.35:
            fresh.append(new_request(driver, chooser.choice(free), side_slots, chooser))
        is_alone = any(len(request.token_ids) > 9 for request in fresh)
        rows = [(request, 1) for request in running.values() if not is_alone and chooser.random() < 0.8]
        rows = sorted(rows + [(request, len(request.token_ids)) for request in fresh], key=lambda row: row[1] != 1)
        running |= {request.slot: request for request in fresh}
        masked = [row for row in range(len(rows)) if chooser.random() < 0.5] if chooser.random() < 0.4 else []
        allowed = np.array([[chooser.random() < 0.6 for _ in range(64)] for _ in masked], dtype=bool)
        prefix = [0, 0] if not fresh and chooser.random() < 0.4 else []
        output = driver.plan(rows, grammar_rows=masked, common_prefix_blocks=prefix)
        result = runner.execute(output)
        if masked:
            bitmask = np.packbits(allowed, axis=1, bitorder="little").tobytes()
            result = runner.sample(GrammarMasks(step_id=output.step_id, bitmask=bitmask, num_masks=[1] * len(masked)))
        driver.take(rows, None, result)  # type: ignore[arg-type]
        logprobs = {
            row: (columns.token_ids, np.round(columns.logprobs, 4).tolist(), columns.ranks)
            for row, columns in ((row, packed.columns()) for row, packed in result.logprobs.items())
        }
        given.append((result.token_ids, result.row_errors, logprobs))
        for request, _ in rows:
            if request.errors or len(request.token_ids) > 70 or chooser.random() < 0.05:
                del running[request.slot]
                side_slots += [request.side_slot] if request.side_slot >= 0 else []
    if mode is CUDAGraphMode.FULL:
        assert prompts_in_whole(driver) == 1, "a prompt alone was captured, and replayed after that"
    if is_pinned:
        prepare = runner.ops.prepare_inputs
        assert prepare.num_taken == int(graphs._columns._pinned._turn) > 20 and prepare.num_given > 10
    return given


@pytest.mark.parametrize("seed", [0, 1])
def test_captured_steps_give_what_others_give(seed):
    expected = random_steps(CUDAGraphMode.NONE, seed)
    assert random_steps(CUDAGraphMode.FULL_DECODE_ONLY, seed) == expected
    assert random_steps(CUDAGraphMode.FULL, seed) == expected


@pytest.mark.parametrize("seed", [2, 3])
def test_steps_that_take_their_columns_from_pinned_memory_give_what_others_give(seed):
    expected = random_steps(CUDAGraphMode.NONE, seed)
    assert random_steps(CUDAGraphMode.FULL_DECODE_ONLY, seed, is_pinned=True) == expected
    assert random_steps(CUDAGraphMode.FULL, seed, is_pinned=True) == expected


def test_a_step_that_failed_leaves_the_columns_of_the_next_in_turn(driver):
    """Before it was captured, behind where it took its own."""
    runner, recorder = driver.runner, FakeGraphRecorder()
    runner.ops.prepare_inputs = PinnedPrepare(runner, recorder)
    runner.use_graphs(runner.graphs.dispatcher, recorder)
    requests = prefill(driver)
    runner.model.fail_next = True
    output = driver.plan([(request, 1) for request in requests])
    with pytest.raises(RuntimeError, match="the device fell over"):
        runner.execute(output)
    driver.decode(requests, 5)
    assert [request.output for request in requests] == [oracle_greedy(prompt, 6) for prompt in PROMPTS]


def with_drafts(lookup: LookupDraftsNeeds | None, **limits: int) -> Driver:
    """At most three drafts a row; decode steps with and without them are captured, and read and write pinned memory."""
    runner = make_runner(num_blocks=400, **limits)
    runner.ops.use_drafts(3, lookup)
    dispatcher = GraphDispatcher(
        CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64, sizes=[1, 2, 4, 8, 16], decode_query_len=4
    )
    recorder = FakeGraphRecorder()
    runner.ops.prepare_inputs = PinnedPrepare(runner, recorder)
    runner.use_graphs(dispatcher, recorder)
    return Driver(runner)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_of_the_host_are_verified_in_a_graph(temperature: float) -> None:
    """Right ones, wrong ones, rows with fewer and with none; the same ids as alone."""
    alone, expected = Driver(make_runner(num_blocks=400)), []
    for slot, prompt in enumerate([*PROMPTS, [8] * 6]):
        request = alone.add(slot, prompt, seed=slot, temperature=temperature)
        alone.step([(request, len(prompt))])
        alone.decode([request], 40)
        expected.append(request.output)
    driver, chooser = with_drafts(None), random.Random(5)
    requests = [
        driver.add(slot, prompt, seed=slot, temperature=temperature) for slot, prompt in enumerate([*PROMPTS, [8] * 6])
    ]
    driver.step([(request, len(request.token_ids)) for request in requests])
    num_accepted = 0
    for _ in range(12):
        drafts = {}
        for request in requests:
            known = len(request.output)
            own = expected[request.slot][known : known + chooser.randrange(4)]
            drafts[request.slot] = [token if chooser.random() < 0.7 else (token + 1) % VOCAB for token in own]
        result = driver.step([(request, 1) for request in requests], drafts)
        num_accepted += sum(len(tokens) - 1 for tokens in result.token_ids)
        assert result.num_draft in ([], [len(drafts[request.slot]) for request in requests])
    assert num_accepted > 8
    for request, tokens in zip(requests, expected, strict=True):
        assert request.output == tokens[: len(request.output)]
    keys = [key.uniform_query_len for key in driver.runner.graphs.full._captured]
    assert 4 in keys and set(keys) <= {1, 4}, "drafts leave no graph"


def test_a_call_graph_verifies_rows_that_all_have_their_drafts() -> None:
    """Where the device is this process, padding would be computed like any token."""
    runner = make_runner(num_blocks=400)
    runner.ops.use_drafts(3, None)
    dispatcher = GraphDispatcher(
        CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8, max_num_tokens=64, sizes=range(1, 33), decode_query_len=4
    )
    graphs, driver = runner.use_graphs(dispatcher, CallGraphRecorder()), Driver(runner)
    expected = [oracle_greedy(prompt, 60) for prompt in PROMPTS]
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    num_calls, chooser = [], random.Random(3)
    for index in range(10):
        drafts = {}
        for slot, request in enumerate(requests):
            own = expected[slot][len(request.output) : len(request.output) + 3]
            drafts[slot] = [token if chooser.random() < 0.7 else (token + 1) % VOCAB for token in own]
        if index in (0, 5):
            drafts[0] = drafts[0][:2]
        before = runner.model.num_calls
        driver.step([(request, 1) for request in requests], drafts)
        num_calls.append(runner.model.num_calls - before)
    assert num_calls == [1, 1, 0, 0, 0, 1, 0, 0, 0, 0], "the second is recorded, the sixth has fewer drafts"
    assert {key.tail for key in graphs.full._captured} == {Verify(GREEDY)}
    assert min(len(request.output) for request in requests) > 15
    assert [request.output for request in requests] == [
        tokens[: len(request.output)] for request, tokens in zip(requests, expected, strict=True)
    ]


def test_drafts_of_the_device_are_made_and_verified_in_a_graph() -> None:
    """A text of few tokens, whose n-grams come again: most drafts are wrong, and cost nothing but their place."""
    driver = with_drafts(LookupDraftsNeeds(num_drafts=3, longest=2, shortest=1))
    prompts = [[3, 4] * 6, [5, 6, 7]]
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    made = []
    for index in range(10):
        counts = [3, index % 3]
        rows = [(request, 1 + count) for request, count in zip(requests, counts, strict=True)]
        output = driver.plan(rows, num_draft=counts, samples=[True, True])
        result = driver.runner.execute(output)
        for request, tokens in zip(requests, result.token_ids, strict=True):
            request.num_computed += len(tokens)
            request.token_ids += tokens
        made += [(found, count) for found, count in zip(result.num_draft or [0, 0], counts, strict=True)]
    assert all(found <= count for found, count in made) and any(found for found, _ in made)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == oracle_greedy(prompt, len(request.output))
    assert {key.uniform_query_len for key in driver.runner.graphs.full._captured} == {4}


def test_a_prompt_beside_drafted_rows_and_rows_that_ask_for_more_are_sampled_by_torch_ops() -> None:
    driver = with_drafts(None)
    first, second = driver.add(0, PROMPTS[0]), driver.add(1, PROMPTS[1], logprobs=2)
    driver.step([(first, 2), (second, 5)])
    expected = [oracle_greedy(prompt, 30) for prompt in PROMPTS]
    later = driver.add(2, [4, 4, 4])
    driver.step([(first, 1), (later, 3)], {0: expected[0][1:3]})
    driver.step([(first, 1), (second, 1)], {0: expected[0][4:6], 1: expected[1][1:2]})
    assert [first.output, second.output] == [expected[0][:7], expected[1][:3]]
    assert later.output == oracle_greedy([4, 4, 4], 1)
    assert len(driver.runner.graphs.full) == 0


def test_a_whole_prompt_of_several_tokens_alone_is_dispatched_as_one(driver, monkeypatch):
    graphs, asked = driver.runner.graphs, []

    def dispatch(self: Any, *sizes: int, is_prompt: bool, has_lora: bool) -> Any:
        asked.append(is_prompt)
        return CUDAGraphMode.NONE, None

    monkeypatch.setattr(GraphDispatcher, "dispatch", dispatch)
    for num_reqs, num_tokens, longest in ((1, 2, 2), (1, 1, 1), (1, 3, 5), (2, 3, 3)):
        shape = SimpleNamespace(num_reqs=num_reqs, num_tokens=num_tokens, max_seq_len=longest)
        graphs.place(SimpleNamespace(shape=shape))
    assert asked == [True, False, False, False]
