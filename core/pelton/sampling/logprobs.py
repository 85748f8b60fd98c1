"""Log-probabilities of raw logits, before temperature, masks and penalties; ranks count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pelton.messages.outputs import LogprobColumns, PackedLogprobs


@dataclass(slots=True)
class LogprobTensors:
    """P positions, each the chosen token first, then the `most` likeliest."""

    token_ids: Tensor  # [P, 1 + most] int64
    logprobs: Tensor  # [P, 1 + most] float32
    ranks: Tensor  # [P] int64

    @staticmethod
    def make(num_positions: int, most: int, device: torch.device) -> LogprobTensors:
        return LogprobTensors(
            torch.zeros(num_positions, 1 + most, dtype=torch.int64, device=device),
            torch.zeros(num_positions, 1 + most, device=device),
            torch.zeros(num_positions, dtype=torch.int64, device=device),
        )

    def part(self, start: int, stop: int) -> LogprobTensors:
        """Views of some positions."""
        return LogprobTensors(self.token_ids[start:stop], self.logprobs[start:stop], self.ranks[start:stop])

    def tensors(self) -> list[Tensor]:
        return [self.token_ids, self.logprobs, self.ranks]

    def to_host(self) -> HostLogprobs:
        return HostLogprobs(self.token_ids.cpu().numpy(), self.logprobs.cpu().numpy(), self.ranks.cpu().numpy())


@dataclass(slots=True)
class HostLogprobs:
    """`LogprobTensors` on the host."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def columns(self, positions: slice | Sequence[int], num_logprobs: int) -> LogprobColumns:
        """`packed` as lists."""
        return self.packed(positions, num_logprobs).columns()

    def packed(self, positions: slice | Sequence[int] | np.ndarray, num_logprobs: int) -> PackedLogprobs:
        """Some positions, as one request asked for them: `num_logprobs` alternatives, -1 for all there are."""
        stop = None if num_logprobs < 0 else 1 + num_logprobs
        ids = self.token_ids[positions, :stop]
        return PackedLogprobs(
            ids.shape[1],
            ids.astype(np.int32).tobytes(),
            self.logprobs[positions, :stop].astype(np.float32, copy=False).tobytes(),
            self.ranks[positions].astype(np.int32).tobytes(),
        )

    def by_position(self, positions: np.ndarray, num_logprobs: np.ndarray) -> list[PackedLogprobs]:
        """Compute for each of these positions its own number of alternatives; 0 or more."""
        found: list[PackedLogprobs | None] = [None] * len(positions)
        for wanted in np.unique(num_logprobs).tolist():
            places = np.flatnonzero(num_logprobs == wanted)
            together = self.packed(positions[places], wanted)
            width, ids, values, ranks = together.width, together.token_ids, together.logprobs, together.ranks
            size = 4 * width
            for index, place in enumerate(places.tolist()):
                start, end = index * size, (index + 1) * size
                rank = ranks[4 * index : 4 * index + 4]
                found[place] = PackedLogprobs(width, ids[start:end], values[start:end], rank)
        return [part for part in found if part is not None]

    @staticmethod
    def join(parts: Sequence[HostLogprobs]) -> HostLogprobs:
        return HostLogprobs(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


def gather_logprobs(logits: Tensor, chosen: Tensor, most: int) -> LogprobTensors:
    """logits [P, V] float32 raw, chosen [P] int64; most: alternatives wanted, -1 for the whole vocabulary."""
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, chosen.unsqueeze(-1))
    ranks = (logits > own).sum(dim=-1) + 1
    ids, logprobs = chosen.unsqueeze(-1), own - normalizer
    if most:
        count = logits.shape[-1] if most < 0 else min(most, logits.shape[-1])
        best, best_ids = logits.topk(count, dim=-1)
        ids = torch.cat([ids, best_ids], dim=1)
        logprobs = torch.cat([logprobs, best - normalizer], dim=1)
    return LogprobTensors(ids, logprobs, ranks)
