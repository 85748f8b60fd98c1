"""Tokens in C against the reference: greedy rows and codes to the bit, sampled ones by the same number, logprobs, state."""

from __future__ import annotations

import math
import random

import pytest
import torch
from pelton_isas import WIDTHS, in_use
from pelton_sampling import add, assert_same_state, copy_of, make_state, random_side
from pelton_sampling import bind as bind_op

from pelton.ops.interface import LogprobsNeeds, LogprobsTensors, SampleNeeds
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK
from pelton.sampling.logprobs import LogprobTensors, gather_logprobs
from pelton_backends.native.sampling import NativeLogprobs, NativeSample
from pelton_platforms.device.sampling.random import uniform
from pelton_platforms.device.steps.reference_step import ReferenceSample

INF = math.inf


@pytest.fixture(params=WIDTHS)
def isa(request):
    """One instruction set of each width: the others compile the same here."""
    yield from in_use(request.param)


def bind(state, implementation=NativeSample, **options):
    return bind_op(state, implementation, **options)


def run(op, logits, slots):
    """[token, code] of each row. The rows lie apart, in memory that ends with them."""
    wide = torch.full((len(slots), logits.shape[1] + 3), INF)
    wide[:, 3:] = logits
    result = torch.full((len(slots), 2), -7, dtype=torch.int32)
    op(wide[:, 3:], torch.tensor(slots), result)
    return result.tolist()


