"""Greedy steps of several ranks: each takes the best of its share of the vocabulary, and two words of each row go round, not logits.

`LogitShares` stands before the ranks' context while a model is built, so that layers gather through it. The program of a greedy step
holds the gather back (of others it makes another exchange: `row_shares.py`), and `BestOfShares` finds the token that all logits would
have given, bit for bit: values are compared as they are, and of equal ones the lowest token id wins, within a share and over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pelton.parallel.communicator import Communicator, GroupContext
from pelton.parallel.context import ParallelContext
from pelton.sampling.error_codes import NOT_FINITE, OK
from pelton_platforms.device.steps.reference_step import advance

if TYPE_CHECKING:
    from pelton.ops.interface import Sample as SampleOp
    from pelton_platforms.device.steps.batch_state import BatchState


LEAST_BYTES = 1 << 20
"""Of a rank's logits. On two CPU ranks and 49,152 tokens 8 rows take 150 us gathered and 350 by shares, 32 rows 6,000 and 800."""


class LogitShares(ParallelContext):
    """`ranks`, but for what a model gathers: its logits, and nothing else."""

    def __init__(self, ranks: ParallelContext) -> None:
        super().__init__(ranks.rank, ranks.size, ranks.stages)
        self.ranks, self.context, self.experts = ranks, ranks.context, ranks.experts
        self._are_kept = False
        self._num_rows = 0  # of each rank, where they are swapped

    @property
    def communicator(self) -> Communicator | None:
        """The ranks' own; None: they have none."""
        return self.ranks.communicator if isinstance(self.ranks, GroupContext) else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.ranks.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if self._num_rows:
            return self._swapped(tensor, self._num_rows)
        return tensor if self._are_kept else self.ranks.all_gather(tensor, dim)

    def _swapped(self, share: Tensor, count: int) -> Tensor:
        """share [n, w]: columns of all rows -> [count, size w]: all columns of this rank's rows, zeros behind the last row."""
        assert self.communicator is not None, "rows are shared out where there is one"
        rows = share.new_zeros(self.size * count, share.shape[1]) if len(share) < self.size * count else share
        if rows is not share:
            rows[: len(share)] = share
        found = self.communicator.swap(rows.reshape(self.size, count, -1))
        return found.transpose(0, 1).reshape(count, -1)

    @contextmanager
    def rows(self, count: int) -> Iterator[None]:
        """Within it a model's logits are those of `count` rows, this rank's: rows from `rank` times `count` on."""
        self._num_rows = count
        try:
            yield
        finally:
            self._num_rows = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it a model's logits are this rank's, those of tokens from `rank` times their number on."""
        self._are_kept = True
        try:
            yield
        finally:
            self._are_kept = False


class BestOfShares:
    """The `sample` op's greedy variant, of this rank's logits."""

    def __init__(self, shares: LogitShares, state: BatchState, op: SampleOp | None = None) -> None:
        """op: the `sample` op of one rank, which has a way of its own where it has `share_keys`."""
        self._shares, self._state = shares, state
        self.op = op if hasattr(op, "share_keys") else None
        self.kept = shares.kept

    def pay(self, num_rows: int) -> bool:
        """Return whether words of so many rows are brought sooner than their logits."""
        return self.op is not None or 4 * num_rows * self._state.vocab_size >= LEAST_BYTES * self._shares.size

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        """logits [n, v], of this rank and what fills it up behind the vocabulary; slots [n] int64; result [n, 2] int32, written."""
        if self.op is not None:
            op: Any = self.op
            width = logits.shape[1]
            count = min(width, self._state.vocab_size - self._shares.rank * width)
            keys = op.share_keys(logits, slots, count)
            op.end_shares(self._shares.ranks.all_gather(keys.unsqueeze(0), 0), width, slots, result)
            return
        token_ids, codes = self._best(logits)
        advance(self._state, slots, token_ids, codes, result)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and error codes, [n] int64 each."""
        shares, (num_rows, width) = self._shares, logits.shape
        first = shares.rank * width
        count = min(width, self._state.vocab_size - first)
        mine = torch.zeros(num_rows, 2, dtype=torch.int32, device=logits.device)
        if count > 0:
            best, place = logits[:, :count].max(dim=-1)
            mine[:, 0] = best.view(torch.int32)
            mine[:, 1] = place + first
        else:
            mine[:, 0].view(torch.float32).fill_(-torch.inf)
        both = shares.ranks.all_gather(mine, dim=0).view(shares.size, num_rows, 2)
        best, rank = both[..., 0].view(torch.float32).max(dim=0)
        token_ids = both[..., 1].gather(0, rank.unsqueeze(0)).squeeze(0).long()
        return token_ids, torch.where(best.isfinite(), OK, NOT_FINITE)
