"""Penalties, bias, token sets, min_tokens and bad words against a plain reference, over random batches."""

from __future__ import annotations

import random

import pytest
import torch

from pelton.messages.step import NewRequest
from pelton.sampling_params import SamplingParams
from pelton_platforms.device.sampling.metadata import SideRows
from pelton_platforms.device.sampling.penalties import apply_side_tables
from pelton_platforms.device.steps.side_tables import SideTables

VOCAB, NUM_SIDE_SLOTS, WIDTH = 30, 6, 40
EOS = [2, 5]


def request(chooser: random.Random, slot: int) -> NewRequest:
    """Each feature with even odds."""
    params: dict = {"temperature": 0.0, "max_tokens": 100}
    if chooser.random() < 0.5:
        params |= {"repetition_penalty": chooser.choice([0.7, 1.5]), "presence_penalty": chooser.uniform(-1, 1),
                   "frequency_penalty": chooser.uniform(-1, 1)}  # fmt: skip
    if chooser.random() < 0.5:
        params["logit_bias"] = {chooser.randrange(VOCAB + 5): chooser.uniform(-9, 9) for _ in range(4)}
    if chooser.random() < 0.4:
        params["allowed_token_ids"] = [chooser.randrange(VOCAB) for _ in range(12)]
    if chooser.random() < 0.5:
        params |= {"min_tokens": chooser.randint(1, 8), "stop_token_ids": [chooser.randrange(VOCAB)]}
    words = []
    if chooser.random() < 0.6:
        words = [[chooser.randrange(4) for _ in range(chooser.randint(1, 4))] for _ in range(chooser.randint(1, 12))]
    num_prompt = chooser.randint(1, 10)
    token_ids = [chooser.randrange(4 if words else VOCAB) for _ in range(num_prompt + chooser.randint(0, 10))]
    return NewRequest(
        request_id=str(slot), slot=slot, token_ids=token_ids, num_prompt_tokens=num_prompt, side_slot=slot,
        sampling_params=SamplingParams(**params), eos_token_ids=EOS, bad_words_token_ids=words, block_ids=[[]],
    )  # fmt: skip