@pytest.mark.parametrize("vocab", [1, 15, 70, 512, 9001])
def test_greedy_rows_among_others_equal_the_reference(isa, vocab):
    state = make_state(vocab, num_seqs=9)
    for slot in range(8):
        add(state, slot, [0] * (3 + 5 * slot), temperature=0)
    other = copy_of(state)
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)  # many ties
    logits[0] = -5.0
    logits[0, vocab // 2 :] = -0.0  # equal to 0
    logits[0, -1] = 0.0
    logits[1, vocab // 3] = math.nan
    logits[2, vocab // 3] = INF
    logits[3] = -INF
    logits[4, : vocab // 2] = -INF
    slots = [3, 1, 0, 7, state.padding_slot, 2, 6, 5, state.padding_slot]
    got, want = run(bind(state), logits, slots), run(bind(other, ReferenceSample), logits, slots)
    codes = [NOT_FINITE if row in (1, 2, 3) else OK for row in range(9)]
    assert [code for _, code in got] == [code for _, code in want] == codes
    good = [row for row, code in enumerate(codes) if code == OK]
    assert [got[row] for row in good] == [want[row] for row in good]
    assert all(0 <= token < vocab for token, _ in got)
    assert torch.equal(state.num_computed_tokens, other.num_computed_tokens)  # those with an error advance too
    for row in good:
        assert torch.equal(state.token_ids[slots[row]], other.token_ids[slots[row]])


# Random rows.


def random_params(chooser: random.Random, vocab: int) -> dict:
    params: dict = {"temperature": chooser.choice([0.0, 0.3, 1.0, 1.0, 2.0])}
    if chooser.random() < 0.5:
        params["top_k"] = chooser.choice([1, 2, 20, vocab // 3, vocab - 1, vocab, vocab + 7]) or 1
    if chooser.random() < 0.6:
        params["top_p"] = chooser.choice([1e-6, 0.05, 0.5, 0.9, 0.99, 0.99999])
    if chooser.random() < 0.3:
        params["min_p"] = chooser.choice([0.003, 0.1, 0.9, 1.0])
    return params


def law(logits: torch.Tensor, params: dict) -> tuple[torch.Tensor, float]:
    """The probabilities by the definitions in float64, and how much of them roundings at the filters' edges may move."""
    scaled = logits.double() / params["temperature"]
    weights = (scaled - scaled.max()).exp()
    if params.get("min_p"):
        weights[weights < params["min_p"] * (1 - 1e-6)] = 0
    if 0 < params.get("top_k", 0) < len(logits):
        weights[weights < weights.topk(params["top_k"]).values[-1] * (1 - 1e-6)] = 0
    edge = 0.0
    if params.get("top_p", 1.0) < 1:
        order = weights.sort(descending=True).values
        mass = order.cumsum(0) / weights.sum()
        count = min(int((mass < params["top_p"]).sum()) + 1, len(order))
        if (mass - params["top_p"]).abs().min() < 1e-6:
            edge = float(order[count - 1] / order[:count].sum())
        weights[weights < order[count - 1] * (1 - 1e-6)] = 0
    return weights / weights.sum(), edge


def assert_at_a_border(logits, params, seed, position, got, want) -> None:
    """Another token than the reference's is right only where the number is at a border, or the kept set's edge is."""
    probs, edge = law(logits, params)
    running, u = probs.cumsum(0), float(uniform(torch.tensor([seed]), torch.tensor([position])))
    border = min(abs(float(running[token]) - u) for token in range(min(got, want), max(got, want)))
    assert border < edge + 2e-6, f"{got} instead of {want}: {border} from a border"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocab, scale", [(7, 1.0), (500, 3.0), (5003, 1.0), (20_001, 4.0), (20_001, 0.05)])
def test_choices_equal_the_reference(isa, vocab, scale, seed):
    chooser, generator = random.Random(f"{seed} {vocab}"), torch.Generator().manual_seed(seed)
    state, num_rows, rows = make_state(vocab, 24), 24, []
    for slot in range(num_rows):
        rows.append((random_params(chooser, vocab), chooser.randrange(2**62), chooser.randint(2, 30)))
        add(state, slot, [0] * rows[-1][2], seed=rows[-1][1], **rows[-1][0])
    other = copy_of(state)
    logits = torch.randn(num_rows, vocab, generator=generator) * scale
    if seed:
        logits = logits.bfloat16().float()  # many ties
    slots = chooser.sample(range(num_rows), num_rows)
    got, want = run(bind(state), logits, slots), run(bind(other, ReferenceSample), logits, slots)
    num_different = 0
    for row, ((token, code), (expected, other_code)) in enumerate(zip(got, want, strict=True)):
        assert code == other_code == OK
        if token != expected:
            params, row_seed, length = rows[slots[row]]
            assert params["temperature"] > 0
            assert_at_a_border(logits[row], params, row_seed, length, token, expected)
            num_different += 1
    assert num_different <= 1
    assert torch.equal(state.num_computed_tokens, other.num_computed_tokens)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"top_k": 3}, id="top-k-ties-are-kept"),
        pytest.param({"top_k": 1}, id="the-best"),
        pytest.param({"top_p": 0.3}, id="top-p-ties-are-kept"),
        pytest.param({"top_k": 1350, "top_p": 0.997}, id="nearly-everything"),
        pytest.param({"min_p": 1.0}, id="only-the-best"),
        pytest.param({"top_p": 1e-9}, id="smallest-nucleus"),
        pytest.param({"top_k": 1500, "top_p": 1.0}, id="nothing-is-dropped"),
    ],
)
@pytest.mark.parametrize("spread", [0.0, 0.05, 60.0])
def test_extreme_filters_equal_the_reference(isa, params, spread):
    state = make_state(1500, 5)
    for slot in range(5):
        add(state, slot, [1, 2], seed=10 + slot, temperature=0.7, **params)
    other = copy_of(state)
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(3)) * spread
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, 100:] = -INF
    logits[3, ::2] = -INF
    logits[4] -= 1000.0
    slots = [0, 1, 2, 3, 4]
    assert run(bind(state), logits, slots) == run(bind(other, ReferenceSample), logits, slots)


def test_a_temperature_too_low_to_divide_by_is_greedy(isa):
    state = make_state(100)
    add(state, 0, [1, 2], temperature=1.1e-5)
    logits = torch.zeros(1, 100)
    logits[0, 7] = 3e35
    assert run(bind(state), logits, [0]) == [[7, OK]]


