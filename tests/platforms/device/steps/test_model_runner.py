"""Steps on a runner whose model reads its whole context through the paged cache: any slip changes the tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pelton_worker_fakes import VOCAB, Driver, PassBackend, make_runner, oracle_greedy, oracle_logits

from pelton.config import CUDAGraphMode
from pelton.errors import EngineError, PluginError
from pelton.kv_transfer.interface import WorkerConnector
from pelton.messages.step import GrammarMasks, ModelOutput, NewRequest, SchedulerOutput
from pelton.sampling.tails import FULL, GREEDY
from pelton.sampling_params import SamplingParams
from pelton.testing.graphs import FakeGraphRecorder
from pelton_platforms.device.graphs.dispatcher import GraphDispatcher
from pelton_platforms.device.kv_pool import KVPool, LayerCache, copies_at_once, handed_blocks
from pelton_platforms.device.steps import masks as mask_places
from pelton_platforms.device.steps.staging import StagingRing
from pelton_platforms.device.steps.step_shapes import padding_shape

PROMPTS = [[5], [7, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], list(range(10, 31)), [8] * 4]


@pytest.fixture(
    params=[
        pytest.param(((4,), None, None), id="one-group"),
        pytest.param(((4, 8), (2, 8), None), id="two-groups"),
        pytest.param(((4, 8), (2, 8), CUDAGraphMode.FULL_DECODE_ONLY), id="decode-graphs"),
        pytest.param(((4,), None, CUDAGraphMode.FULL), id="graphs-of-all-steps"),
    ]
)
def driver(request) -> Driver:
    blocks, kernel, mode = request.param
    runner = make_runner(block_sizes=blocks, kernel_block_sizes=kernel, num_blocks=128)
    if mode is not None:
        runner.use_graphs(GraphDispatcher(mode, max_num_seqs=8, max_num_tokens=64), FakeGraphRecorder())
    return Driver(runner)


def test_batch_decodes_as_each_prompt_alone(driver):
    requests = [driver.add(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    rows = sorted(((r, len(r.token_ids)) for r in requests), key=lambda row: row[1] != 1)
    driver.step(rows)
    driver.decode(requests, 20)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output == oracle_greedy(prompt, 21)


def test_of_a_prompt_only_the_tokens_with_logits_are_asked_for():
    driver = Driver(make_runner())
    request, other = driver.add(0, PROMPTS[3]), driver.add(1, PROMPTS[2], prompt_logprobs=1)
    cuts = []
    for rows in ([(request, 9)], [(request, 12)], [(request, 1), (other, 8)], [(request, 1), (other, 1)]):
        before = driver.runner.model.num_cuts
        driver.step(rows)
        cuts.append(driver.runner.model.num_cuts - before)
    assert cuts == [1, 1, 0, 0], "prompt logprobs read every token, and of decodes there are no others"
    assert request.output == oracle_greedy(PROMPTS[3], 3)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunks_sample_only_with_the_last(driver, chunk):
    request = driver.add(2, PROMPTS[3])
    steps = []
    while request.num_computed < len(PROMPTS[3]):
        result = driver.step([(request, min(chunk, len(PROMPTS[3]) - request.num_computed))])
        steps.append(len(result.token_ids[0]))
    assert steps == [0] * (len(steps) - 1) + [1]
    driver.decode([request], 5)
    assert request.output == oracle_greedy(PROMPTS[3], 6)


def test_steps_are_launched_before_the_values_of_the_step_before_are_read(driver):
    """The host sends counts only: nothing in these outputs depends on a result."""
    first, second = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[1])
    outputs = [driver.plan([(first, 9), (second, 2)])]
    for request in (first, second):
        request.num_computed = len(request.token_ids)
        request.token_ids.append(-1)  # pending
    for _ in range(10):
        outputs.append(driver.plan([(first, 1), (second, 1)]))
        for request in (first, second):
            request.num_computed += 1
            request.token_ids.append(-1)
    results = [driver.runner.execute(output) for output in outputs]
    assert [r.token_ids[0][0] for r in results if r] == oracle_greedy(PROMPTS[2], 11)
    assert [r.token_ids[1][0] for r in results if r] == oracle_greedy(PROMPTS[1], 11)


def test_prefix_hit_starts_in_the_middle(driver):
    first = driver.add(0, PROMPTS[3])
    driver.step([(first, 21)])
    blocks = [table[0].tolist() for table in driver.runner.state.block_tables]
    second = driver.add(1, [*PROMPTS[3][:16], 2, 3])
    second.num_blocks = [16 // size for size in driver.block_sizes]
    second.num_computed = 16
    output = driver.plan([(second, 2)])
    for group, size in enumerate(driver.block_sizes):
        output.new[0].block_ids[group] = blocks[group][: 16 // size] + output.new[0].block_ids[group]
    output.new[0].num_computed_tokens = 16
    result = driver.runner.execute(output)
    assert result is not None
    assert result.token_ids[0] == oracle_greedy([*PROMPTS[3][:16], 2, 3], 1)


def test_resume_in_another_slot_goes_on_where_it_was(driver):
    first, second = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[1])
    driver.step([(first, 9), (second, 2)])
    driver.decode([first, second], 4)
    driver.resume(first, 5)
    driver.step([(second, 1), (first, len(first.token_ids))])
    third = driver.add(0, PROMPTS[3])  # takes the old slot
    driver.step([(first, 1), (second, 1), (third, 21)])
    driver.decode([first, second, third], 3)
    assert first.output == oracle_greedy(PROMPTS[2], 10)
    assert second.output == oracle_greedy(PROMPTS[1], 10)
    assert third.output == oracle_greedy(PROMPTS[3], 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(driver, temperature):
    """Right drafts are accepted whole, wrong ones from their first error on; either way the output is the same."""
    plain = Driver(make_runner(num_blocks=128))
    params = {"temperature": temperature, "seed": 11}
    alone = plain.add(0, PROMPTS[2], **params)
    alone.seed = 11
    plain.step([(alone, 9)])
    plain.decode([alone], 40)
    request, other = driver.add(3, PROMPTS[2], **params), driver.add(1, PROMPTS[1])
    request.seed = 11
    driver.step([(request, 9), (other, 2)])
    chooser = random.Random(3)
    accepted = set()
    while len(request.output) < 30:
        done = len(request.output)
        count, good = chooser.randint(1, 4), chooser.randint(0, 4)
        drafts = [t if i < good else (t + 1) % VOCAB for i, t in enumerate(alone.output[done : done + count])]
        driver.step([(other, 1), (request, 1)], {3: drafts})
        accepted.add((len(request.output) - done - 1, min(good, count)))
    assert all(found == expected for found, expected in accepted)
    assert len(accepted) > 3
    assert request.output == alone.output[: len(request.output)]
    assert other.output == oracle_greedy(PROMPTS[1], len(other.output))


def test_next_step_may_be_launched_while_drafts_are_being_verified(driver):
    """The host counts all drafts as computed; the device knows how many were, and the next step starts there."""
    expected = oracle_greedy(PROMPTS[2], 6)
    request = driver.add(0, PROMPTS[2])
    driver.step([(request, 9)])
    wrong = (expected[2] + 1) % VOCAB
    first = driver.plan([(request, 1)], {0: [expected[1], wrong, expected[3]]})
    request.num_computed += 4  # the upper bound
    request.token_ids += [-1] * 4
    second = driver.plan([(request, 1)])
    results = [driver.runner.execute(first), driver.runner.execute(second)]
    assert [r.token_ids[0] for r in results if r] == [expected[1:3], [expected[3]]]


def test_nan_row_fails_and_the_others_go_on(driver):
    driver.runner.model.poison = {39}
    good, bad = driver.add(0, PROMPTS[2]), driver.add(1, [39, 4])
    driver.step([(good, 9), (bad, 2)])
    assert bad.output == [] and "not finite" in bad.errors[0]
    driver.decode([good], 5)
    assert good.output == oracle_greedy(PROMPTS[2], 6) and not good.errors


def test_token_outside_the_vocabulary_fails_its_row_only(driver):
    good, bad = driver.add(0, PROMPTS[2]), driver.add(1, [4, VOCAB + 7])
    driver.step([(good, 9), (bad, 2)])
    assert bad.output == [] and str(VOCAB + 7) in bad.errors[0]
    assert good.output == oracle_greedy(PROMPTS[2], 1)
    bad.slot = 1
    fresh = driver.add(1, PROMPTS[1])  # the slot's next owner is fine
    driver.step([(good, 1), (fresh, 2)])
    assert fresh.output == oracle_greedy(PROMPTS[1], 1)


def test_failed_forward_raises_and_the_next_step_works(driver):
    request = driver.add(0, PROMPTS[2])
    driver.step([(request, 9)])
    driver.runner.model.fail_next = True
    with pytest.raises(RuntimeError, match="fell over"):
        driver.step([(request, 1)])
    other = driver.add(0, PROMPTS[1])
    driver.step([(other, 2)])
    assert other.output == oracle_greedy(PROMPTS[1], 1)


def bits(allowed: list[list[int]]) -> bytes:
    mask = np.zeros((len(allowed), 64), dtype=np.uint8)
    for row, ids in enumerate(allowed):
        mask[row, ids] = 1
    return np.packbits(mask, axis=1, bitorder="little").tobytes()


def test_grammar_step_waits_for_its_masks(driver):
    free, bound = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[1])
    output = driver.plan([(bound, 2), (free, 9)], grammar_rows=[0])
    assert driver.runner.execute(output) is None
    with pytest.raises(EngineError, match="still waits"):
        driver.runner.execute(SchedulerOutput(step_id=9))
    with pytest.raises(EngineError, match="step 5, but"):
        waiting, driver.runner._pending = driver.runner._pending, None
        driver.runner.sample(GrammarMasks(step_id=5, bitmask=b"", num_masks=[]))
    driver.runner._pending = waiting
    allowed = [3, 33, 38]
    result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=bits([allowed]), num_masks=[1]))
    logits = oracle_logits(PROMPTS[1])
    assert result.token_ids[0] == [max(allowed, key=lambda t: float(logits[t]))]
    assert result.token_ids[1] == oracle_greedy(PROMPTS[2], 1)


def test_a_step_for_which_no_masks_could_be_made_is_forgotten(driver):
    bound = driver.add(1, PROMPTS[1])
    output = driver.plan([(bound, 2)], grammar_rows=[0])
    assert driver.runner.execute(output) is None
    with pytest.raises(EngineError, match="the grammar is broken"):
        driver.runner.sample(
            GrammarMasks(step_id=output.step_id, bitmask=b"", num_masks=[], error="the grammar is broken")
        )
    free = driver.add(0, PROMPTS[2])
    driver.step([(free, len(free.token_ids))])
    assert free.output == oracle_greedy(PROMPTS[2], 1)


def test_masks_travel_with_the_steps_columns(driver, monkeypatch):
    """From pinned memory: a copy from anywhere else waits for all that the device has to do, the forward pass first. On a CPU
    they are written where they are read."""
    free, bound = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[1])
    rows = [(bound, 2), (free, 9)]
    staged, stage, place = [], StagingRing.stage, mask_places.place_words

    def placed(words, slots, bitmask):
        staged.append(np.frombuffer(bitmask, dtype=np.int64))
        place(words, slots, bitmask)

    monkeypatch.setattr(mask_places, "place_words", placed)
    monkeypatch.setattr(StagingRing, "stage", lambda ring, columns: staged.extend(columns) or stage(ring, columns))
    for _ in range(2):  # a step with prompts, then one of decodes
        output = driver.plan(rows, grammar_rows=[0])
        assert driver.runner.execute(output) is None
        staged.clear()
        result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=bits([[3, 33]]), num_masks=[1]))
        driver.take(rows, None, result)
        rows = [(bound, 1), (free, 1)]
        words = np.frombuffer(bits([[3, 33]]), dtype=np.int64)
        assert any(np.array_equal(column, words) for column in staged)
    assert all(token in (3, 33) for token in bound.output) and free.output == oracle_greedy(PROMPTS[2], 2)


def test_grammar_that_allows_nothing_is_an_error_of_its_row(driver):
    free, bound = driver.add(0, PROMPTS[2]), driver.add(1, PROMPTS[1])
    output = driver.plan([(bound, 2), (free, 9)], grammar_rows=[0])
    assert driver.runner.execute(output) is None
    result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=bits([[]]), num_masks=[1]))
    assert result.row_errors[0][0] == 0 and "No token may follow" in result.row_errors[0][1]
    assert result.token_ids == [[], oracle_greedy(PROMPTS[2], 1)]


def test_each_draft_has_its_own_mask(driver):
    request = driver.add(0, PROMPTS[2])
    driver.step([(request, 9)])
    forced = [(oracle_greedy(PROMPTS[2], 2)[1] + 1) % VOCAB, 17]
    output = driver.plan([(request, 1)], {0: forced}, grammar_rows=[0])
    assert driver.runner.execute(output) is None
    masks = bits([[forced[0]], [forced[1]], [5, 6]])
    result = driver.runner.sample(GrammarMasks(step_id=output.step_id, bitmask=masks, num_masks=[3]))
    assert result.token_ids[0][:2] == forced and result.token_ids[0][2] in (5, 6)


def reference_logprobs(tokens: list[int]) -> torch.Tensor:
    return oracle_logits(tokens).log_softmax(-1)


def test_logprobs_are_of_raw_logits_with_ranks(driver):
    asked = driver.add(0, PROMPTS[2], temperature=0.7, logprobs=3, logit_bias={4: 50.0}, side_slot=0)
    plain = driver.add(1, PROMPTS[1])
    result = driver.step([(asked, 9), (plain, 2)])
    assert list(result.logprobs) == [0]
    columns, expected = result.logprobs[0].columns(), reference_logprobs(PROMPTS[2])
    best = expected.topk(3)
    assert result.token_ids[0] == [4]  # by the bias, which the logprobs do not show
    assert columns.token_ids == [[4, *best.indices.tolist()]]
    assert columns.logprobs[0] == pytest.approx([float(expected[4]), *best.values.tolist()], abs=1e-5)
    assert columns.ranks == [int((expected > expected[4]).sum()) + 1]


def test_logprobs_zero_gives_the_chosen_and_minus_one_all(driver):
    none, everything = driver.add(0, PROMPTS[2], logprobs=0), driver.add(1, PROMPTS[1], logprobs=-1)
    result = driver.step([(none, 9), (everything, 2)])
    assert [len(ids) for ids in result.logprobs[0].columns().token_ids] == [1]
    assert [len(ids) for ids in result.logprobs[1].columns().token_ids] == [1 + VOCAB]
    assert result.logprobs[0].columns().ranks == [1]


def test_logprobs_of_accepted_drafts(driver):
    expected = oracle_greedy(PROMPTS[2], 5)
    request = driver.add(0, PROMPTS[2], logprobs=1)
    driver.step([(request, 9)])
    result = driver.step([(request, 1)], {0: [expected[1], expected[2], (expected[3] + 1) % VOCAB]})
    assert result.token_ids[0] == expected[1:4]
    assert [ids[0] for ids in result.logprobs[0].columns().token_ids] == expected[1:4]
    tokens = PROMPTS[2] + expected[:3]
    for place, row in enumerate(result.logprobs[0].columns().logprobs):
        assert row[0] == pytest.approx(float(reference_logprobs(tokens[: 10 + place])[expected[1 + place]]), abs=1e-5)


@pytest.mark.parametrize("chunk", [4, 21])
def test_prompt_logprobs_over_chunks(driver, chunk, monkeypatch):
    monkeypatch.setattr("pelton_platforms.device.steps.step_sampler.PROMPT_LOGPROB_ROWS", 3)
    prompt = PROMPTS[3]
    request, other = driver.add(0, prompt, prompt_logprobs=2), driver.add(1, PROMPTS[1])
    found: list[ModelOutput] = []
    rows = [(other, 2)]
    while request.num_computed < len(prompt):
        found.append(driver.step([*rows, (request, min(chunk, len(prompt) - request.num_computed))]))
        rows = [(other, 1)]
    columns = [result.prompt_logprobs[1].columns() for result in found if 1 in result.prompt_logprobs]
    ids = [row for part in columns for row in part.token_ids]
    logprobs = [row for part in columns for row in part.logprobs]
    ranks = [rank for part in columns for rank in part.ranks]
    assert [row[0] for row in ids] == prompt[1:]
    for place in range(len(prompt) - 1):
        expected = reference_logprobs(prompt[: place + 1])
        assert ids[place][1:] == expected.topk(2).indices.tolist()
        assert logprobs[place][0] == pytest.approx(float(expected[prompt[place + 1]]), abs=1e-5)
        assert ranks[place] == int((expected > expected[prompt[place + 1]]).sum()) + 1
    assert request.output == oracle_greedy(prompt, 1)


def slow_penalized(tokens: list[int], num_prompt: int, repetition: float, presence: float, frequency: float) -> int:
    logits = oracle_logits(tokens).tolist()
    output = tokens[num_prompt:]
    for token in range(VOCAB):
        if token in tokens:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * output.count(token) + presence * (token in output)
    return max(range(VOCAB), key=lambda token: logits[token])


@pytest.mark.parametrize("with_drafts", [False, True])
def test_penalties_count_outputs_over_steps_drafts_and_preemption(driver, with_drafts):
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.9, "frequency_penalty": 0.6}
    expected = list(PROMPTS[2])
    for _ in range(25):
        expected.append(slow_penalized(expected, 9, 1.4, 0.9, 0.6))
    request = driver.add(0, PROMPTS[2], side_slot=1, **penalties)
    other = driver.add(1, PROMPTS[1])
    driver.step([(request, 9), (other, 2)])
    chooser = random.Random(5)
    while len(request.token_ids) < 30:
        if len(request.token_ids) in (15, 16):
            request.side_slot = 2
            driver.resume(request, 4)
            driver.step([(other, 1), (request, len(request.token_ids))])
            continue
        known = len(request.token_ids)
        drafts = [t if chooser.random() < 0.8 else (t + 1) % VOCAB for t in expected[known : known + 3]]
        if with_drafts:
            driver.step([(other, 1), (request, 1)], {request.slot: drafts})
        else:
            driver.decode([request, other], 1)
    assert request.token_ids == expected[: len(request.token_ids)]


def test_min_tokens_ends_after_exactly_that_many(driver):
    """EOS is 2 (see the driver); a bias makes it the best token at every place."""
    request = driver.add(0, PROMPTS[2], side_slot=0, min_tokens=3, logit_bias={2: 90.0})
    driver.step([(request, 9)])
    driver.decode([request], 3)
    assert [token == 2 for token in request.output] == [False, False, False, True]


@pytest.mark.parametrize("with_drafts", [False, True])
def test_bad_words_follow_the_output(driver, with_drafts):
    plain = oracle_greedy(PROMPTS[2], 8)
    expected, word = list(PROMPTS[2]), plain[1:4]
    for _ in range(8):
        logits = oracle_logits(expected)
        if expected[9:][-2:] == word[:2]:
            logits[word[2]] = -torch.inf
        expected.append(int(logits.argmax()))
    assert expected[9:13] != plain[:4]
    request, other = driver.add(0, PROMPTS[2], side_slot=0), driver.add(1, PROMPTS[1])
    request.bad_words = [word]
    driver.step([(request, 9), (other, 2)])
    while len(request.output) < 8:
        if with_drafts:
            driver.step([(other, 1), (request, 1)], {0: plain[len(request.output) :][:3]})
        else:
            driver.decode([request, other], 1)
    assert request.output[:8] == expected[9:]


def test_side_slot_of_another_owner_leaves_nothing_behind(driver):
    first = driver.add(0, PROMPTS[2], side_slot=0, repetition_penalty=1.9, logit_bias={3: 90.0}, min_tokens=5,
                       allowed_token_ids=[3, 2])  # fmt: skip
    driver.step([(first, 9)])
    assert first.output == [3]
    second = driver.add(0, PROMPTS[1], side_slot=0, logit_bias={20: 0.0})
    driver.step([(second, 2)])
    driver.decode([second], 6)
    assert second.output == oracle_greedy(PROMPTS[1], 7)


@pytest.mark.parametrize("block_sizes", [(4,), (4, 8)])
def test_blocks_are_zeroed_when_requests_get_them_for_a_backend_that_asks_for_it(block_sizes, monkeypatch):
    """Those of a new request but for what it found, and those that its table gets later; not for other backends."""
    for asks in (True, False):
        monkeypatch.setattr(PassBackend, "needs_zeroed_blocks", asks)
        driver = Driver(make_runner(block_sizes=block_sizes, num_blocks=16))
        request = driver.add(0, PROMPTS[2])
        output = driver.plan([(request, 9)])
        for page in driver.runner.pool.pages:
            page.fill_(7)
        driver.runner.execute(output)
        for group, size in enumerate(block_sizes):
            values = driver.runner.pool.layers[group].views[1]  # the model writes keys alone
            held = output.new[0].block_ids[group][: -(-9 // size)]
            assert bool((values[held] == 0).all()) is asks
            others = torch.ones(16, dtype=torch.bool)
            others[[block for table in output.new[0].block_ids for block in table]] = False
            assert not (values[others] == 0).any()


def test_blocks_that_requests_get_in_a_step():
    new = NewRequest(
        request_id="a", slot=0, token_ids=[1] * 20, num_prompt_tokens=20, sampling_params=SamplingParams(),
        block_ids=[[5, 6, 7, 8, 9], [0, 12, 13]], num_computed_tokens=10,
    )  # fmt: skip
    output = SchedulerOutput(step_id=0, new=[new], block_appends=[(0, 3, 2, [21, 20]), (1, 3, 1, [0, 22])])
    assert handed_blocks(output, (4, 8)) == [8, 9, 13, 20, 21, 22]  # half of block 7 was loaded


class Connector(WorkerConnector):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.caches: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, caches, layout) -> None:
        self.caches = caches

    def start_load(self, metadata: bytes) -> None:
        self.calls.append(f"load {metadata.decode()}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def take_finished(self):
        return ["sent"], ["got"]

    def take_invalid_block_ids(self):
        return [6]


def test_connector_is_called_around_the_forward_pass(driver):
    connector, model = Connector(), driver.runner.model
    driver.runner.add_connector("store", connector)
    forward = model.forward
    model.forward = lambda batch: (connector.calls.append("forward"), forward(batch))[1]
    request = driver.add(0, PROMPTS[2])
    result = driver.step([(request, 9)], extensions={"store": b"x", "other": b"y"})
    first, *forwards, last = connector.calls  # a graph that is captured runs more than once
    assert (first, {*forwards}, last) == ("load x", {"forward"}, "saved")
    assert (result.finished_sending, result.finished_receiving) == (["sent"], ["got"])
    assert result.invalid_block_ids == [6]
    assert all(page.shape[0] == driver.runner.pool.num_blocks for page in connector.caches.values())
    assert list(connector.caches) == [layer.name for layer in driver.runner.pool.layers]


def test_step_without_rows_still_reaches_connectors(driver):
    connector = Connector()
    driver.runner.add_connector("store", connector)
    result = driver.runner.execute(SchedulerOutput(step_id=4, extensions={"store": b"z"}))
    assert result is not None and result.step_id == 4 and result.token_ids == []
    assert connector.calls == ["load z", "saved"]


@pytest.mark.parametrize(
    "method, found, wanted",
    [
        ("take_finished", None, "two lists of request ids, (sending, receiving)"),
        ("take_finished", ["sent"], "two lists of request ids, (sending, receiving)"),
        ("take_finished", ("sent", ()), "two lists of request ids, (sending, receiving)"),
        ("take_finished", ([], [7]), "two lists of request ids, (sending, receiving)"),
        ("take_invalid_block_ids", None, "a list of block ids"),
        ("take_invalid_block_ids", ["6"], "a list of block ids"),
    ],
)
def test_news_of_a_connector_that_are_something_else_name_it(driver, method, found, wanted):
    connector = Connector()
    setattr(connector, method, lambda: found)
    driver.runner.add_connector("store", connector)
    with pytest.raises(PluginError) as caught:
        driver.runner.execute(SchedulerOutput(step_id=4, extensions={"store": b"z"}))
    assert str(caught.value) == (
        f"The KV connector 'store' ({__name__}:Connector) gives {found!r} from {method}; it has to give {wanted}. Fix the plugin, or "
        "leave it out with PELTON_PLUGINS."
    )


def test_padding_is_sampled_in_each_way_that_is_asked_for(driver, monkeypatch):
    ops, asked = driver.runner.ops, []
    sample = ops.sample
    monkeypatch.setattr(ops, "sample", lambda variant: (asked.append(variant), sample(variant))[1])
    driver.runner.run_padding(padding_shape(3, 3), [GREEDY, FULL])
    assert asked == [GREEDY, FULL]


def test_blocks_are_copied_in_their_order():
    """Whole pages: a chain goes on from what was copied, and a block that is written over was read before."""
    copies = [(1, 2), (3, 1), (2, 4), (1, 5), (6, 7), (7, 6)]
    assert list(copies_at_once(copies)) == [([1, 3], [2, 1]), ([2, 1, 6], [4, 5, 7]), ([7], [6])]
    for width in (3, 16):  # bytes of a page: such as go in words, and others
        memory = torch.arange(8, dtype=torch.uint8).repeat_interleave(width)
        pool = KVPool(8, [LayerCache("a", 0, (memory.view(8, width),))])
        for sources, targets in copies_at_once(copies):
            pool.copy_blocks(torch.tensor(sources), torch.tensor(targets))
        assert memory.view(8, width).tolist() == [[block] * width for block in [0, 3, 1, 3, 1, 3, 6, 6]]
