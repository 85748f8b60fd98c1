"""Logits of rows whose mask allows few tokens: what is sampled from them is what is sampled from all, and what is computed is equal to the
bit."""

from __future__ import annotations

import random

import pytest
import torch
from pelton_isas import WIDTHS, in_use
from pelton_linear_oracle import make_case
from pelton_sampling import add, assert_same_state, bind, make_state
from pelton_sampling import random_side as side_of

from pelton.ops.interface import AddNormLogitsNeeds, AddNormLogitsTensors, LinearSpec, LinearWeights
from pelton.ops.selector import pack_weights
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK
from pelton.sampling.logprobs import LogprobTensors
from pelton_backends.native.linear import NativeAddNormLogits
from pelton_backends.native.sampling import NativeSample

CPU, DTYPES = torch.device("cpu"), [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=WIDTHS)
def isa(request):
    yield from in_use(request.param)


class Head:
    """A head with `num_columns`, of which the vocabulary may have fewer. Its results begin as numbers that nobody may sample."""

    def __init__(
        self, num_rows: int, num_columns: int, vocab: int, dtype: torch.dtype, *, is_packed: bool = True
    ) -> None:
        self.case = case = make_case(num_rows, 64, num_columns, dtype, CPU)
        spec = LinearSpec(in_features=64, out_features=num_columns)
        needs = AddNormLogitsNeeds(
            dtype=str(dtype).removeprefix("torch."), norm=case.norm_spec, linear=spec, vocab_size=vocab, soft_cap=None
        )
        weights = LinearWeights(spec, {"weight": case.weight.clone()})
        self.op = NativeAddNormLogits.bind(needs, AddNormLogitsTensors(case.norm, weights))
        if is_packed:
            pack_weights([self.op])
        self.rows = torch.arange(num_rows)

    def logits(self) -> torch.Tensor:
        return self.op(self.case.hidden.clone(), self.case.residual.clone(), self.rows)


@pytest.fixture
def dirty(monkeypatch):
    """Memory for results has the likeliest numbers that there are, and what is not a number."""
    empty = torch.empty

    def full(*size, **options):
        made = empty(*size, **options)
        if made.dtype == torch.float32 and made.dim() == 2:
            made[:, ::2], made[:, 1::2] = 1e30, torch.nan
        return made

    monkeypatch.setattr(torch, "empty", full)


def mask_of(state, sets):
    words = torch.zeros(state.max_num_seqs + 1, -(-state.vocab_size // 32) * 32, dtype=torch.int64)
    has_mask = torch.zeros(state.max_num_seqs + 1, dtype=torch.bool)
    for slot, tokens in sets.items():
        has_mask[slot], words[slot, tokens] = True, 1
    words = (words.view(len(words), -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), has_mask


def sampled(op, head, slots):
    """[token, code] of each row, from logits that may be in parts."""
    slots, result = torch.tensor(slots), torch.full((len(slots), 2), -7, dtype=torch.int32)
    with op.reading(slots):
        logits = head.logits()
    op(logits, slots, result)
    return logits, result.tolist()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_columns, vocab", [(9984, 9984), (9984, 9961), (1024, 1000), (64, 50)])
def test_tokens_are_those_of_all_logits(isa, num_columns, vocab, dtype, seed, dirty):
    """Rows with masks of any size, without one, with side tables, of padding; greedy and random."""
    chooser, num_seqs = random.Random(f"{vocab} {seed}"), 40
    state, other = (make_state(vocab, num_seqs, num_side_slots=num_seqs) for _ in range(2))
    sets, side = {}, 0
    for slot in range(num_seqs):
        params = {"temperature": chooser.choice([0.0, 1.0, 0.7]), "top_p": chooser.choice([1.0, 0.6])}
        has_side, num_tokens, seed = slot % 11 == 5, chooser.randint(2, 30), chooser.randrange(2**62)
        params |= side_of(chooser, vocab) if has_side else {}
        for one in (state, other):
            add(one, slot, [0] * num_tokens, seed=seed, side_slot=side if has_side else -1, **params)
        side += has_side
        if slot % 7:
            count = min(chooser.choice([1, 2, 5, 30, 300, 1000, 3000, vocab]), vocab)
            sets[slot] = sorted(chooser.sample(range(vocab), count))
    sets[1] = []
    mask = mask_of(state, sets)
    slots = chooser.sample(range(num_seqs), chooser.choice([3, 17, 40]))
    if 1 not in slots:
        slots[0] = 1
    slots.insert(chooser.randint(0, len(slots)), state.padding_slot)
    head = Head(len(slots), num_columns, vocab, dtype)
    whole = head.logits()
    found, got = sampled(bind(state, NativeSample, mask=mask), head, slots)
    want = torch.full((len(slots), 2), -7, dtype=torch.int32)
    bind(other, NativeSample, mask=mask)(whole, torch.tensor(slots), want)
    assert got == want.tolist() and got[slots.index(1)][1] == NOTHING_ALLOWED
    assert_same_state(state, other)
    for row, slot in enumerate(slots):
        if slot != state.padding_slot:
            read = sets.get(slot, range(vocab))
            assert torch.equal(found[row, list(read)], whole[row, list(read)])
    if vocab > 9000 and len(slots) > 5:
        assert (found == 1e30).any(), "everything was computed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_not_finite_is_told_among_others(isa, dtype, dirty):
    state = make_state(4096)
    for slot in range(6):
        add(state, slot, [1, 2, 3], seed=slot, temperature=float(slot % 2))
    mask = mask_of(state, {slot: [5, 700] for slot in range(6)})
    head = Head(6, 4096, 4096, dtype)
    head.case.hidden[2, 3] = torch.nan
    _, got = sampled(bind(state, NativeSample, mask=mask), head, list(range(6)))
    assert [code for _, code in got] == [OK, OK, NOT_FINITE, OK, OK, OK]
    assert all(token in (5, 700) for row, (token, _) in enumerate(got) if row != 2)


def test_flags_of_a_step_do_not_outlive_it(isa, dirty):
    """Logits that were computed whole are looked at whole by the next call."""
    state = make_state(4096)
    add(state, 0, [1, 2, 3], temperature=0)
    op, head = bind(state, NativeSample, mask=mask_of(state, {0: [5]})), Head(1, 4096, 4096, torch.float32)
    assert sampled(op, head, [0])[1] == [[5, OK]]
    logits, result = head.logits(), torch.zeros(1, 2, dtype=torch.int32)
    logits[0, 9] = torch.nan
    op(logits, torch.tensor([0]), result)
    assert result.tolist()[0][1] == NOT_FINITE


@pytest.mark.parametrize("why", ["plain weight", "logprobs", "no mask"])
def test_all_are_computed_where_they_are_read_or_cannot_be_left_out(isa, why, dirty):
    state = make_state(4096)
    add(state, 0, [1, 2, 3])
    tensors: dict = {} if why == "no mask" else {"mask": mask_of(state, {0: [5, 70]})}
    if why == "logprobs":
        tensors |= {"logprobs": LogprobTensors.make(1, 2, CPU)}
    op = bind(state, NativeSample, num_logprobs=2 if why == "logprobs" else 0, **tensors)
    head = Head(1, 4096, 4096, torch.bfloat16, is_packed=why != "plain weight")
    assert torch.equal(sampled(op, head, [0])[0], head.logits())
