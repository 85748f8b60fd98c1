"""The arithmetic of serving figures, arrivals and lengths."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from itertools import islice

import pytest

from pelton.errors import ConfigError
from pelton_plugins.bench.arrivals import arrival_times
from pelton_plugins.bench.metrics import LogHistogram, RequestTimes, percentile, read_slos, summary
from pelton_plugins.bench.serve import figures
from pelton_plugins.bench.workloads import random_requests, synthetic_requests, table_workloads


def test_stamps_give_ttft_itl_tpot_and_e2e():
    times = RequestTimes([1.0, 1.5, 2.5])
    assert (times.ttft_s, times.itls_s, times.tpot_s, times.e2e_s) == (1.0, [0.5, 1.0], 0.75, 2.5)


def test_one_token_has_no_tpot_and_tokens_that_come_together_have_none_between_them():
    assert RequestTimes([2.0]).tpot_s is None and RequestTimes([2.0]).e2e_s == 2.0
    together = RequestTimes([1.0, 1.0, 4.0])
    assert together.itls_s == [0.0, 3.0] and together.tpot_s == 1.5


@pytest.mark.parametrize(
    "values, percent, expected",
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6),
        ([7.0], 99, 7.0),
        ([1.0, 9.0], 0, 1.0),
        ([1.0, 9.0], 100, 9.0),
    ],
)
def test_percentiles_lie_between_ranks(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_nothing_has_no_percentile():
    assert math.isnan(percentile([], 50)) and math.isnan(summary([], [50])["mean"])


def test_goodput_counts_requests_that_meet_every_objective():
    fast, slow_start, slow_tokens = (
        RequestTimes([0.1, 0.2]),
        RequestTimes([0.9, 1.0]),
        RequestTimes([0.1, 0.2, 1.2]),
    )
    failed = RequestTimes([0.1, 0.2], error="gone")
    done = [fast, slow_start, slow_tokens, failed]
    result = figures(done, 2.0, {"ttft": 500.0, "tpot": 200.0}, [50, 99])
    assert (result["completed"], result["failed"], result["good_completed"]) == (3, 1, 1)
    assert result["request_goodput"] == 0.5
    assert result["total_output_tokens"] == 7 and result["output_throughput"] == 3.5
    assert result["ttft_ms"]["p50"] == pytest.approx(100.0) and result["errors"] == ["gone"]
    assert figures(done, 2.0, {"e2el": 1100.0}, [50])["good_completed"] == 2
    assert "request_goodput" not in figures(done, 2.0, {}, [50])


def test_a_bound_counts_as_met():
    assert RequestTimes([0.25]).meets({"ttft": 250.0, "tpot": 1.0, "e2el": 250.0})


def test_objectives_are_read_and_refused():
    assert read_slos(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}
    for bad in ("ttft", "ttft:fast", "itl:3", "tpot:-1", "tpot:nan"):
        with pytest.raises(ConfigError, match="--goodput is"):
            read_slos([bad])


def test_a_histogram_is_within_one_percent():
    rng = random.Random(3)
    values = [rng.lognormvariate(-6, 1.5) for _ in range(20_000)]
    histogram = LogHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.num_values == len(values)
    for percent in (1, 50, 90, 99, 99.9):
        assert histogram.percentile(percent) == pytest.approx(percentile(values, percent), rel=0.012)
    assert math.isnan(LogHistogram().percentile(50))
    zeros = LogHistogram()
    zeros.add(0.0)
    assert zeros.percentile(50) < 1e-6


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_moments_of_their_law(burstiness):
    """Gamma with shape b and mean 1 / rate: the standard deviation is mean / sqrt(b)."""
    times = list(islice(arrival_times(8.0, burstiness, random.Random(11)), 40_000))
    gaps = [late - early for early, late in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.125, rel=0.02)
    assert statistics.pstdev(gaps) == pytest.approx(0.125 / math.sqrt(burstiness), rel=0.03)


def test_poisson_counts_have_equal_mean_and_variance():
    times = list(islice(arrival_times(5.0, 1.0, random.Random(4)), 50_000))
    counts = [0] * (int(times[-1]) + 1)
    for time in times:
        counts[int(time)] += 1
    assert statistics.pvariance(counts[:-1]) / statistics.fmean(counts[:-1]) == pytest.approx(1.0, abs=0.05)


def test_an_infinite_rate_sends_all_at_once():
    assert list(islice(arrival_times(math.inf, 1.0, random.Random(0)), 3)) == [0.0, 0.0, 0.0]
    for rate, burstiness in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ConfigError, match="use positive numbers"):
            next(arrival_times(rate, burstiness, random.Random(0)))


# Computed with the script that measured the other engines: requests, prompt tokens, output tokens, repeats, and the
# first digits of the SHA-256 of the prompts as Python prints them.
MEASURED = {
    "latency1": (1, 128, 256, 3, "e14229c74287d32e"),
    "batch32": (32, 4096, 8192, 2, "72be9a39207298b6"),
    "batch128": (128, 16384, 32768, 2, "b128f6c905b6ba2d"),
    "nano256": (256, 133578, 140037, 2, "97affb02c416cbb2"),
    "sharegpt": (1000, 260765, 239123, 2, "a46180f405a5741b"),
    "prefill": (64, 131072, 64, 2, "6ef8af937524ee43"),
}


@pytest.mark.parametrize("vocab_size", [151936, 128256])
def test_the_tables_requests_are_those_that_other_engines_ran(vocab_size):
    found = table_workloads(vocab_size)
    assert [*found][:6] == [*MEASURED]
    for name, expected in MEASURED.items():
        one = found[name]
        digest = hashlib.sha256(repr(one.prompts).encode()).hexdigest()[:16]
        shape = (len(one.prompts), one.num_prompt_tokens, sum(one.num_output_tokens), one.repeats, digest)
        assert shape == expected, name


def test_repeats_share_no_prefix_unless_the_row_is_about_one():
    found = table_workloads(151936)
    batch = found["batch32"]
    first, second = batch.fresh(0), batch.fresh(1)
    firsts = [prompt[0] for prompt in [*first, *second]]
    assert len(set(firsts)) == 64
    assert all(a[1:] == b[1:] for a, b in zip(first, batch.prompts, strict=True))
    firsts = [prompt[0] for repeat in range(2) for prompt in found["sharegpt-4000"].fresh(repeat)]
    assert len(set(firsts)) == 8000
    assert sorted(found["sharegpt-2000"].num_output_tokens) == sorted(2 * found["sharegpt"].num_output_tokens)
    shared = found["shared-prefix"].fresh(1)
    assert len({tuple(prompt[:2000]) for prompt in shared}) == 1
    assert len({tuple(prompt) for prompt in shared}) == 64
    assert shared[0][:2000] != found["shared-prefix"].fresh(2)[0][:2000]


@pytest.mark.parametrize(
    "lengths, num_in, num_out",
    [((30, 20), {30}, {20}), ((30, None), {30}, {128}), ((None, 20), None, {20}), ((None, None), None, None)],
)
def test_lengths_that_are_not_given_are_log_normal_but_for_the_answers_of_equal_prompts(lengths, num_in, num_out):
    requests = synthetic_requests(200, *lengths, 5000, random.Random(0), max_tokens=256)
    for expected, found in ((num_in, {len(p) for p, _ in requests}), (num_out, {count for _, count in requests})):
        assert found == expected if expected else len(found) > 20
    assert all(len(prompt) + count <= 256 for prompt, count in requests)


def test_lengths_that_do_not_fit_the_model_are_refused():
    for lengths in ((200, 57), (200, None), (None, 256)):
        with pytest.raises(ConfigError, match="does not fit the model's 256; lower input_len"):
            synthetic_requests(1, *lengths, 5000, random.Random(0), max_tokens=256)
    with pytest.raises(ConfigError, match="105 tokens in and 150 out does not fit the model's 254"):
        synthetic_requests(1, 50, 100, 5000, random.Random(0), max_tokens=254, prefix_len=30, range_ratio=0.5)


def test_random_requests_fit_the_context():
    requests = random_requests(300, 5000, random.Random(0), max_tokens=256)
    assert all(len(prompt) >= 1 and count >= 1 and len(prompt) + count <= 256 for prompt, count in requests)
    assert all(10 <= token < 5000 for prompt, _ in requests for token in prompt)
    assert len({len(prompt) for prompt, _ in requests}) > 20
