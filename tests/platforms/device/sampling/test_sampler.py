"""The batched sampler against a plain one, row by row: law, features, independence of the batch."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pelton.sampling.columns import columns_of
from pelton.sampling.error_codes import NOT_FINITE, NOTHING_ALLOWED, OK, PROCESSED_WRONG
from pelton.sampling_params import SamplingParams
from pelton_platforms.device.sampling.filters import (
    _threshold_by_bisection,
    filtered_probs,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    nucleus_threshold,
)
from pelton_platforms.device.sampling.metadata import SamplingMetadata
from pelton_platforms.device.sampling.random import random_bits, uniform
from pelton_platforms.device.sampling.sampler import pick, sample, unpack_bitmask

VOCAB = 50


def metadata(rows: list[dict], *, seeds=None, positions=None, vocab: int = VOCAB) -> SamplingMetadata:
    """As the runner makes it, from rows of sampling parameters."""
    columns, active, max_top_k = columns_of([SamplingParams(**row) for row in rows], vocab)
    return SamplingMetadata(
        seeds=torch.tensor(seeds if seeds is not None else list(range(len(rows)))),
        positions=torch.tensor(positions if positions is not None else [7] * len(rows)),
        columns=columns, active=active, max_top_k=max_top_k,
    )  # fmt: skip


def slow_probs(logits: list[float], row: dict) -> list[float]:
    """The distribution of one row, by the definitions: min_p, then top_k, then top_p, on logits / temperature."""
    scaled = [x / row.get("temperature", 1.0) for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    kept = [w if w >= row.get("min_p", 0.0) * max(weights) else 0.0 for w in weights]
    if row.get("top_k"):
        least = sorted(kept, reverse=True)[row["top_k"] - 1]
        kept = [w if w >= least else 0.0 for w in kept]
    total = sum(kept)
    probs = [w / total for w in kept]
    if row.get("top_p", 1.0) < 1.0:
        mass = 0.0
        for least in sorted(set(probs), reverse=True):
            mass = sum(p for p in probs if p >= least)
            if mass >= row["top_p"]:
                break
        probs = [p if p >= least else 0.0 for p in probs]
    total = sum(probs)
    return [p / total for p in probs]


def random_row(chooser: random.Random) -> dict:
    row: dict = {"temperature": chooser.choice([0.3, 0.8, 1.0, 1.7])}
    if chooser.random() < 0.5:
        row["top_k"] = chooser.choice([1, 2, 5, 20, 49])
    if chooser.random() < 0.5:
        row["top_p"] = chooser.choice([0.05, 0.3, 0.8, 0.97])
    if chooser.random() < 0.4:
        row["min_p"] = chooser.choice([0.01, 0.2, 0.9])
    return row


@pytest.mark.parametrize("seed", range(8))
def test_filtered_law_is_the_reference_law(seed):
    chooser = random.Random(seed)
    rows = [random_row(chooser) for _ in range(chooser.randint(1, 9))]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    scaled = logits / torch.tensor([row["temperature"] for row in rows]).unsqueeze(-1)
    probs = filtered_probs(scaled, metadata(rows))
    probs = probs / probs.sum(-1, keepdim=True)
    for got, row, values in zip(probs, rows, logits, strict=True):
        assert got.tolist() == pytest.approx(slow_probs(values.tolist(), row), abs=1e-5)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.5}, id="temperature"),
        pytest.param({"top_k": 5}, id="top-k"),
        pytest.param({"top_p": 0.7}, id="top-p"),
        pytest.param({"min_p": 0.1, "temperature": 1.5}, id="min-p"),
        pytest.param({"top_k": 12, "top_p": 0.9, "min_p": 0.02}, id="all"),
    ],
)
@pytest.mark.parametrize("varied", ["positions", "seeds"])
def test_sampled_law_is_the_target_by_chi_square(row, varied):
    count = 20_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = slow_probs(logits.tolist(), row)
    numbers = {"positions": [3] * count, "seeds": [42] * count, varied: list(range(count))}
    meta = metadata([row], seeds=[0], positions=[0])
    meta.seeds, meta.positions = torch.tensor(numbers["seeds"]), torch.tensor(numbers["positions"])
    meta.columns = {name: column.expand(count) for name, column in meta.columns.items()}
    token_ids, codes = sample(logits.expand(count, -1).clone(), meta)
    assert not codes.any()
    observed = torch.bincount(token_ids, minlength=VOCAB).tolist()
    assert all(seen == 0 for seen, p in zip(observed, expected, strict=True) if p == 0)
    # Tokens that are expected fewer than 5 times go into one bin.
    bins = [(o, p * count) for o, p in zip(observed, expected, strict=True) if p * count >= 5]
    rest = [(o, p * count) for o, p in zip(observed, expected, strict=True) if 0 < p * count < 5]
    if rest and sum(e for _, e in rest) >= 5:
        bins.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    freedom = len(bins) - 1
    # The 99.99 % point of chi-square, by Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_a_row_does_not_depend_on_the_batch():
    chooser = random.Random(4)
    rows = [random_row(chooser) if chooser.random() < 0.8 else {"temperature": 0.0} for _ in range(40)]
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(2)) * 4
    seeds, positions = [chooser.randrange(2**63) for _ in rows], [chooser.randrange(4000) for _ in rows]
    together, _ = sample(logits.clone(), metadata(rows, seeds=seeds, positions=positions, vocab=1000))
    alone = [
        int(
            sample(logits[i : i + 1].clone(), metadata([row], seeds=[seeds[i]], positions=[positions[i]], vocab=1000))[
                0
            ]
        )
        for i, row in enumerate(rows)
    ]
    assert together.tolist() == alone
    order = list(range(40))
    chooser.shuffle(order)
    shuffled, _ = sample(
        logits[order].clone(),
        metadata([rows[i] for i in order], seeds=[seeds[i] for i in order], positions=[positions[i] for i in order], vocab=1000),
    )  # fmt: skip
    assert shuffled.tolist() == [alone[i] for i in order]


def test_greedy_rows_take_the_best_among_random_ones():
    logits = torch.randn(6, VOCAB)
    rows = [{"temperature": 0.0}, {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}]
    token_ids, _ = sample(logits.clone(), metadata(rows))
    for row in (0, 2, 5):
        assert token_ids[row] == logits[row].argmax()


def test_same_seed_and_position_give_the_same_number_and_others_do_not():
    seeds = torch.tensor([0, 0, 1, -1, 2**62, 0])
    positions = torch.tensor([0, 1, 0, 0, 0, 0])
    numbers = uniform(seeds, positions).tolist()
    assert numbers[0] == numbers[5]
    assert len(set(numbers)) == 5


def test_random_bits_are_the_same_for_ever():
    """A change of the mixing would change every seeded answer: it needs a release note, not an accident."""
    bits = random_bits(torch.tensor([0, 1, -5]), torch.tensor([0, 1, 2**40]))
    assert bits.tolist() == [slow_bits(0, 0), slow_bits(1, 1), slow_bits(-5, 2**40)]


def slow_bits(seed: int, position: int) -> int:
    """splitmix64 over Python's integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    step = 0x9E3779B97F4A7C15
    bits = mix(mix((seed + step) & mask) ^ mix((position * step + 0xBF58476D1CE4E5B9) & mask))
    return bits - 2**64 if bits >= 2**63 else bits


