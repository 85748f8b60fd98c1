"""Logprobs and ranks of raw logits."""

from __future__ import annotations

import pytest
import torch

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