def test_a_choice_does_not_depend_on_the_batch(isa):
    state, chooser = make_state(3001), random.Random(5)
    for slot in range(8):
        add(state, slot, [1, 2, 3], seed=chooser.randrange(2**62), temperature=1.0, top_p=0.95 if slot % 2 else 1.0)
    logits = torch.randn(8, 3001, generator=torch.Generator().manual_seed(0))
    start = state.num_computed_tokens.clone()
    together = run(bind(state), logits, list(range(8)))
    for slot in (0, 5):
        state.num_computed_tokens.copy_(start)
        assert run(bind(state), logits[[3, slot]], [state.padding_slot, slot])[1] == together[slot]


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0.5}, id="temperature"),
        pytest.param({"top_k": 25}, id="top-k"),
        pytest.param({"top_p": 0.7}, id="top-p"),
        pytest.param({"top_k": 32, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}, id="all"),
    ],
)
def test_law_by_chi_square(params, vocab):
    """Many rows of equal logits; expected counts from the definitions in float64."""
    count, params = 3000, {"temperature": 1.0} | params
    state = make_state(vocab, count)
    values = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * (60 / vocab) ** 0.1 * 1.5
    add(state, 0, [1] * 5, **params)
    for column in state.sampling.values():
        column[1:count] = column[0].clone()
    state.seeds[:count] = torch.arange(count)
    state.num_computed_tokens[:count] = 17
    got = run(bind(state), values.expand(count, -1), list(range(count)))
    probs, _ = law(values, params)
    observed = torch.bincount(torch.tensor([token for token, _ in got]), minlength=vocab).double()
    assert not observed[probs == 0].any()
    expected = probs * count
    is_large = expected >= 5
    bins = [*zip(observed[is_large].tolist(), expected[is_large].tolist(), strict=True)]
    rest = float(expected[~is_large].sum())
    if rest >= 5:
        bins.append((float(observed[~is_large].sum()), rest))
    freedom = len(bins) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # the 99.99 % point
    assert sum((o - e) ** 2 / e for o, e in bins) < limit


# Masks, side tables, logprobs.


