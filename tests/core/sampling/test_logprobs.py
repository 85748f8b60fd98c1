"""Logprobs and ranks of raw logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.messages.outputs import LogprobColumns, PackedLogprobs
from pelton.sampling.logprobs import HostLogprobs, gather_logprobs


@pytest.mark.parametrize("most", [0, 1, 5, 30, 100, -1])
def test_chosen_token_first_then_the_likeliest(most):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3))
    chosen = torch.tensor([0, 7, 29, int(logits[3].argmax())])
    host = gather_logprobs(logits, chosen, most).to_host()
    expected = logits.log_softmax(-1)
    columns = host.columns(slice(None), most)
    for row in range(4):
        order = sorted(range(30), key=lambda token: -float(expected[row, token]))
        count = 30 if most < 0 else min(most, 30)
        assert columns.token_ids[row] == [int(chosen[row]), *order[:count]]
        assert columns.logprobs[row] == pytest.approx(
            [float(expected[row, t]) for t in columns.token_ids[row]], abs=1e-5
        )
        assert columns.ranks[row] == order.index(int(chosen[row])) + 1


def test_a_request_gets_as_many_as_it_asked_for():
    host = gather_logprobs(torch.randn(3, 20), torch.tensor([1, 2, 3]), 6).to_host()
    assert [len(ids) for ids in host.columns(slice(1, 3), 2).token_ids] == [3, 3]
    assert host.columns([0], 0).token_ids == [[1]]


def test_parts_are_joined_in_order():
    logits, chosen = torch.randn(5, 20), torch.arange(5)
    whole = gather_logprobs(logits, chosen, 2).to_host().columns(slice(None), 2)
    parts = [gather_logprobs(logits[a:b], chosen[a:b], 2).to_host() for a, b in ((0, 2), (2, 5))]
    assert HostLogprobs.join(parts).columns(slice(None), 2) == whole


def test_impossible_token_has_minus_infinity_and_the_last_rank():
    logits = torch.tensor([[1.0, -torch.inf, 0.0]])
    columns = gather_logprobs(logits, torch.tensor([1]), 1).to_host().columns(slice(None), 1)
    assert columns.logprobs[0][0] == -float("inf") and columns.ranks == [3]


def test_each_position_gets_as_many_as_its_request_asked_for():
    logits, chosen = torch.randn(5, 20), torch.arange(5)
    host = gather_logprobs(logits, chosen, 6).to_host()
    positions, wanted = np.array([4, 0, 1, 3]), np.array([2, 6, 0, 2])
    found = host.by_position(positions, wanted)
    assert found == [host.packed([p], w) for p, w in zip(positions.tolist(), wanted.tolist(), strict=True)]
    assert host.by_position(positions[:0], wanted[:0]) == []


@pytest.mark.parametrize("width, count", [(1, 3), (4, 2), (3, 0)])
def test_packed_logprobs_are_the_columns(width, count):
    columns = LogprobColumns(
        [[7 * p + t for t in range(width)] for p in range(count)],
        [[-0.5 * t - p for t in range(width)] for p in range(count)],
        [p + 1 for p in range(count)],
    )
    packed = columns.packed()
    assert packed.columns() == columns and len(packed) == count
    assert packed.chosen() == [row[0] for row in columns.logprobs]
    assert packed.head(count + 1) is packed
    assert packed.head(1).columns() == LogprobColumns(columns.token_ids[:1], columns.logprobs[:1], columns.ranks[:1])
    assert PackedLogprobs.join([packed, packed.head(1)]).columns() == LogprobColumns(
        columns.token_ids + columns.token_ids[:1],
        columns.logprobs + columns.logprobs[:1],
        columns.ranks + columns.ranks[:1],
    )
    assert len(PackedLogprobs.join([])) == 0


@pytest.mark.parametrize("ids, values, ranks", [
    pytest.param([[1, 2], [3]], [[0.0, 0.0], [0.0]], [1, 1], id="rows-of-different-lengths"),
    pytest.param([[1]], [[0.0, 1.0]], [1], id="more-logprobs-than-tokens"),
    pytest.param([[1], [2]], [[0.0], [0.0]], [1], id="too-few-ranks"),
])  # fmt: skip
def test_columns_that_do_not_fit_are_not_packed(ids, values, ranks):
    with pytest.raises(ValueError, match="positions have rows of"):
        LogprobColumns(ids, values, ranks).packed()
