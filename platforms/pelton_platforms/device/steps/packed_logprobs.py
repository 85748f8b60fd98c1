"""Logprobs of a step's rows side by side, so that one copy brings them to the host: each copy holds the next step up.

A row of n tokens: their ids, n words, the rank, a word, then the logprobs, two a word.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pelton.sampling.logprobs import HostLogprobs, LogprobTensors


def rows_of_logprobs(num_rows: int, most: int, device: torch.device) -> tuple[LogprobTensors, Tensor]:
    """Return the columns and the words that they are views of, [num_rows, W] int64."""
    width = 1 + most
    words = torch.zeros(num_rows, width + 1 + (width + 1) // 2, dtype=torch.int64, device=device)
    values = words.view(torch.float32)[:, 2 * (width + 1) :][:, :width]
    return LogprobTensors(words[:, :width], values, words[:, width]), words


def on_host(words: np.ndarray) -> HostLogprobs:
    """Return what was read of `rows_of_logprobs`."""
    width = _width(words.shape[1])
    values = words.view(np.float32)[:, 2 * (width + 1) :][:, :width]
    return HostLogprobs(words[:, :width], values, words[:, width])


def _width(num_words: int) -> int:
    """Return the tokens of a row of so many words: n + 1 + ceil(n / 2)."""
    return (num_words - 1) * 2 // 3
