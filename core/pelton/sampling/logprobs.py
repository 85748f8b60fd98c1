"""Log-probabilities of raw logits, before temperature, masks and penalties; ranks count from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pelton.engine.messages import LogprobColumns


@dataclass(slots=True)
class LogprobTensors:
    """P positions, each the chosen token first, then the `most` likeliest."""

    token_ids: Tensor  # [P, 1 + most] int64
    logprobs: Tensor  # [P, 1 + most] float32
    ranks: Tensor  # [P] int64

    def to_host(self) -> HostLogprobs:
        return HostLogprobs(self.token_ids.cpu().numpy(), self.logprobs.cpu().numpy(), self.ranks.cpu().numpy())


@dataclass(slots=True)
class HostLogprobs:
    """`LogprobTensors` on the host."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def columns(self, positions: slice | Sequence[int], num_logprobs: int) -> LogprobColumns:
        """Some positions, as one request asked for them: `num_logprobs` alternatives, -1 for all there are."""
        stop = None if num_logprobs < 0 else 1 + num_logprobs
        return LogprobColumns(
            self.token_ids[positions, :stop].tolist(),
            self.logprobs[positions, :stop].tolist(),
            self.ranks[positions].tolist(),
        )

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
