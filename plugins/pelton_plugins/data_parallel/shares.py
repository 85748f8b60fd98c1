"""Shares of requests that come at once and whose lengths are certain: engines end together, after as few steps as can be.

A step reads all weights, however few rows it has, and an engine makes as many steps as its longest answer has tokens. So the long answers
go to one engine and the short ones to another, which then ends its steps early and has room for more rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from pelton.messages.request import EngineRequest
from pelton.sampling_params import RequestOutputKind

STEP_COST, CPU_STEP_COST = 210.0, 16.0
"""What a step costs that has few rows, in prompt tokens: fitted to the steps of Llama-3.1-8B on an H200."""
ROW_COST = 2.0
"""A row of one token, with what its attention reads."""
LEAST_GAIN = 0.03
"""Shares by length have to end so much earlier than shares in turn."""
NUM_HALVINGS = 30


def num_certain_tokens(request: EngineRequest) -> int | None:
    """Return how many tokens a request will be given, or None where that is not certain, or somebody reads them as they come."""
    params = request.sampling_params
    if request.pooling_params is not None:
        return 0
    if params.max_tokens is None or params.output_kind is not RequestOutputKind.FINAL_ONLY:
        return None
    may_end_early = (
        not params.ignore_eos or params.stop or params.stop_token_ids or params.structured_outputs is not None
    )
    if may_end_early and params.max_tokens > max(params.min_tokens, 1):
        return None
    return params.max_tokens


class _Costs:
    """Costs of neighbouring requests on one engine. sizes: (tokens of the prompt, of the answer) of each, in order."""

    def __init__(self, sizes: Sequence[tuple[int, int]], max_num_seqs: int, step_cost: float) -> None:
        self._prompts = list(accumulate((size for size, _ in sizes), initial=0))
        self._rows = list(accumulate((count for _, count in sizes), initial=0))
        self._longest = list(accumulate((count for _, count in sizes), max, initial=0))
        self._max_num_seqs, self._step_cost = max_num_seqs, step_cost

    def of(self, start: int, end: int) -> float:
        """Answers do not get shorter from `start` to `end`."""
        rows = self._rows[end] - self._rows[start]
        num_steps = max(self._longest[end] if end > start else 0, rows / self._max_num_seqs)
        return self._prompts[end] - self._prompts[start] + ROW_COST * rows + self._step_cost * num_steps

    def cuts(self, most: float, num_shares: int) -> list[int] | None:
        """Return the ends of shares that cost at most `most` each; None where so many shares do not hold all."""
        size, ends = len(self._rows) - 1, [0]
        while len(ends) <= num_shares and ends[-1] < size:
            start = ends[-1]
            ends.append(
                bisect_left(range(start + 1, size + 1), True, key=lambda end: self.of(start, end) > most) + start
            )
        return ends[1:] if ends[-1] == size else None


def by_length(
    sizes: Sequence[tuple[int, int]], num_shares: int, max_num_seqs: int, step_cost: float
) -> list[int] | None:
    """Return the share of each request, the longest answers in share 0; None where shares in turn are as good.

    sizes: (tokens of the prompt, of the answer) of each.
    """
    order = sorted(range(len(sizes)), key=lambda index: (sizes[index][1], sizes[index][0]))
    costs = _Costs([sizes[index] for index in order], max_num_seqs, step_cost)
    in_turn = max(
        _Costs(share, max_num_seqs, step_cost).of(0, len(share))
        for share in (sizes[place::num_shares] for place in range(num_shares))
    )
    low, high = 0.0, (1 - LEAST_GAIN) * in_turn
    if costs.cuts(high, num_shares) is None:
        return None
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if costs.cuts(middle, num_shares) is None else (low, middle)
    ends = costs.cuts(high, num_shares)
    assert ends is not None
    shares, start = [0] * len(sizes), 0
    for number, end in enumerate(ends):
        for index in order[start:end]:
            shares[index] = len(ends) - 1 - number
        start = end
    return shares
