"""Steps of several ranks whose rows ask for more than their best token: each rank samples a share of the rows.

Ranks have a share of the vocabulary each. Instead of all logits going to all of them, each gets the whole rows of its share, and samples
these as one device does: sums over a row are added in the order in which one device adds them, so that ids are equal bit for bit, whatever
filters, masks or tables there are. What was sampled, a few words of each row, then goes round.

    logits of rank 0   rows 0-7, tokens 0 to V/2      swap      rows 0-3, all tokens -> ids 0-3    gather
    logits of rank 1   rows 0-7, tokens V/2 to V    ------->    rows 4-7, all tokens -> ids 4-7   ------->   ids 0-7
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pelton.sampling.logprobs import LogprobTensors
from pelton_platforms.device.steps.logit_shares import LEAST_BYTES, LogitShares
from pelton_platforms.device.steps.reference_step import advance

if TYPE_CHECKING:
    from pelton.ops.interface import Logprobs
    from pelton.ops.interface import Sample as SampleOp
    from pelton_platforms.device.steps.batch_state import BatchState
    from pelton_platforms.device.steps.step_plan import Ints


class RowShares:
    """Rank r has rows r m to (r + 1) m - 1 of a step's n rows of logits, those that there are. m = ceil(n / ranks), or, in units of rows
    that stay together, so many whole units."""

    def __init__(self, shares: LogitShares, state: BatchState) -> None:
        self._shares, self._state = shares, state

    def pay(self, num_rows: int) -> bool:
        """Return whether rows are swapped sooner than all logits are gathered."""
        size = self._shares.size
        return num_rows >= size and 4 * num_rows * self._state.vocab_size >= LEAST_BYTES * size

    def count(self, num_rows: int, unit: int = 1) -> int:
        """m"""
        return -(-num_rows // (self._shares.size * unit)) * unit

    def own(self, num_rows: int, count: int) -> slice:
        """This rank's rows of `num_rows`, at most `count`."""
        first = min(self._shares.rank * count, num_rows)
        return slice(first, min(first + count, num_rows))

    def logits(self, num_rows: int, compute: Callable[[], Tensor], unit: int = 1) -> Tensor:
        """[m, V] float32 of this rank's rows, of those that `compute` has logits for; rows behind the last are zeros."""
        count = self.count(num_rows, unit)
        with self._shares.rows(count):
            logits = compute()
        if len(logits) == count:
            return logits
        found = logits.new_zeros(count, logits.shape[1])  # of a model that gathers by itself
        own = logits[self.own(num_rows, count)]
        found[: len(own)] = own
        return found

    def gather(self, part: Tensor, num_rows: int) -> Tensor:
        """[n, ...] from each rank's [m, ...]."""
        return self._shares.ranks.all_gather(part.contiguous(), 0)[:num_rows]

    def sample(
        self, op: SampleOp, logits: Tensor, slots: Tensor, result: Tensor, logprobs: LogprobTensors | None = None
    ) -> None:
        """As the `sample` op `op`, for logits [m, V] of this rank's rows. slots [n], result [n, 2] and the state: of all of them.
        logprobs: where the op writes those of the rows that it is given; all rows' lie there afterwards."""
        state, num_rows, own = self._state, len(slots), self.own(len(slots), len(logits))
        brought = torch.zeros(len(logits), 2, dtype=torch.int32, device=logits.device)
        if own.stop > own.start:
            op(logits[: own.stop - own.start], slots[own], brought[: own.stop - own.start])
        if logprobs is None:
            found = self.gather(brought, num_rows)
        else:
            words = self.gather(torch.cat([brought, _words(logprobs.part(0, len(logits)))], dim=1), num_rows)
            found = words[:, :2]
            _place(words[:, 2:], logprobs.part(0, num_rows))
        result.copy_(found)
        others = slots.clone()
        others[own] = state.padding_slot
        advance(state, others, found[:, 0].long(), found[:, 1].long(), torch.zeros_like(result))
        if state.side.counts.shape[0]:
            side_slots = state.side_slots[others]
            is_counted = (others != state.padding_slot) & (side_slots >= 0)
            state.side.count(side_slots.clamp(min=0), found[:, 0].long(), is_counted.to(torch.int32))

    def places(self, rows: Ints, count: int) -> tuple[Ints, Ints]:
        """Which of this rank's `count` rows are among `rows` of all, filled up to what the rank with most of them has; and the places
        of all `rows` in what is gathered of these."""
        owner = rows // count
        most = int(np.bincount(owner).max(initial=0))
        mine = rows[owner == self._shares.rank] - self._shares.rank * count
        place = np.arange(len(rows)) - np.searchsorted(owner, owner)
        return np.concatenate([mine, np.zeros(most - len(mine), dtype=np.int64)]), owner * most + place

    def gather_logprobs(self, mine: LogprobTensors, place: Tensor) -> LogprobTensors:
        """Each rank's logprobs; place [p]: of those that are wanted, among all."""
        words = self._shares.ranks.all_gather(_words(mine), 0)[place]
        found = LogprobTensors.make(len(place), mine.token_ids.shape[1] - 1, mine.token_ids.device)
        _place(words, found)
        return found

    def prompt_logprobs(
        self, op: Logprobs, compute: Callable[[], Tensor], chosen: Tensor, target: LogprobTensors
    ) -> None:
        """As the `logprobs` op `op`, of the logits that `compute` gives: chosen [n], target [n, ...]."""
        num_rows, count = len(chosen), self.count(len(chosen))
        logits, own = self.logits(num_rows, compute), self.own(num_rows, count)
        mine = LogprobTensors.make(count, target.token_ids.shape[1] - 1, logits.device)
        if own.stop > own.start:
            op(logits[: own.stop - own.start], chosen[own], mine.part(0, own.stop - own.start))
        _place(self.gather(_words(mine), num_rows), target)


def _words(logprobs: LogprobTensors) -> Tensor:
    """[P, 2 (1 + most) + 1] int32: ids, ranks and logprobs of each position."""
    values = logprobs.logprobs.contiguous().view(torch.int32)
    return torch.cat([logprobs.token_ids.int(), logprobs.ranks.int().unsqueeze(1), values], dim=1)


def _place(words: Tensor, target: LogprobTensors) -> None:
    width = target.token_ids.shape[1]
    target.token_ids.copy_(words[:, :width])
    target.ranks.copy_(words[:, width])
    target.logprobs.copy_(words[:, width + 1 :].contiguous().view(torch.float32))
