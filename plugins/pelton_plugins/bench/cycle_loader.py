"""Random weights of a model that goes on in a known way, for `--load-format cycle`: what speculation gains and costs can be measured.

The embedding outweighs what the layers add to it, and row n of the LM head is the embedding of the token before n. So a token
below a quarter of the vocabulary is followed by the next of its eight, round and round; any other by the next one, which a text
does not come back to. The layers compute what they compute with any weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pelton.model.dummy_loader import DummyLoader, RandomWeight
from torch import Tensor

from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight

ROUND = 8
"""Tokens of a round."""
_SCALE = 1000.0  # of the embedding: it is most of every hidden state, whatever 64 sub-layers add


def num_round_tokens(vocab_size: int) -> int:
    """Tokens below it go round."""
    return vocab_size // 4 // ROUND * ROUND


def following(token_id: int, vocab_size: int) -> int:
    """The token that comes after."""
    first = num_round_tokens(vocab_size)
    if token_id < first:
        return token_id - token_id % ROUND + (token_id + 1) % ROUND
    return token_id + 1 if token_id + 1 < vocab_size else first


class _VocabRows(RandomWeight):
    """Both matrices are drawn from the embedding's name."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, is_head: bool) -> None:
        super().__init__(name, shape, dtype, seed)
        self._is_head = is_head

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        whole = self._arranged(super().read().clone())
        return whole if dim is None else whole.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        whole = torch.empty(self.shape, dtype=target.dtype, device=target.device)
        if not super().fill(whole):
            return False
        whole = self._arranged(whole)
        part = whole if dim is None else whole.narrow(dim, start, (whole.shape[dim] if stop is None else stop) - start)
        target.copy_(part)
        return True

    def _arranged(self, rows: Tensor) -> Tensor:
        if not self._is_head:
            return rows.mul_(_SCALE)
        order = [0] * len(rows)
        for token_id in range(len(rows)):
            order[following(token_id, len(rows))] = token_id
        return rows[torch.tensor(order, device=rows.device)]


class CycleLoader(DummyLoader):
    """For models whose LM head is a matrix of its own."""

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        names = {
            part: [name for name in self._expected if name.endswith(part)]
            for part in ("embed_tokens.weight", "lm_head.weight")
        }
        if any(len(found) != 1 for found in names.values()):
            raise ConfigError(
                "load_format cycle needs a model with one embedding and one LM head that is not tied to it."
            )
        (embedding,), (head,) = names.values()
        for name, weight in super().weights():
            if name in (embedding, head):
                yield name, _VocabRows(embedding, weight.shape, self._dtype, self._seed, is_head=name == head)
            else:
                yield name, weight