def masked(state, allowed: dict[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros(state.max_num_seqs + 1, -(-state.vocab_size // 32) * 32, dtype=torch.int64)
    has_mask = torch.zeros(state.max_num_seqs + 1, dtype=torch.bool)
    for slot, tokens in allowed.items():
        has_mask[slot], words[slot, tokens] = True, 1
    words = (words.view(len(words), -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), has_mask


@pytest.mark.parametrize("vocab", [2005, 1984])
def test_masks_equal_the_reference(isa, vocab):
    chooser, state = random.Random(0), make_state(vocab)
    for slot in range(6):
        add(state, slot, [1, 2, 3], seed=slot, temperature=float(slot % 2))
    sets = {0: [7, 31, 32, vocab - 1], 1: chooser.sample(range(vocab), 300), 2: [], 4: [1980]}
    mask = masked(state, sets)
    other = copy_of(state)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, vocab - 1] = 9.0
    logits[3, 8] = math.nan
    logits[4, 9] = INF
    slots = [0, 1, 2, 3, 4, 5, state.padding_slot]
    got = run(bind(state, mask=mask), logits, slots)
    want = run(bind(other, ReferenceSample, mask=mask), logits, slots)
    codes = [OK, OK, NOTHING_ALLOWED, NOT_FINITE, NOT_FINITE, OK, 0]
    assert [code for _, code in got] == [code for _, code in want] == codes
    for row in (0, 1, 5, 6):
        assert got[row] == want[row]
    assert got[0][0] == vocab - 1 and got[1][0] in sets[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [700, 5003, 20_001])
def test_rows_of_which_a_mask_allows_few_equal_the_reference(isa, vocab, seed):
    """From one token to more than are brought together, and bits behind the vocabulary; tokens that are not allowed are likelier."""
    chooser, state, num_rows = random.Random(f"{vocab} {seed}"), make_state(vocab, 24), 24
    rows, sets = [], {}
    for slot in range(num_rows):
        rows.append((random_params(chooser, vocab), chooser.randrange(2**62), chooser.randint(2, 30)))
        add(state, slot, [0] * rows[-1][2], seed=rows[-1][1], **rows[-1][0])
        count = min(chooser.choice([1, 2, 9, 70, 500, 1023, 1024, 1025, 2048, 2049, 4000]), vocab)
        sets[slot] = sorted(chooser.sample(range(vocab), count))
    sets[3] = sets[3][:5]
    mask = masked(state, sets)
    mask[0][:, -1] |= torch.tensor(-1 << (vocab % 32)) if vocab % 32 else 0
    other = copy_of(state)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.0
    logits[3, sets[3]] = -INF
    logits[5, (sets[5][0] + 1) % vocab] = math.nan
    got = run(bind(state, mask=mask), logits, list(range(num_rows)))
    want = run(bind(other, ReferenceSample, mask=mask), logits, list(range(num_rows)))
    assert [code for _, code in got] == [code for _, code in want]
    assert got[3][1] == NOTHING_ALLOWED and got[5][1] == NOT_FINITE
    for slot, ((params, seed_, position), (token, code), (expected, _)) in enumerate(zip(rows, got, want, strict=True)):
        if code != OK:
            continue
        assert token in sets[slot]
        if token != expected:
            alone = torch.full((vocab,), -INF)
            alone[sets[slot]] = logits[slot, sets[slot]]
            assert_at_a_border(alone, params, seed_, position, token, expected)


@pytest.mark.parametrize("seed", range(4))
def test_side_tables_equal_the_reference(isa, seed):
    """Few tokens are likely, so that every feature decides something; several steps, so that counts matter."""
    vocab, chooser = (300, 1503)[seed % 2], random.Random(seed)
    state = make_state(vocab, num_side_slots=5)
    for slot in range(7):
        side = random_side(chooser, vocab) | {"side_slot": slot // 2} if slot % 2 else {}
        tokens = [chooser.randrange(4) for _ in range(chooser.randint(3, 15))]
        add(state, slot, tokens, seed=chooser.randrange(2**62), **random_params(chooser, vocab), **side)
    other = copy_of(state)
    mine, reference = bind(state), bind(other, ReferenceSample)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        logits = torch.randn(8, vocab, generator=generator)
        logits[:, :6] += 5.0
        slots = [*chooser.sample(range(7), 7), state.padding_slot]
        assert run(mine, logits, slots) == run(reference, logits, slots)
        assert_same_state(state, other)
    assert state.side.counts.sum() > 0


def test_penalized_logits_are_rounded_as_the_reference_rounds(isa):
    """Greedy: the better of two tokens that a fused product would order otherwise shows it."""
    vocab, generator = 4000, torch.Generator().manual_seed(0)
    state = make_state(vocab, num_seqs=40, num_side_slots=1)
    add(state, 0, list(range(39)), temperature=0, side_slot=0, num_output=38, frequency_penalty=0.3,
        repetition_penalty=1.3, presence_penalty=0.7)  # fmt: skip
    state.side.counts[0] = torch.randint(0, 9, (vocab,), generator=generator, dtype=torch.int32)
    state.num_computed_tokens[0] = 3
    other = copy_of(state)
    mine, reference = bind(state), bind(other, ReferenceSample)
    for _ in range(30):
        logits = 20.0 + torch.rand(1, vocab, generator=generator) * 1e-4
        assert run(mine, logits, [0]) == run(reference, logits, [0])


def test_nothing_is_left_by_a_side_table(isa):
    state = make_state(300, num_side_slots=2)
    add(state, 0, [1, 2], side_slot=1, allowed_token_ids=[4], temperature=1.0)
    logits = torch.zeros(1, 300)
    assert run(bind(state), logits, [0]) == [[4, OK]]
    state.side.banned[1] = True
    assert run(bind(state), logits, [0])[0][1] == NOTHING_ALLOWED


def test_longer_bad_words_than_there_was_room_for(isa):
    state = make_state(300, num_side_slots=2)
    add(state, 0, [1, 1], temperature=0, side_slot=0, bad_words=[[1, 7]])
    op = bind(state)
    logits = torch.zeros(1, 300)
    logits[0, 7] = 1.0
    words = [[3] * 20 + [9], *([4, t] for t in range(40))]
    add(state, 1, [1] + [3] * 24, temperature=0, side_slot=1, bad_words=words, num_output=22)
    assert state.side.layout_version == 1
    logits[0, 9] = 2.0
    assert run(op, logits, [1]) == [[7, OK]]


def make_target(num_logprobs: int, num_rows: int = 6) -> LogprobTensors:
    ids, ranks = torch.full((num_rows, 1 + num_logprobs), -9), torch.full((num_rows,), -9)
    return LogprobTensors(ids, ids.float(), ranks)


@pytest.mark.parametrize("vocab", [21, 2001])
@pytest.mark.parametrize("num_logprobs", [0, 5, 20])
def test_logprobs_come_from_the_raw_logits(isa, num_logprobs, vocab):
    state = make_state(vocab, num_side_slots=1)
    add(state, 1, [3, 4], temperature=0.5, top_k=3, logit_bias={7: 50.0}, side_slot=0)
    add(state, 0, [3, 4], temperature=0)
    add(state, 2, [3, 4], temperature=1)
    other = copy_of(state)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -INF
    logits[2] = logits[2].clamp(max=logits[2].topk(12).values[-1])  # twelve are equal: by lower token
    slots = [1, 0, 2, state.padding_slot]
    made = []
    for owner, implementation in ((state, NativeSample), (other, ReferenceSample)):
        target = make_target(num_logprobs)
        op = bind(owner, implementation, num_logprobs=num_logprobs, logprobs=target)
        made.append((run(op, logits, slots), target.to_host()))
    (got, mine), (want, theirs) = made
    assert got == want
    assert mine.ranks[:3].tolist() == theirs.ranks[:3].tolist()
    assert mine.token_ids[:2].tolist() == theirs.token_ids[:2].tolist()
    stable = logits[2].sort(descending=True, stable=True).indices[:num_logprobs].tolist()
    assert mine.token_ids[2].tolist() == [got[2][0], *stable]
    assert mine.logprobs[:3] == pytest.approx(theirs.logprobs[:3], abs=1e-5, rel=1e-5)
    assert (mine.token_ids[4:] == -9).all() and (mine.ranks[4:] == -9).all()


@pytest.mark.parametrize("vocab, num_logprobs", [(2, 1), (21, 20), (70, 0), (2001, 5)])
def test_logprobs_of_given_tokens(isa, vocab, num_logprobs):
    generator, target = torch.Generator().manual_seed(0), make_target(num_logprobs, 9)
    logits = torch.randn(9, vocab, generator=generator) * 5
    logits[3] = 80.0  # equal ones
    logits[4, vocab // 2] = -INF
    logits[5, 1:] = -INF
    chosen = torch.randint(0, vocab, (9,), generator=generator)
    needs = LogprobsNeeds(vocab_size=vocab, max_rows=9, num_logprobs=num_logprobs)
    assert NativeLogprobs.unsupported(needs) == []
    NativeLogprobs.bind(needs, LogprobsTensors(logits.device))(logits, chosen, target)
    expected = gather_logprobs(logits, chosen, num_logprobs)
    assert torch.equal(target.ranks, expected.ranks)
    torch.testing.assert_close(target.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    assert torch.equal(target.token_ids[:, 0], chosen)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_logprobs]
    assert torch.equal(target.token_ids[:, 1:], order)


def test_logprobs_of_logits_that_are_not_numbers(isa):
    target, logits = make_target(3, 2), torch.zeros(2, 50)
    logits[0, 7], logits[1, 3] = math.nan, INF
    needs = LogprobsNeeds(vocab_size=50, max_rows=2, num_logprobs=3)
    NativeLogprobs.bind(needs, LogprobsTensors(logits.device))(logits, torch.tensor([4, 5]), target)
    assert target.logprobs[0].isnan().all() and ((target.token_ids >= 0) & (target.token_ids < 50)).all()


def test_at_size(isa):
    """The vocabulary of Gemma 3, all features at once."""
    vocab, generator, chooser = 262_144, torch.Generator().manual_seed(0), random.Random(2)
    state = make_state(vocab, num_side_slots=2)
    settings = [
        {"temperature": 2.0, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 1.2, "side_slot": 0},
        {"temperature": 0, "logit_bias": {5: 3.0}, "side_slot": 1},
    ]
    for slot, params in enumerate(settings):
        add(state, slot, [chooser.randrange(vocab) for _ in range(30)], seed=chooser.randrange(2**62), **params)
    other, logits = copy_of(state), torch.randn(4, vocab, generator=generator) * 2.5
    mine, theirs = make_target(20), make_target(20)
    got = run(bind(state, num_logprobs=20, logprobs=mine), logits, [0, 1, 2, 3])
    want = run(bind(other, ReferenceSample, num_logprobs=20, logprobs=theirs), logits, [0, 1, 2, 3])
    assert got == want
    assert mine.ranks[:4].tolist() == theirs.ranks[:4].tolist()
    assert mine.token_ids[:4].tolist() == theirs.token_ids[:4].tolist()
    assert mine.logprobs[:4].numpy() == pytest.approx(theirs.logprobs[:4].numpy(), abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(
    "changes, reason", [({"variant": "beam"}, "variant 'beam'"), ({"num_logprobs": 129}, "129 logprobs")]
)
def test_what_it_refuses(changes, reason):
    (why,) = NativeSample.unsupported(SampleNeeds(**{"vocab_size": 500, "max_num_seqs": 8, **changes}))
    assert reason in why
