"""Junk spreads along tables, and from one request to those who found its blocks."""

from __future__ import annotations

import pytest

from pelton.testing.scheduler import make_request
from pelton_plugins.scheduler.invalid_blocks import BlockUse, find_readers
from pelton_plugins.scheduler.request import RequestState


def use(name, *tables):
    return BlockUse(RequestState(make_request(name, 3), 0, max_model_len=64, now=0.0), 0, tables)


@pytest.mark.parametrize(
    "bad, spoilt, touched",
    [
        pytest.param({9}, {9}, "", id="nobody-uses-it"),
        pytest.param({3}, {3, 4}, "a", id="what-follows-is-spoilt-what-precedes-is-not"),
        pytest.param({5}, {5, 6, 7}, "bc", id="and-so-are-those-who-found-what-follows"),
        pytest.param(set(), set(), "", id="nothing"),
    ],
)
def test_spread(bad, spoilt, touched):
    uses = [use("a", [1, 3, 4]), use("c", [6, 7]), use("b", [1, 5, 6])]
    all_bad, found = find_readers(bad, uses, [4])
    assert all_bad == spoilt
    assert sorted(one.request.request_id for one in found) == list(touched)


def test_spread_goes_by_tokens_across_groups_and_skips_null_blocks():
    all_bad, _ = find_readers({2}, [use("a", [1, 2, 3], [0, 11, 12, 13, 14, 15])], [4, 2])
    assert all_bad == {2, 3, 12, 13, 14, 15}
