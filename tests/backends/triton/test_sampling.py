"""Sampled tokens against the reference: greedy rows to the bit, sampled ones by the same number, masks, tables, state."""

from __future__ import annotations

import math
import random

import pelton_sampling
import pytest
import torch
from pelton_sampling import CPU, MAX_LEN, add, assert_same_state, copy_of, random_side

from pelton.ops.interface import LogprobsNeeds, LogprobsTensors
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK
from pelton.sampling.logprobs import LogprobTensors
from pelton_platforms.device.sampling.random import uniform
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import ReferenceLogprobs, ReferenceSample

INF = float("inf")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, device):
    """In the interpreter a row has few tokens: smaller chunks and less room, so that all paths are taken all the same."""
    if device.type == "cpu":
        from pelton_backends.triton.ops.sampling import sample as sampling

        sizes = {
            "_GREEDY_CHUNK": 512,
            "_CHUNK_GROUPS": 32,
            "_LISTED": 4,
            "_ROOM": 32,
            "_LANES": 512,
            "_SPARE": 64,
            "_WIDE_SPARE": 64,
        }
        for name, size in sizes.items():
            monkeypatch.setattr(sampling, name, size)


def at_size(device, small: int, large: int) -> int:
    return large if device.type == "cuda" else small


def make_state(device, *sizes: int, **options: int) -> BatchState:
    return pelton_sampling.make_state(*sizes, device=device, **options)


def bind(state: BatchState, implementation=None, **options):
    from pelton_backends.triton.ops.sampling.sample import TritonSample

    return pelton_sampling.bind(state, implementation or TritonSample, **options)


def run(op, logits: torch.Tensor, slots: list[int]) -> list[list[int]]:
    result = torch.full((len(slots), 2), -7, dtype=torch.int32, device=logits.device)
    op(logits.clone(), torch.tensor(slots, device=logits.device), result)
    return result.tolist()


