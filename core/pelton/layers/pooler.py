"""From hidden states to what a request that pools asked for: vectors, probabilities, or a row for each token.

Works on a step's rows at once, without waiting for the device. A prompt that is computed in several steps leaves here, by slot,
what the next of its steps adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from pelton.layers.encoder import WholeLinear
from pelton.messages.request import EMBED_TASKS, TOKEN_TASKS
from pelton.model.pooling import DenseSpec, PoolingSpec

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.messages.request import PoolingParams
    from pelton.model.build import BuildConfig
    from pelton.model.interface import PooledRows

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(dim=-1),
}


class Pooled(Protocol):
    """Interface of a model that pools. H = hidden size, n = tokens."""

    def hidden_states(self, hidden: Any, rows: Tensor | None) -> Tensor:
        """Final hidden states, normed where the model norms them: of the tokens `rows` [n] int64, or of all. -> [n, H]"""
        ...


@runtime_checkable
class Classifier(Protocol):
    """Interface of a model with a head besides."""

    def classify(self, vectors: Tensor) -> Tensor:
        """[n, H] -> logits [n, num_labels]"""
        ...


class Dense(nn.Module):
    """A linear layer of a sentence-transformers folder, with its activation."""

    def __init__(self, spec: DenseSpec, *, config: BuildConfig) -> None:
        super().__init__()
        self.linear = WholeLinear(
            spec.in_features, {f"{spec.path}.linear": spec.out_features}, config=config, bias=spec.has_bias
        )
        self.activation, self.dtype = ACTIVATIONS[spec.activation], config.dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x.to(self.dtype)).float())


class Pooler(nn.Module):
    """One model's."""

    def __init__(self, *, config: BuildConfig) -> None:
        super().__init__()
        assert config.pooling is not None
        self.spec: PoolingSpec = config.pooling
        self.dtype = config.dtype
        body_only = config if config.adapters is None else replace(config, adapters=None)  # Dense is not a part of it
        self.dense = nn.ModuleList(Dense(spec, config=body_only) for spec in self.spec.dense)
        self._adapters = None if config.adapters is None else config.adapters.rows
        self._row_slots: Sequence[Tensor] | None = None  # of the step's rows: where their adapters lie
        self._held: dict[int, Tensor] = {}  # by slot: of prompts whose first tokens were in earlier steps

    def forward(self, model: Pooled, hidden: Any, rows: PooledRows) -> list[Tensor | None]:
        """A tensor for each of `rows`, float32; None for one whose prompt goes on."""
        if self._adapters is not None:
            self._adapters.is_used = rows.has_adapters
            self._row_slots = self._adapters.token_slots[rows.last_tokens].unbind() if rows.has_adapters else None
        results: list[Tensor | None] = [None] * len(rows.params)
        is_token = [params.task in TOKEN_TASKS for params in rows.params]
        by_vector = [row for row, wants_tokens in enumerate(is_token) if not wants_tokens]
        if by_vector:
            vectors = self._vectors(model, hidden, rows, by_vector)
            for group in _alike(rows.params, [row for row in by_vector if row in vectors]):
                made = self._finish(model, torch.stack([vectors[row] for row in group]), rows.params[group[0]], group)
                for row, result in zip(group, made.unbind(), strict=True):
                    results[row] = result
        for row in (row for row, wants_tokens in enumerate(is_token) if wants_tokens):
            results[row] = self._tokens(model, hidden, rows, row)
        return results

    # One vector a prompt.

    def _vectors(self, model: Pooled, hidden: Any, rows: PooledRows, wanted: Sequence[int]) -> dict[int, Tensor]:
        """Return vectors by row, for rows whose prompt ends in this step."""
        if self.spec.pooling_type == "last":
            last = model.hidden_states(hidden, rows.last_tokens).float().unbind()
            return {row: last[row] for row in wanted if rows.is_last[row]}
        parts_of = self._sums if self.spec.pooling_type == "mean" else self._firsts
        parts = parts_of(model, hidden, rows)
        found: dict[int, Tensor] = {}
        for row in wanted:
            slot, part = int(rows.slots[row]), parts[row]
            num_before = int(rows.num_before[row])
            if num_before:
                before = self._held.pop(slot)
                part = before + part if self.spec.pooling_type == "mean" else before
            if not rows.is_last[row]:
                self._held[slot] = part
            elif self.spec.pooling_type == "mean":
                found[row] = part / (num_before + int(rows.counts[row]))
            else:
                found[row] = part
        return found

    def _firsts(self, model: Pooled, hidden: Any, rows: PooledRows) -> Sequence[Tensor]:
        starts = rows.query_start_loc[: len(rows.params)].long()
        return model.hidden_states(hidden, starts).float().unbind()

    def _sums(self, model: Pooled, hidden: Any, rows: PooledRows) -> Sequence[Tensor]:
        """Sums over each row's tokens of this step."""
        num_rows, num_tokens = len(rows.params), int(rows.starts[-1] + rows.counts[-1])
        states = model.hidden_states(hidden, None)[:num_tokens].float()
        index = torch.arange(num_tokens, device=states.device)
        ends = rows.query_start_loc[: num_rows + 1].long()
        return F.embedding_bag(index, states, ends, mode="sum", include_last_offset=True).unbind()

    # One row a token.

    def _tokens(self, model: Pooled, hidden: Any, rows: PooledRows, row: int) -> Tensor | None:
        start, slot = int(rows.starts[row]), int(rows.slots[row])
        index = torch.arange(start, start + int(rows.counts[row]), device=rows.last_tokens.device)
        part = model.hidden_states(hidden, index).float()
        if rows.num_before[row]:
            part = torch.cat((self._held.pop(slot), part))
        if not rows.is_last[row]:
            self._held[slot] = part
            return None
        return self._finish(model, part, rows.params[row], [row] * len(part))

    # From pooled hidden states to the answer.

    def _finish(self, model: Pooled, vectors: Tensor, params: PoolingParams, rows: Sequence[int]) -> Tensor:
        """[n, H] float32, of these rows of the step -> [n, D] float32"""
        spec = self.spec
        if params.task in EMBED_TASKS:
            for dense in self.dense:
                vectors = dense(vectors)
            if params.dimensions is not None:
                vectors = vectors[:, : params.dimensions]
            is_normal = spec.normalize if params.use_activation is None else params.use_activation
            return F.normalize(vectors, dim=-1) if is_normal else vectors
        assert isinstance(model, Classifier), "tasks of a head are offered where there is one"
        if self._adapters is not None and self._row_slots is not None:
            self._adapters.place(torch.stack([self._row_slots[row] for row in rows]))
        logits = model.classify(vectors.to(self.dtype)).float()
        is_active = params.task != "reward" if params.use_activation is None else params.use_activation
        return ACTIVATIONS[spec.activation](logits) if is_active else logits


def _alike(params: Sequence[PoolingParams], rows: Sequence[int]) -> list[list[int]]:
    """Rows of `rows` that ask for the same, together."""
    groups: dict[object, list[int]] = {}
    for row in rows:
        groups.setdefault(params[row].asked(), []).append(row)
    return list(groups.values())
