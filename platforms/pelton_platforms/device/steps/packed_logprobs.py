"""A step's tokens and logprobs side by side, so that one copy brings them to the host: each copy holds the next step up.

First the tokens and codes of all rows, a word each, then the rows of logprobs. Such a row of n tokens: their ids, n words, the
rank, a word, then the logprobs, two a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pelton.sampling.logprobs import HostLogprobs, LogprobTensors


class PackedResults:
    """Memory for the results of at most `num_rows` rows, with `most` alternatives each."""

    def __init__(self, num_rows: int, most: int, device: torch.device) -> None:
        self._num_rows, self._width = num_rows, 1 + most
        self._words = torch.zeros(num_rows * (1 + self._row_words), dtype=torch.int64, device=device)
        rows = self._words[num_rows:].view(num_rows, self._row_words)
        ids, ranks = rows[:, : self._width], rows[:, self._width]
        self.result = self._words[:num_rows].view(torch.int32).view(num_rows, 2)  # (token, code)
        self.logprobs = LogprobTensors(ids, self._values(rows.view(torch.float32)), ranks)

    @property
    def _row_words(self) -> int:
        return self._width + 1 + (self._width + 1) // 2

    def _values(self, halves: Any) -> Any:
        """Return the logprobs among a row's half words."""
        return halves[:, 2 * (self._width + 1) :][:, : self._width]

    def words(self, num_rows: int) -> Tensor:
        """Return the part that has the first rows, to be copied."""
        return self._words[: self._num_rows + num_rows * self._row_words]

    def on_host(self, words: np.ndarray, num_rows: int) -> tuple[np.ndarray, HostLogprobs]:
        """Return result and logprobs of a copy of `words(num_rows)`."""
        rows = words[self._num_rows :].reshape(num_rows, self._row_words)
        logprobs = HostLogprobs(rows[:, : self._width], self._values(rows.view(np.float32)), rows[:, self._width])
        return words[:num_rows].view(np.int32).reshape(num_rows, 2), logprobs