def run_both(state: BatchState, logits: torch.Tensor, slots: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """What the kernels and the reference make of the same rows."""
    other = copy_of(state)
    return run(bind(state), logits.to(state.device), slots), run(bind(other, ReferenceSample), logits, slots)


# Greedy.


@pytest.mark.parametrize("variant", ["greedy", "full"])
@pytest.mark.parametrize("vocab", [1, 70, 512, 9001])
def test_greedy_rows_equal_the_reference(device, variant, vocab):
    state = make_state(device, vocab, num_seqs=9)  # as many as rows: scratch is made for no more
    for slot in range(8):
        add(state, slot, [0] * (3 + 5 * slot), temperature=0)
    other = copy_of(state)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator).round(decimals=1)  # many ties
    logits[0] = -5.0
    logits[0, vocab // 2 :] = -0.0  # equal to 0
    logits[0, -1] = 0.0
    logits[1, vocab // 3] = float("nan")
    logits[2, vocab // 3] = INF
    logits[3] = -INF
    logits[4, : vocab // 2] = -INF
    slots = [3, 1, 0, 7, state.padding_slot, 2, 6, 5, state.padding_slot]
    got = run(bind(state, variant=variant), logits.to(device), slots)
    want = run(bind(other, ReferenceSample, variant=variant), logits, slots)
    codes = [NOT_FINITE if row in (1, 2, 3) else OK for row in range(9)]
    assert [code for _, code in got] == [code for _, code in want] == codes
    good = [row for row, code in enumerate(codes) if code == OK]
    assert [got[row] for row in good] == [want[row] for row in good]
    assert got[4] == got[8] == [0, 0]
    assert all(0 <= token < vocab for token, _ in got)
    assert torch.equal(state.num_computed_tokens.cpu(), other.num_computed_tokens)
    for row in good:
        assert torch.equal(state.token_ids[slots[row]].cpu(), other.token_ids[slots[row]])
    assert not state.token_ids[state.padding_slot].any()


@pytest.mark.parametrize("size, vocab", [(2, 1400), (2, 1401), (3, 70), (4, 5)])
def test_greedy_rows_of_shares_equal_the_reference(device, size, vocab):
    """Each rank tells the best of its share; what fills a share up is larger than any token's logit. Of 5 tokens on 4 ranks the last has
    none."""
    state = make_state(device, vocab, num_seqs=7)
    for slot in range(6):
        add(state, slot, [0] * (3 + 5 * slot), temperature=0)
    other = copy_of(state)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1)  # many ties
    logits[0] = 2.5
    logits[1, vocab - 1] = float("nan")
    logits[2, 0] = INF
    logits[3] = -INF
    logits[4, 0], logits[4, 1:] = 0.0, -0.0
    slots = [3, 1, 0, 5, 2, state.padding_slot, 4]
    op, width = bind(state, variant="greedy"), -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, size * width - vocab), value=9.0)
    rows = torch.tensor(slots, device=device)
    keys = [
        op.share_keys(share.contiguous().to(device), rows, min(width, vocab - rank * width))
        for rank, share in enumerate(padded.split(width, dim=1))
    ]
    result = torch.full((7, 2), -7, dtype=torch.int32, device=device)
    op.end_shares(torch.stack(keys), width, rows, result)
    want = run(bind(other, ReferenceSample, variant="greedy"), logits, slots)
    got = result.tolist()
    assert (
        [code for _, code in got] == [code for _, code in want] == [OK, NOT_FINITE, NOT_FINITE, NOT_FINITE, OK, OK, OK]
    )
    good = [0, 4, 5, 6]
    assert [got[row] for row in good] == [want[row] for row in good]
    assert got[5] == [0, 0]
    assert torch.equal(state.num_computed_tokens.cpu(), other.num_computed_tokens)
    for row in good:
        assert torch.equal(state.token_ids[slots[row]].cpu(), other.token_ids[slots[row]])


def test_shares_may_come_with_their_best(device):
    from pelton_backends.triton.ops.sampling.best import leave_best

    state = make_state(device, 70, num_seqs=6)
    best = torch.arange(3, device=device)
    logits = leave_best(torch.zeros(3, 35, device=device), best)
    assert bind(state, variant="greedy").share_keys(logits, torch.arange(3, device=device), 35) is best


def test_greedy_rows_take_the_best_that_came_with_their_logits(device):
    """The logits are not looked at: their memory may never have been written."""
    from pelton_backends.triton.ops.sampling.best import NO_KEY, leave_best

    state = make_state(device, 70, num_seqs=6)
    for slot in range(5):
        add(state, slot, [0] * (3 + 5 * slot), temperature=0)
    other = copy_of(state)
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
    logits[0] = -logits[0].abs()
    logits[1, 5] = INF
    logits[2] = -INF
    logits[3, 7] = float("nan")
    keys = logits.view(torch.int32).long()
    keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    best = ((keys << 32) | (0x7FFFFFFF - torch.arange(70))).amax(1)
    assert best.min() > NO_KEY
    slots = [3, 1, 0, 2, 4, state.padding_slot]
    result = torch.full((6, 2), -7, dtype=torch.int32, device=device)
    unwritten = leave_best(torch.full((6, 70), float("nan"), device=device), best.to(device))
    bind(state, variant="greedy")(unwritten, torch.tensor(slots, device=device), result)
    want = run(bind(other, ReferenceSample, variant="greedy"), logits, slots)
    assert result.tolist() == want
    assert [code for _, code in want] == [OK, NOT_FINITE, NOT_FINITE, NOT_FINITE, OK, OK]
    assert_same_state(state, other)


def test_greedy_again_and_again(device):
    """The counters of arrived programs are back at zero after each step; tokens past the end go to the spare column."""
    vocab = 9000
    state = make_state(device, vocab)
    add(state, 2, [1] * (MAX_LEN - 2), temperature=0)
    op = bind(state, variant="greedy")
    for step in range(5):
        logits = torch.zeros(1, vocab, device=device)
        logits[0, 8000 - step] = 1.0
        assert run(op, logits, [2]) == [[8000 - step, OK]]
    assert state.token_ids[2, MAX_LEN - 3 :].tolist() == [1, 8000, 7999, 7996]
    assert state.num_computed_tokens[2] == MAX_LEN + 2


# Sampled rows.


def random_params(chooser: random.Random, vocab: int) -> dict:
    params: dict = {"temperature": chooser.choice([0.0, 0.3, 1.0, 1.7])}
    if not params["temperature"]:
        return params
    if chooser.random() < 0.5:
        params["top_k"] = chooser.choice([1, 2, 50, 200, vocab // 3])
    if chooser.random() < 0.5:
        params["top_p"] = chooser.choice([0.05, 0.5, 0.9, 0.99])
    if chooser.random() < 0.3:
        params["min_p"] = chooser.choice([0.003, 0.1, 0.9])
    return params


def assert_boundary(logits: torch.Tensor, params: dict, seed: int, position: int, got: int, want: int) -> None:
    """Another token than the reference's is right only where u * total is at a border, or the kept set's edge is."""
    scaled = logits.double() / params["temperature"]
    weights = (scaled - scaled.max()).exp()
    if params.get("min_p"):
        weights[weights < params["min_p"] * (1 + 1e-6)] = 0
    if params.get("top_k"):
        weights[weights < weights.topk(params["top_k"]).values[-1] * (1 - 1e-6)] = 0
    edge = 1e-5
    if params.get("top_p", 1.0) < 1:
        order = weights.sort(descending=True)
        mass = order.values.cumsum(0) / weights.sum()
        count = int((mass < params["top_p"]).sum()) + 1
        edge += (
            float(order.values[count - 1] / order.values[:count].sum())
            if (mass - params["top_p"]).abs().min() < 1e-5
            else 0
        )
        weights[weights < order.values[count - 1] * (1 - 1e-6)] = 0
    running = weights.cumsum(0) / weights.sum()
    u = float(uniform(torch.tensor([seed]), torch.tensor([position])))
    border = min(abs(float(running[t]) - u) for t in range(min(got, want), max(got, want)))
    assert border < edge, f"{got} instead of {want}: {border} from a border"


def assert_same_choices(
    device, vocab: int, num_rows: int, seed: int, scale: float, *, allowed: int = 0, reference_device=CPU
) -> None:
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state = make_state(device, vocab, num_rows)
    rows = []
    for slot in range(num_rows):
        params = random_params(chooser, vocab)
        rows.append((params, chooser.randrange(2**62), chooser.randint(2, 30)))
        add(state, slot, [1] * rows[-1][2], seed=rows[-1][1], **params)
    other = copy_of(state, reference_device)
    logits = torch.randn(num_rows, vocab, generator=generator) * scale
    if seed % 2 and reference_device == CPU:
        logits = logits.bfloat16().float()  # many ties
    slots = chooser.sample(range(num_rows), num_rows)
    got = run(bind(state), logits.to(device), slots)
    want = run(bind(other, ReferenceSample), logits.to(reference_device), slots)
    different = 0
    for row, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine[1] == theirs[1] == OK
        if mine[0] != theirs[0]:
            params, row_seed, length = rows[slots[row]]
            assert params["temperature"] > 0
            assert_boundary(logits[row], params, row_seed, length, mine[0], theirs[0])
            different += 1
    assert different <= allowed
    if not different:
        assert_same_state(state, other)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_small, scale", [(True, 3.0), (False, 1.0), (False, 4.0)])
def test_choices_equal_the_reference(device, is_small, scale, seed):
    """More tokens than the first kernels have room for: flat rows go through the wide one."""
    vocab = 500 if is_small else at_size(device, 3001, 20_001)
    assert_same_choices(device, vocab, at_size(device, 6, 64), seed, scale, allowed=at_size(device, 0, 1))


def test_a_large_top_k_beside_what_min_p_drops(device, monkeypatch):
    """Fewer tokens are left for the last cut than were counted before: rows must not see what others left in its memory."""
    monkeypatch.setattr("pelton_backends.triton.ops.sampling.sample._SPARE", 4096)
    vocab, num_rows, generator = 9001, at_size(device, 5, 16), torch.Generator().manual_seed(0)
    order = torch.randperm(vocab, generator=generator)
    logits = torch.full((vocab,), -30.0)  # dropped by min_p
    logits[order[:5000]] = -4.95 + torch.rand(5000, generator=generator) * 0.05
    logits[order[5000:7000]] = -6.09 + torch.rand(2000, generator=generator) * 0.08
    state = make_state(device, vocab, num_rows)
    for slot in range(num_rows):
        add(state, slot, [1, 2], seed=7000 + slot, temperature=1.0, top_k=6000, min_p=0.3)
    got, want = run_both(state, logits.expand(num_rows, -1), list(range(num_rows)))
    assert got == want


@pytest.mark.parametrize("kind, num_wide", [
    pytest.param("random", 0, id="random"),
    pytest.param("ties", 10, id="more-equal-tokens-than-room"),
    pytest.param("few", 0, id="fewer-tokens-than-top-k"),
    pytest.param("rounded", None, id="some-equal-tokens"),
])  # fmt: skip
def test_rows_with_a_top_k_need_no_kernels_for_nuclei(device, kind, num_wide):
    """Around the most that a thread each is there for, beside other filters; without the launches that such rows never need."""
    most = at_size(device, 16, 128)
    vocab, generator = at_size(device, 2_999, 60_001), torch.Generator().manual_seed(11)
    cases = [
        (k, p, m)
        for k in (1, 2, most - 1, most, most + 1)
        for p, m in ((1.0, 0.0), (0.9, 0.0), (0.4, 0.0), (0.9, 0.02))
    ]
    state = make_state(device, vocab, len(cases))
    for slot, (top_k, top_p, min_p) in enumerate(cases):
        params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": (1.0, 0.6, 1.9)[slot % 3]}
        add(state, slot, [1, 2], seed=900 + slot, **params)
    other, slots = copy_of(state), list(range(len(cases)))
    logits = torch.randn(len(cases), vocab, generator=generator) * 2
    if kind == "ties":
        logits = (logits > 0.2).float()
    elif kind == "rounded":
        logits = logits.bfloat16().float()
    elif kind == "few":
        logits[torch.rand(logits.shape, generator=generator) < 1 - 4 / vocab] = -INF
        logits[:, 7] = 0.0
    op = bind(state, has_nuclei=False)
    assert run(op, logits.to(device), slots) == run(bind(other, ReferenceSample), logits, slots)
    assert_same_state(state, other)
    if num_wide is not None:
        left = op._scratch.is_wide.tolist()
        assert sum(code != 0 for code in left) >= num_wide and 1 not in left
        assert num_wide or not any(left)


@pytest.mark.parametrize("kind, is_settled", [
    pytest.param("flat", True, id="found-among-what-was-gathered"),
    pytest.param("outlier", True, id="one-token-far-above-a-flat-rest"),
    pytest.param("ties", False, id="more-equal-tokens-than-room"),
    pytest.param("nan", True, id="beside-rows-that-are-not-finite"),
])  # fmt: skip
def test_a_flat_nucleus_is_found_by_many_programs(device, monkeypatch, kind, is_settled):
    """And left to the kernel for all cases where they cannot."""
    monkeypatch.setattr("pelton_backends.triton.ops.sampling.sample._SPARE", at_size(device, 256, 8192))
    vocab, num_rows = at_size(device, 2_999, 60_001), 4
    state = make_state(device, vocab, num_rows, num_side_slots=1)
    for slot, top_p in enumerate((0.9, 0.5, 0.99, 1.0)):
        side = {"side_slot": 0, "logit_bias": {7: 1.0}} if slot == 1 else {}
        add(state, slot, [1, 2], seed=50 + slot, temperature=1.0, top_p=top_p, **side)
    other = copy_of(state)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(3)) * 0.5
    if kind == "ties":
        logits = (logits > 0.2).float()
    elif kind == "outlier":
        logits[:, vocab // 2] += 3.0
    elif kind == "nan":
        logits[2, 5] = float("nan")
    op, slots = bind(state), [0, 1, 2, 3]
    want = run(bind(other, ReferenceSample), logits, slots)
    for _ in range(2):  # counters are back at zero
        state.num_computed_tokens.copy_(other.num_computed_tokens.to(device) - 1)
        got = run(op, logits.to(device), slots)
        assert (
            [code for _, code in got] == [code for _, code in want] == [OK, OK, OK if kind != "nan" else NOT_FINITE, OK]
        )
        assert [token for token, code in got if code == OK] == [token for token, code in want if code == OK]
        is_left = op._scratch.is_wide.tolist()
        assert is_left[:2] == [0 if is_settled else 1] * 2 and is_left[3] == 0
        assert not op._scratch.num_spare.any()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab, scale", [(151_936, 1.0), (151_936, 3.0), (128_256, 2.5)])
def test_choices_equal_the_reference_at_size(device, vocab, scale, seed):
    assert_same_choices(device, vocab, 256, seed, scale, allowed=4, reference_device=device)


def test_a_choice_does_not_depend_on_the_batch(device):
    vocab, chooser = at_size(device, 2001, 9001), random.Random(5)
    state = make_state(device, vocab)
    for slot in range(8):
        add(state, slot, [1, 2, 3], seed=chooser.randrange(2**62), temperature=1.0, top_p=0.95 if slot % 2 else 1.0)
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0)).to(device)
    start = state.num_computed_tokens.clone()
    together = run(bind(state), logits, list(range(8)))
    for slot in (0, 5):
        state.num_computed_tokens.copy_(start)
        assert run(bind(state), logits[slot : slot + 1], [slot]) == [together[slot]]
        state.num_computed_tokens.copy_(start)
        assert run(bind(state), logits[[3, slot]], [state.padding_slot, slot])[1] == together[slot]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0.5}, id="temperature"),
        pytest.param({"top_k": 5}, id="top-k", marks=pytest.mark.gpu),
        pytest.param({"top_p": 0.7}, id="top-p", marks=pytest.mark.gpu),
        pytest.param({"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}, id="all"),
    ],
)
def test_law_by_chi_square(device, params):
    """Many positions of one request; expected counts from the definitions in float64."""
    vocab, count = 40, at_size(device, 40, 4000)
    params = {"temperature": 1.0} | params
    state = make_state(device, vocab, count)
    values = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    add(state, 0, [1] * 5, seed=99, **params)
    for column in state.sampling.values():
        column[1:count] = column[0].clone()
    state.seeds[:count] = torch.arange(count, device=device)
    state.num_computed_tokens[:count] = 17
    got = run(bind(state), values.expand(count, -1).to(device), list(range(count)))
    scaled = values.double() / params["temperature"]
    probs = scaled.softmax(0)
    probs[probs < params.get("min_p", 0) * probs.max()] = 0
    if "top_k" in params:
        probs[probs < probs.topk(params["top_k"]).values[-1]] = 0
    probs /= probs.sum()
    if "top_p" in params:
        order = probs.sort(descending=True).values
        probs[probs < order[int((order.cumsum(0) < params["top_p"]).sum())]] = 0
    probs /= probs.sum()
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


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"top_k": 3}, id="top-k-ties-are-kept"),
        pytest.param({"top_p": 0.3}, id="top-p-ties-are-kept"),
        pytest.param({"top_k": "most", "top_p": 0.997}, id="nearly-everything"),
        pytest.param({"min_p": 1.0}, id="only-the-best"),
        pytest.param({"top_p": 1e-9}, id="smallest-nucleus"),
    ],
)
@pytest.mark.parametrize("spread", [0.0, pytest.param(0.05, marks=pytest.mark.gpu), 60.0])
def test_extreme_filters_equal_the_reference(device, params, spread):
    vocab = at_size(device, 1500, 10_000)
    params = {**params, "top_k": vocab - vocab // 10} if params.get("top_k") == "most" else params
    state = make_state(device, vocab, 4)
    for slot in range(4):
        add(state, slot, [1, 2], seed=10 + slot, temperature=0.7, **params)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)) * spread
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, 100:] = -INF
    logits[3, ::2] = -INF
    got, want = run_both(state, logits, [0, 1, 2, 3])
    assert got == want


