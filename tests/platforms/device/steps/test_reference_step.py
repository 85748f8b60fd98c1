"""The references of `prepare_inputs` and `sample`: what a step of the runner does, for rows by slot, with padding."""

from __future__ import annotations

import random

import pytest
import torch

from pelton.messages.step import NewRequest
from pelton.ops.interface import PrepareInputsNeeds, PrepareInputsTensors, SampleNeeds, SampleTensors
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK
from pelton.sampling.logprobs import LogprobTensors, gather_logprobs
from pelton.sampling_params import SamplingParams
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.sampling.metadata import SamplingMetadata
from pelton_platforms.device.sampling.penalties import apply_side_tables
from pelton_platforms.device.sampling.sampler import sample
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import ReferencePrepareInputs, ReferenceSample

VOCAB, NUM_SEQS, MAX_LEN = 70, 8, 40


def make_state(num_side_slots: int = 4) -> BatchState:
    return BatchState(
        max_num_seqs=NUM_SEQS, max_model_len=MAX_LEN, vocab_size=VOCAB, block_sizes=(4,),
        num_side_slots=num_side_slots, device=torch.device("cpu"),
    )  # fmt: skip


def add(state: BatchState, slot: int, tokens: list[int], *, side_slot: int = -1, seed: int = 0, bad_words=(), **params):
    """A request whose last token is to be computed in the step."""
    new = NewRequest(
        request_id=str(slot), slot=slot, token_ids=tokens, num_prompt_tokens=max(len(tokens) - 2, 1),
        num_computed_tokens=len(tokens) - 1, sampling_params=SamplingParams(**params), block_ids=[[1 + slot]],
        side_slot=side_slot, seed=seed, bad_words_token_ids=list(bad_words), eos_token_ids=[2],
    )  # fmt: skip
    state.add([new])


def bind(state: BatchState, *, variant: str = "full", num_logprobs: int = 0, **tensors):
    needs = SampleNeeds(
        vocab_size=VOCAB, max_num_seqs=NUM_SEQS, variant=variant, has_mask="mask" in tensors, num_logprobs=num_logprobs
    )
    assert ReferenceSample.unsupported(needs) == []
    return ReferenceSample.bind(needs, SampleTensors(state=state, **tensors))


def run(op, logits: torch.Tensor, slots: list[int]) -> list[list[int]]:
    result = torch.full((len(slots), 2), -7, dtype=torch.int32)
    op(logits.clone(), torch.tensor(slots), result)
    return result.tolist()


def test_greedy_takes_the_first_of_equal_tokens_and_advances():
    state = make_state()
    add(state, 3, [5, 6, 7], temperature=0)
    add(state, 0, [4], temperature=0)
    logits = torch.zeros(3, VOCAB)
    logits[0, [9, 30]] = 2.0
    logits[1, 69] = 1.0
    padding = state.padding_slot
    assert run(bind(state, variant="greedy"), logits, [3, 0, padding]) == [[9, OK], [69, OK], [0, 0]]
    assert state.token_ids[3, :5].tolist() == [5, 6, 7, 9, 0] and state.token_ids[0, :3].tolist() == [4, 69, 0]
    assert state.num_computed_tokens.tolist() == [1, 0, 0, 3, 0, 0, 0, 0, 0]
    assert not state.token_ids[padding].any()