def slow(logits: list[float], new: NewRequest, tokens: list[int]) -> list[float]:
    """One row, feature by feature, over Python lists."""
    params, output = new.sampling_params, tokens[new.num_prompt_tokens :]
    logits = list(logits)
    if params.allowed_token_ids is not None:
        logits = [x if t in params.allowed_token_ids else -float("inf") for t, x in enumerate(logits)]
    for word in new.bad_words_token_ids:
        if len(word) == 1 or (output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1):
            logits[word[-1]] = -float("inf")
    if len(output) < params.min_tokens:
        for token in [*new.eos_token_ids, *(params.stop_token_ids or [])]:
            logits[token] = -float("inf")
    for token, bias in (params.logit_bias or {}).items():
        if token < VOCAB:
            logits[token] += bias
    for token in set(tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    return [
        x - params.frequency_penalty * output.count(t) - params.presence_penalty * (t in output)
        for t, x in enumerate(logits)
    ]


def rows_of(tables: SideTables, requests: list[NewRequest], tokens: dict[int, list[int]], order: list[int]) -> SideRows:
    table = torch.zeros(NUM_SIDE_SLOTS, WIDTH, dtype=torch.int32)
    for slot, ids in tokens.items():
        table[slot, : len(ids)] = torch.tensor(ids)
    used = [requests[row].side_slot for row in order]
    slots = torch.tensor(used)
    return SideRows(
        tables=tables, rows=torch.arange(len(order)) * 2, side_slots=slots, slots=slots, token_ids=table,
        positions=torch.tensor([len(tokens[slot]) for slot in used]),
        num_prompt_tokens=torch.tensor([requests[row].num_prompt_tokens for row in order]),
        has_penalties=bool(tables.has_penalties[used].any()), has_bias=bool(tables.has_bias[used].any()),
        has_banned=bool(tables.has_banned[used].any()), has_min_tokens=bool(tables.has_min_tokens[used].any()),
        has_bad_words=bool(tables.has_bad_words[used].any()),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_every_feature_as_the_reference_through_reuse_of_slots(seed):
    chooser = random.Random(seed)
    tables = SideTables(NUM_SIDE_SLOTS, VOCAB, torch.device("cpu"))
    for _ in range(3):  # later rounds take over the slots of earlier ones
        requests = [request(chooser, slot) for slot in range(NUM_SIDE_SLOTS)]
        for new in requests:
            tables.add(new)
        tokens = {new.slot: list(new.token_ids) for new in requests}
        for _ in range(4):
            order = chooser.sample(range(NUM_SIDE_SLOTS), chooser.randint(1, NUM_SIDE_SLOTS))
            logits = torch.randn(2 * len(order), VOCAB) * 3
            before = logits.clone()
            apply_side_tables(logits, rows_of(tables, requests, tokens, order))
            assert torch.equal(logits[1::2], before[1::2])  # rows without a side slot
            for place, row in enumerate(order):
                expected = slow(before[2 * place].tolist(), requests[row], tokens[requests[row].slot])
                assert logits[2 * place].tolist() == pytest.approx(expected, abs=1e-4), (seed, row)
            sampled = [chooser.randrange(4) for _ in order]
            weights = [chooser.randint(0, 1) for _ in order]
            tables.count(torch.tensor([requests[r].side_slot for r in order]), torch.tensor(sampled),
                         torch.tensor(weights, dtype=torch.int32))  # fmt: skip
            for row, token, weight in zip(order, sampled, weights, strict=True):
                tokens[requests[row].slot] += [token] * weight


def test_repetition_penalty_sees_the_prompt_the_others_do_not():
    tables = SideTables(1, VOCAB, torch.device("cpu"))
    new = NewRequest(
        request_id="a", slot=0, token_ids=[7, 8], num_prompt_tokens=1, side_slot=0, block_ids=[[]],
        sampling_params=SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
    )  # fmt: skip
    tables.add(new)
    logits = torch.ones(1, VOCAB)
    apply_side_tables(logits, rows_of(tables, [new], {0: [7, 8]}, [0]))
    assert logits[0, 7] == 0.5
    assert logits[0, 8] == 0.5 - 0.75
    assert logits[0, 9] == 1.0


def test_bad_word_is_banned_where_the_output_ends_with_its_start():
    tables = SideTables(1, VOCAB, torch.device("cpu"))
    new = NewRequest(request_id="a", slot=0, token_ids=[7, 8], num_prompt_tokens=2, side_slot=0, block_ids=[[]],
                     bad_words_token_ids=[[7, 8, 9], [11]], sampling_params=SamplingParams(bad_words=["x"]))  # fmt: skip
    tables.add(new)

    def banned(tokens: list[int]) -> list[int]:
        logits = torch.zeros(1, VOCAB)
        apply_side_tables(logits, rows_of(tables, [new], {0: tokens}, [0]))
        return logits[0].isinf().nonzero().flatten().tolist()

    assert banned([7, 8]) == [11]  # the prompt's own 7 8 does not count
    assert banned([7, 8, 7]) == [11]
    assert banned([7, 8, 7, 8]) == [9, 11]
    assert banned([7, 8, 7, 8, 3]) == [11]


def test_untouched_rows_cost_no_time_to_clear():
    """Freeing needs no call: what a slot's last owner left is cleared by the next one, where it had something."""
    tables = SideTables(2, VOCAB, torch.device("cpu"))
    new = request(random.Random(1), 0)
    tables.add(new)
    plain = NewRequest(request_id="b", slot=0, token_ids=[1], num_prompt_tokens=1, side_slot=0, block_ids=[[]],
                       sampling_params=SamplingParams())  # fmt: skip
    tables.add(plain)
    flags = (tables.has_penalties, tables.has_bias, tables.has_banned, tables.has_min_tokens, tables.has_bad_words)
    assert not any(flag.any() for flag in flags)
    assert not tables.bias.any() and not tables.banned.any() and not tables.stop_ids.any()


def test_drafts_before_a_row_count_as_its_output():
    new = NewRequest(
        request_id="0", slot=0, token_ids=[3, 4], num_prompt_tokens=1, side_slot=0, eos_token_ids=EOS, block_ids=[[]],
        sampling_params=SamplingParams(frequency_penalty=0.5, max_tokens=9), bad_words_token_ids=[],
    )  # fmt: skip
    tables = SideTables(1, VOCAB, torch.device("cpu"))
    tables.add(new)
    side = rows_of(tables, [new], {0: [3, 4]}, [0])
    side.has_penalties, side.draft_rows, side.draft_token_ids = True, torch.tensor([0, 0]), torch.tensor([4, 9])
    logits = torch.zeros(1, VOCAB)
    apply_side_tables(logits, side)
    # Of the output: token 4 once, and two drafts, 4 and 9.
    assert {token: value for token, value in enumerate(logits[0].tolist()) if value} == {4: -1.0, 9: -0.5}