# Masks, side tables, logprobs.


def masked(state: BatchState, allowed: dict[int, list[int]], num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros(state.max_num_seqs + 1, num_words, dtype=torch.int64)
    has_mask = torch.zeros(state.max_num_seqs + 1, dtype=torch.bool)
    for slot, tokens in allowed.items():
        has_mask[slot] = True
        for token in tokens:
            words[slot, token // 32] |= 1 << (token % 32)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).to(state.device), has_mask.to(state.device)


def test_masks_equal_the_reference(device):
    vocab, chooser = 2005, random.Random(0)
    state = make_state(device, vocab)
    for slot in range(6):
        add(state, slot, [1, 2, 3], seed=slot, temperature=float(slot % 2))
    sets = {0: [7, 31, 32, 1983], 1: chooser.sample(range(1984), 300), 2: [], 4: [1980]}
    mask = masked(state, sets, 62)  # 1,984 tokens: the last are never allowed
    other = copy_of(state)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0))
    logits[3, 8] = float("nan")
    logits[4, 9] = INF
    slots = [0, 1, 2, 3, 4, 5, state.padding_slot]
    got = run(bind(state, mask=mask), logits.to(device), slots)
    mask = (mask[0].cpu(), mask[1].cpu())
    want = run(bind(other, ReferenceSample, mask=mask), logits, slots)
    assert (
        [code for _, code in got]
        == [code for _, code in want]
        == [OK, OK, NOTHING_ALLOWED, NOT_FINITE, NOT_FINITE, OK, 0]
    )
    for row in (0, 1, 5, 6):
        assert got[row] == want[row]
    assert got[0][0] in sets[0] and got[1][0] in sets[1]


