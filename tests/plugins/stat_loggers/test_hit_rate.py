"""The hit rate of the log line, over a window of queries."""

import pytest

from pelton_plugins.stat_loggers.hit_rate import HitRateWindow


def test_the_1001st_query_drops_the_first():
    window = HitRateWindow()
    window.observe(1, 100, 100)
    for _ in range(999):
        window.observe(1, 100, 0)
    assert window.num_queries == 1000
    assert window.hit_rate == pytest.approx(1 / 1000)
    window.observe(1, 100, 0)
    assert window.num_queries == 1000
    assert window.hit_rate == 0.0


def test_a_step_of_many_queries_is_kept_whole():
    window = HitRateWindow(max_queries=10)
    window.observe(25, 100, 50)
    assert window.hit_rate == 0.5
    window.observe(3, 100, 0)
    assert (window.num_queries, window.hit_rate) == (3, 0.0)


def test_no_queries_is_no_division():
    window = HitRateWindow()
    window.observe(0, 0, 0)
    assert (window.num_queries, window.hit_rate) == (0, 0.0)