def test_uniform_numbers_are_uniform_and_uncorrelated():
    count = 50_000
    numbers = uniform(torch.arange(count), torch.arange(count) % 17)
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert float(((counts - count / 100) ** 2 / (count / 100)).sum()) < 160
    pairs = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02
    same_seed = uniform(torch.full((count,), 9), torch.arange(count))
    assert abs(float(torch.corrcoef(torch.stack([same_seed[:-1], same_seed[1:]]))[0, 1])) < 0.02


def test_pick_never_takes_a_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    ends = torch.tensor([2.0**-49, 0.5 - 2.0**-49, 0.5, 1 - 2.0**-49], dtype=torch.float64)
    assert pick(probs, ends).tolist() == [1, 1, 3, 3]


def test_unlikely_tail_can_be_reached():
    """float64 sums: with float32 ones a tail of 1e-9 would be lost."""
    probs = torch.full((1, 4), 1e-10)
    probs[0, 0] = 1.0
    assert pick(probs, torch.tensor([1 - 2.0**-49], dtype=torch.float64)).tolist() == [3]


def test_ties_at_the_border_are_kept():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert keep_top_k(logits, torch.tensor([2]), 2).isfinite().tolist() == [[True, True, True, True, False]]
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert (keep_top_p(probs, torch.tensor([0.5])) > 0).tolist() == [[True] * 4]
    assert (keep_top_p(probs, torch.tensor([0.4])) > 0).tolist() == [[True, False, False, False]]


