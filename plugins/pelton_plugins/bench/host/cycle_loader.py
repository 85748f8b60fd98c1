"""Random weights of a model that goes on in a known way, for `--load-format cycle`: what speculation gains and costs can be measured.

The embedding outweighs what the layers add to it, and row n of the LM head is the embedding of the token before n. So a token
below a quarter of the vocabulary is followed by the next of its eight, round and round; any other by the next one, which a text
does not come back to. The layers compute what they compute with any weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton.plugins import load_plugins

ROUND = 8
"""Tokens of a round."""
_SCALE = 1000.0  # of the embedding: it is most of every hidden state, whatever 64 sub-layers add
_VOCAB_MATRICES = ("embed_tokens.weight", "lm_head.weight")


def num_round_tokens(vocab_size: int) -> int:
    """Tokens below it go round."""
    return vocab_size // 4 // ROUND * ROUND


def following(token_id: int, vocab_size: int) -> int:
    """The token that comes after."""
    first = num_round_tokens(vocab_size)
    if token_id < first:
        return token_id - token_id % ROUND + (token_id + 1) % ROUND
    return token_id + 1 if token_id + 1 < vocab_size else first


class _VocabRows(LazyWeight):
    """The embedding, or the LM head that goes with it."""

    def __init__(self, embedding: LazyWeight, *, is_head: bool) -> None:
        self.shape = embedding.shape
        self._embedding, self._is_head = embedding, is_head

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        return self._part(self._arranged(self._embedding.read().clone()), dim, start, stop)

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        whole = torch.empty(self.shape, dtype=target.dtype, device=target.device)
        if not self._embedding.fill(whole):
            return False
        target.copy_(self._part(self._arranged(whole), dim, start, stop))
        return True

    def _part(self, whole: Tensor, dim: int | None, start: int, stop: int | None) -> Tensor:
        return whole if dim is None else whole.narrow(dim, start, (self.shape[dim] if stop is None else stop) - start)

    def _arranged(self, rows: Tensor) -> Tensor:
        if not self._is_head:
            return rows.mul_(_SCALE)
        order = [0] * len(rows)
        for token_id in range(len(rows)):
            order[following(token_id, len(rows))] = token_id
        return rows[torch.tensor(order, device=rows.device)]


class CycleLoader(WeightLoader):
    """For models whose LM head is a matrix of its own. All other weights are those of load_format dummy."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        entry = load_plugins(only=[]).find("pelton_model_loaders", "dummy", setting="load_format")
        self._random: WeightLoader = entry.resolve()(config, model)

    def expect(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        for part in _VOCAB_MATRICES:
            if sum(name.endswith(part) for name in expected) != 1:
                raise ConfigError(
                    "load_format cycle needs a model with one embedding and one LM head that is not tied to it."
                )
        self._random.expect(expected)

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        found = dict(self._random.weights())
        embedding, head = (next(name for name in found if name.endswith(part)) for part in _VOCAB_MATRICES)
        found[head] = _VocabRows(found[embedding], is_head=True)
        found[embedding] = _VocabRows(found[embedding], is_head=False)
        yield from found.items()

    @property
    def total_bytes(self) -> int:
        return self._random.total_bytes