@pytest.mark.parametrize("seed", range(4))
def test_side_tables_equal_the_reference(device, seed):
    """Few tokens are likely, so that every feature decides something; several steps, so that counts matter."""
    vocab, chooser = (300, 1500)[seed % 2], random.Random(seed)
    state = make_state(device, vocab, num_side_slots=5)
    num_rows = at_size(device, 5, 7)
    for slot in range(num_rows):
        side = random_side(chooser, vocab) | {"side_slot": slot // 2} if slot % 2 else {}
        tokens = [chooser.randrange(4) for _ in range(chooser.randint(3, 15))]
        add(state, slot, tokens, seed=chooser.randrange(2**62), **random_params(chooser, vocab), **side)
    other = copy_of(state)
    mine, reference = bind(state), bind(other, ReferenceSample)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(at_size(device, 3, 8)):
        logits = torch.randn(num_rows + 1, vocab, generator=generator)
        logits[:, :6] += 5.0
        slots = [*chooser.sample(range(num_rows), num_rows), state.padding_slot]
        assert run(mine, logits.to(device), slots) == run(reference, logits, slots)
        assert_same_state(state, other)
    assert state.side.counts.sum() > 0


def test_longer_bad_words_than_there_was_room_for(device):
    state = make_state(device, 300, num_side_slots=2)
    add(state, 0, [1, 1], temperature=0, side_slot=0, bad_words=[[1, 7]])
    op = bind(state)
    logits = torch.zeros(1, 300, device=device)
    logits[0, 7] = 1.0
    words = [[3] * 20 + [9], *([4, t] for t in range(40))]
    add(state, 1, [1] + [3] * 24, temperature=0, side_slot=1, bad_words=words, num_output=22)
    assert state.side.layout_version == 1
    logits[0, 9] = 2.0
    assert run(op, logits, [1]) == [[7, OK]]


@pytest.mark.parametrize("num_logprobs", [0, 5])
def test_logprobs_come_from_the_raw_logits(device, num_logprobs):
    vocab = 2000
    state = make_state(device, vocab, num_side_slots=1)
    add(state, 1, [3, 4], temperature=0.5, top_k=3, logit_bias={7: 50.0}, side_slot=0, logprobs=num_logprobs)
    add(state, 0, [3, 4], temperature=0, logprobs=num_logprobs)
    add(state, 2, [3, 4], temperature=1, logprobs=num_logprobs)
    other = copy_of(state)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[2, 64:70] = 9.0  # equal ones of one group: by lower token
    slots = [1, 0, 2, state.padding_slot]
    made = []
    for owner, implementation in ((state, None), (other, ReferenceSample)):
        ids, ranks = torch.full((6, 1 + num_logprobs), -9), torch.full((6,), -9)
        target = LogprobTensors(*(part.to(owner.device) for part in (ids, ids.float(), ranks)))
        op = bind(owner, implementation, num_logprobs=num_logprobs, logprobs=target)
        made.append((run(op, logits.to(owner.device), slots), target.to_host()))
    (got, mine), (want, theirs) = made
    assert got == want
    assert mine.ranks[:3].tolist() == theirs.ranks[:3].tolist()
    assert mine.token_ids[:2].tolist() == theirs.token_ids[:2].tolist()
    assert mine.token_ids[2].tolist() == [got[2][0], *range(64, 64 + num_logprobs)]
    assert mine.logprobs[:3] == pytest.approx(theirs.logprobs[:3], abs=1e-5, rel=1e-5)
    assert (mine.token_ids[4:] == -9).all() and (mine.ranks[4:] == -9).all()


def test_logprobs_beside_masks_and_tables(device):
    """They are of the logits before: few groups of tokens changed, all of them, by both, or none; every token is likely."""
    vocab, chooser = 2005, random.Random(1)
    state = make_state(device, vocab, num_side_slots=3)
    penalties = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.7}
    sides = [penalties, {"allowed_token_ids": list(range(3, vocab, 5))}, {}, penalties, {}]
    for slot, params in enumerate(sides):
        side = params | {"side_slot": min(slot, 2)} if params else {}
        tokens = [chooser.randrange(vocab) for _ in range(30)]
        add(state, slot, tokens, seed=slot, temperature=1.0, logprobs=4, num_output=10, **side)
    mask = masked(state, {slot: list(range(slot, 1984, 3)) for slot in (2, 3)}, 62)
    other = copy_of(state)
    logits, slots = torch.randn(5, vocab, generator=torch.Generator().manual_seed(4)), [3, 0, 4, 1, 2]
    made = []
    for owner, implementation in ((state, None), (other, ReferenceSample)):
        target = LogprobTensors.make(5, 4, owner.device)
        own_mask = tuple(part.to(owner.device) for part in mask)
        op = bind(owner, implementation, num_logprobs=4, logprobs=target, mask=own_mask)
        made.append((run(op, logits.to(owner.device), slots), target.to_host()))
    (got, mine), (want, theirs) = made
    assert got == want
    assert mine.ranks.tolist() == theirs.ranks.tolist()
    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_a_row_gets_as_many_logprobs_as_it_asked_for(device):
    """Rows that asked for none are left alone; ranks are right for unlikely tokens too, of changed logits or not."""
    vocab = 1501
    state = make_state(device, vocab, num_side_slots=1)
    wanted = [None, 0, 3, 6, 2]
    for slot, count in enumerate(wanted):
        side = {"side_slot": 0, "logit_bias": {11: 90.0}} if slot == 2 else {}
        add(state, slot, [3, 4], temperature=0 if slot == 2 else 2.0, seed=slot, logprobs=count, **side)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1))
    logits[4, 100:130] = 3.0
    target = LogprobTensors.make(5, 6, device)
    target.ranks.fill_(-9)
    target.token_ids.fill_(-9)
    got = run(bind(state, num_logprobs=6, logprobs=target), logits.to(device), [0, 1, 2, 3, 4])
    found, want = target.to_host(), logits.log_softmax(-1)
    assert got[2] == [11, OK]
    assert (found.ranks[0], found.token_ids[0].tolist()) == (-9, [-9] * 7)
    for row, count in enumerate(wanted[1:], start=1):
        token = got[row][0]
        order = want[row].sort(descending=True, stable=True).indices.tolist()
        assert found.token_ids[row].tolist() == [token, *order[:count], *[-9] * (6 - count)]
        assert found.ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
        expected = want[row][[token, *order[:count]]].tolist()
        assert found.logprobs[row, : 1 + count].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("vocab, num", [(1500, 5), (33, 20), (1, 0)])