def test_row_without_top_k_keeps_all_beside_one_that_has_it():
    logits = torch.randn(2, VOCAB)
    kept = keep_top_k(logits, torch.tensor([3, VOCAB]), 3).isfinite().sum(-1)
    assert kept.tolist() == [3, VOCAB]


def test_min_p_zero_keeps_all_beside_one_that_has_it():
    logits = torch.randn(2, VOCAB) * 5
    kept = keep_min_p(logits, torch.tensor([0.5, 0.0])).isfinite().sum(-1).tolist()
    assert kept[0] < VOCAB and kept[1] == VOCAB


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_bisection_finds_the_threshold_of_the_short_list(scale):
    """Flat rows have nuclei beyond the candidates, so both ways run."""
    probs = (torch.randn(7, 3000, generator=torch.Generator().manual_seed(5)) * scale).softmax(-1)
    top_p = torch.tensor([0.01, 0.2, 0.5, 0.9, 0.99, 0.999, 1.0])
    found = nucleus_threshold(probs, top_p)
    assert found[-1] == 0
    assert torch.equal(found[:-1], _threshold_by_bisection(probs, top_p)[:-1])
    for row in range(6):
        mass = float(probs[row][probs[row] >= found[row]].double().sum())
        above = float(probs[row][probs[row] > found[row]].double().sum())
        assert mass >= float(top_p[row]) > above


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_that_is_not_finite_has_a_code_and_a_token_below_the_vocabulary(value, temperature):
    logits = torch.randn(3, VOCAB)
    logits[1, 7] = value
    token_ids, codes = sample(logits, metadata([{"temperature": temperature, "top_p": 0.9, "top_k": 20}] * 3))
    assert codes.tolist() == [OK, NOT_FINITE, OK]
    assert bool(((token_ids >= 0) & (token_ids < VOCAB)).all())


@pytest.mark.parametrize("row", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_tokens_at_minus_infinity_are_never_sampled(row):
    logits = torch.full((200, VOCAB), -torch.inf)
    logits[:, [4, 9]] = torch.tensor([1.0, 1.5])
    token_ids, codes = sample(logits, metadata([row] * 200))
    assert set(token_ids.tolist()) <= {4, 9} and not codes.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_whose_tokens_are_all_masked_has_a_code(temperature):
    rows = [{"temperature": temperature, "top_p": 0.5, "min_p": 0.1, "top_k": 4}] * 3
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    token_ids, codes = sample(torch.randn(3, VOCAB), metadata(rows), (torch.tensor([1]), allowed))
    assert codes.tolist() == [OK, NOTHING_ALLOWED, OK]
    assert bool((token_ids < VOCAB).all())


def test_mask_bounds_its_rows_only():
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, 13] = True
    logits = torch.randn(3, VOCAB)
    token_ids, _ = sample(logits.clone(), metadata([{"temperature": 0.0}] * 3), (torch.tensor([2]), allowed))
    assert token_ids.tolist() == [*logits[:2].argmax(-1).tolist(), 13]


@pytest.mark.parametrize("vocab, num_words", [(32, 1), (33, 2), (70, 3)])
def test_bitmask_has_one_bit_a_token(vocab, num_words):
    allowed = torch.rand(4, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    words = torch.zeros(4, num_words, dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    assert torch.equal(unpack_bitmask(words, vocab), allowed)


def test_tokens_beyond_the_mask_are_not_allowed():
    assert unpack_bitmask(torch.tensor([[-1]], dtype=torch.int32), 40).tolist() == [[True] * 32 + [False] * 8]


def test_processed_logits_are_sampled_and_codes_of_processors_are_the_rows():
    logits = torch.zeros(2, VOCAB)

    def process(given: torch.Tensor) -> torch.Tensor:
        given[0, 7] = 9.0
        return torch.tensor([OK, PROCESSED_WRONG])

    token_ids, codes = sample(logits, metadata([{"temperature": 0.0}] * 2), process=process)
    assert token_ids[0] == 7 and codes.tolist() == [OK, PROCESSED_WRONG]


def test_a_row_that_was_not_finite_before_keeps_its_code_whatever_a_processor_says():
    logits = torch.full((1, VOCAB), math.nan)
    _, codes = sample(logits, metadata([{"temperature": 0.0}]), process=lambda given: torch.tensor([PROCESSED_WRONG]))
    assert codes.tolist() == [NOT_FINITE]
