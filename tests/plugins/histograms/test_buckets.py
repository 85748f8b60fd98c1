"""Histograms by buckets."""

from __future__ import annotations

import random

from pelton.metrics.snapshot import Histogram
from pelton_plugins.histograms.buckets import BucketCounts


def test_buckets_count_values_at_a_bound_below_it():
    counts = BucketCounts([1.0, 2.0])
    counts.observe_all([0.5, 1.0, 1.5, 2.0])
    counts.observe(7)
    assert counts.cumulative() == {"1.0": 2, "2.0": 4, "+Inf": 5}
    assert (counts.count, counts.sum) == (5, 12.0)
    assert counts.as_metric("x_seconds", "What it is.", {"a": "b"}) == Histogram(
        name="x_seconds", labels={"a": "b"}, documentation="What it is.", count=5, sum=12.0, buckets=counts.cumulative()
    )


def test_buckets_agree_with_counting():
    rng = random.Random(3)
    bounds = sorted(rng.sample(range(1000), 20))
    values = [rng.uniform(-10, 1100) for _ in range(500)]
    counts = BucketCounts(bounds)
    counts.observe_all(values)
    for bound, cumulative in counts.cumulative().items():
        assert cumulative == sum(value <= float(bound) for value in values)