def test_logprobs_of_prompts_equal_the_reference(device, vocab, num):
    from pelton_backends.triton.ops.sampling.logprobs import TritonLogprobs

    generator = torch.Generator().manual_seed(vocab)
    logits, tokens = torch.randn(7, vocab, generator=generator), torch.randint(0, vocab, (7,), generator=generator)
    logits[2, : vocab // 2] = -INF
    made = []
    for implementation, where in ((TritonLogprobs, device), (ReferenceLogprobs, CPU)):
        needs = LogprobsNeeds(vocab_size=vocab, max_rows=8, num_logprobs=num)
        assert implementation.unsupported(needs) == []
        whole = LogprobTensors.make(9, num, where)
        op = implementation.bind(needs, LogprobsTensors(where))
        op(logits[:5].to(where), tokens[:5].to(where), whole.part(1, 6))
        op(logits[5:].to(where), tokens[5:].to(where), whole.part(6, 8))
        made.append(whole.to_host())
    mine, theirs = made
    assert mine.ranks.tolist() == theirs.ranks.tolist() and mine.ranks[[0, 8]].tolist() == [0, 0]
    finite = theirs.logprobs > -INF  # which of the impossible tokens are listed is not said
    assert (mine.token_ids == theirs.token_ids)[finite].all()
    assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    too_many = LogprobsNeeds(vocab_size=10, max_rows=1, num_logprobs=11)
    assert TritonLogprobs.unsupported(too_many) == ["11 logprobs, at most 10"]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["greedy", "full"])
def test_replay_repeats_and_advances(device, variant):
    vocab, chooser = 151_936, random.Random(1)
    state = make_state(device, vocab, 16, num_side_slots=2)
    for slot in range(16):
        params = random_params(chooser, vocab) if variant == "full" else {"temperature": 0}
        add(state, slot, [1, 2, 3], seed=slot, **params)
    op = bind(state, variant=variant)
    logits = torch.zeros(16, vocab, device=device)
    slots = torch.full((16,), state.padding_slot, device=device)
    result = torch.zeros(16, 2, dtype=torch.int32, device=device)
    op(logits, slots, result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(logits, slots, result)
    other = copy_of(state, device)
    eager = bind(other, variant=variant)
    for _ in range(8):
        values = torch.randn(16, vocab, device=device) * 3
        logits.copy_(values)
        slots.copy_(torch.tensor([*chooser.sample(range(16), 13), *[state.padding_slot] * 3], device=device))
        graph.replay()
        assert run(eager, values, slots.tolist()) == result.tolist()
        assert_same_state(state, other)
    assert state.num_computed_tokens[:16].sum() == 16 * 2 + 8 * 13