@pytest.mark.parametrize("variant", ["greedy", "full"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_row_that_is_not_finite_says_so_and_advances(variant, value):
    state = make_state()
    for slot in (0, 1):
        add(state, slot, [4, 5], temperature=0 if variant == "greedy" else 1)
    logits = torch.zeros(2, VOCAB)
    if value is None:
        logits[0] = -float("inf")
    else:
        logits[0, 11] = value
    logits[1, 1] = 100.0
    (token, code), good = run(bind(state, variant=variant), logits, [0, 1])
    assert code == NOT_FINITE and 0 <= token < VOCAB and good == [1, OK]
    assert state.num_computed_tokens[:2].tolist() == [2, 2] and state.token_ids[0, 2] == token


def test_a_token_past_the_longest_length_goes_to_the_spare_column():
    state = make_state()
    add(state, 2, [1] * (MAX_LEN - 1), temperature=0)
    op, logits = bind(state, variant="greedy"), torch.zeros(1, VOCAB)
    for step in range(3):
        logits[0, 10 + step] = 1.0 + step
        assert run(op, logits, [2]) == [[10 + step, OK]]
    assert state.token_ids[2, MAX_LEN - 2 :].tolist() == [1, 10, 12]


def test_masks_go_by_slot_and_forbid_what_lies_past_their_words():
    state = make_state()
    for slot in (1, 4, 5):
        add(state, slot, [3, 4], temperature=0)
    words = torch.zeros(NUM_SEQS + 1, 2, dtype=torch.int32)  # 64 of 70 tokens
    words[4, 0] = 1 << 6 | 1 << 9
    has_mask = torch.zeros(NUM_SEQS + 1, dtype=torch.bool)
    has_mask[[4, 5]] = True
    logits = torch.arange(VOCAB).float().expand(4, -1)
    got = run(bind(state, mask=(words, has_mask)), logits, [5, 1, 4, state.padding_slot])
    assert [code for _, code in got] == [NOTHING_ALLOWED, OK, OK, 0]
    assert [token for token, _ in got[1:]] == [69, 9, 0]


def test_logprobs_come_from_the_raw_logits():
    state = make_state()
    add(state, 1, [3, 4], temperature=0.5, top_k=3, logit_bias={7: 50.0}, side_slot=0)
    add(state, 0, [3, 4], temperature=0)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    target = LogprobTensors(torch.zeros(4, 6).long(), torch.zeros(4, 6), torch.zeros(4).long())
    got = run(bind(state, num_logprobs=5, logprobs=target), logits, [1, 0])
    assert got[0] == [7, OK]
    want = gather_logprobs(logits, torch.tensor([row[0] for row in got]), 5)
    assert torch.equal(target.token_ids[:2], want.token_ids) and torch.equal(target.logprobs[:2], want.logprobs)
    assert torch.equal(target.ranks[:2], want.ranks) and not target.ranks[2:].any()


def random_params(chooser: random.Random) -> dict:
    params: dict = {"temperature": chooser.choice([0.0, 0.5, 1.0, 1.7])}
    for name, values in (("top_k", [1, 3, 20]), ("top_p", [0.2, 0.9]), ("min_p", [0.05, 0.4])):
        if params["temperature"] and chooser.random() < 0.5:
            params[name] = chooser.choice(values)
    return params


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_is_its_rows_alone(seed):
    """Each row against the sampler on that row, with the side tables of that row only; and its output counted."""
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state = make_state()
    slots = chooser.sample(range(NUM_SEQS), 6)
    with_side = dict(zip(chooser.sample(slots, 3), range(3), strict=True))
    for slot in slots:
        extra: dict = {}
        if slot in with_side:
            extra = {"side_slot": with_side[slot], "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 3,
                     "logit_bias": {4: 3.0, 60: -2.0}, "bad_words": [[5, 6], [8], [1, 1, 1, 9]]}  # fmt: skip
        tokens = [chooser.choice([1, 5, 9]) for _ in range(chooser.randint(3, 20))]
        add(state, slot, tokens, seed=chooser.randrange(2**62), **random_params(chooser), **extra)
    logits = torch.randn(7, VOCAB, generator=generator) * 3
    positions = (state.num_computed_tokens + 1).tolist()
    expected, counts = [], state.side.counts.clone()
    for row, slot in enumerate(slots):
        at = torch.tensor([slot])
        one = logits[row : row + 1].clone()
        if slot in with_side:
            _apply_side(state, one, slot, positions[slot])
        meta = SamplingMetadata(
            seeds=state.seeds[at], positions=torch.tensor([positions[slot]]), max_top_k=VOCAB,
            columns={name: column[at] for name, column in state.sampling.items()}, active=frozenset(state.sampling),
        )  # fmt: skip
        token = int(sample(one, meta)[0])
        expected.append([token, OK])
        if slot in with_side:
            counts[with_side[slot], token] += 1
    assert run(bind(state), logits, [*slots, state.padding_slot]) == [*expected, [0, 0]]
    assert torch.equal(state.side.counts, counts)
    assert all(
        state.token_ids[slot, positions[slot]] == token for slot, (token, _) in zip(slots, expected, strict=True)
    )


def _apply_side(state: BatchState, logits: torch.Tensor, slot: int, position: int) -> None:
    from pelton_platforms.device.sampling.metadata import SideRows

    at = torch.tensor([slot])
    side = SideRows(
        tables=state.side, rows=torch.tensor([0]), side_slots=state.side_slots[at], slots=at,
        positions=torch.tensor([position]), num_prompt_tokens=state.num_prompt_tokens[at], token_ids=state.token_ids,
        has_penalties=True, has_bias=True, has_min_tokens=True, has_banned=True, has_bad_words=True,
    )  # fmt: skip
    apply_side_tables(logits, side)


def test_inputs_are_those_of_the_worked_example():
    state = make_state()
    prompts, blocks = [[1, 2, 3, 4, 5], [1, 6, 5, 7, 8, 9, 10], [1, 12, 13]], [[1, 2], [3, 4], [5]]
    buffers = InputBuffers(state, max_num_tokens=32)
    new = [
        NewRequest(
            request_id=str(slot), slot=slot, token_ids=prompt, num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(temperature=0), block_ids=[ids],
        )
        for slot, (prompt, ids) in enumerate(zip(prompts, blocks, strict=True))
    ]  # fmt: skip
    state.add(new)
    needs = PrepareInputsNeeds(max_num_tokens=32, max_num_seqs=NUM_SEQS, block_sizes=(4,), max_model_len=MAX_LEN)
    assert ReferencePrepareInputs.unsupported(needs) == []
    prepare = ReferencePrepareInputs.bind(needs, PrepareInputsTensors(state=state, buffers=buffers))
    shape = StepShape(
        num_reqs=3, num_tokens=15, num_decode_rows=0, max_query_len=7, max_seq_len=7, num_padded_reqs=4,
        num_padded_tokens=16,
    )  # fmt: skip
    slots = torch.tensor([0, 1, 2, state.padding_slot])
    (common,) = prepare(slots, torch.tensor([5, 7, 3, 0]), shape)
    assert buffers.input_ids[:16].tolist() == [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13, 0]
    assert buffers.positions[:16].tolist() == [*range(5), *range(7), *range(3), 0]
    assert common.query_start_loc.tolist() == [0, 5, 12, 15, 15] and common.seq_lens.tolist() == [5, 7, 3, 0]
    assert common.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, -1]
