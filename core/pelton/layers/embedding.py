"""The vocabulary's two ends: token embedding and logits, each rank with its rows, tied or not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from pelton.layers.linear import LinearModule
from pelton.layers.norm import RMSNorm
from pelton.ops.interface import (
    AddNorm,
    AddNormLogits,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    AddNormNeeds,
    AddNormTensors,
    Embed,
    EmbedNeeds,
    EmbedTensors,
)
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig


class VocabMatrix(LinearModule):
    """This rank's rows [first_row, first_row + num_rows) of a [vocab_size, H] matrix; zeros beyond the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, config: BuildConfig, prefix: str) -> None:
        num_rows = -(-vocab_size // config.parallel.size)
        first_row = min(config.parallel.rank * num_rows, vocab_size)
        rows = (first_row, min(first_row + num_rows, vocab_size))
        shard = LinearShard(
            prefix, vocab_size, hidden_size, rows, (0, hidden_size), padding=num_rows - (rows[1] - rows[0])
        )
        weights = config.create_weights([shard], is_vocabulary=True)
        if config.adapters is not None:
            config.adapters.refuse(prefix, "embeddings and output heads take none")
        super().__init__(weights)
        self.linear_weights = weights
        self.vocab_size, self.num_rows, self.first_row = vocab_size, num_rows, first_row


class VocabEmbedding(VocabMatrix):
    """Token ids to the first sub-layer output, partial over ranks (`embed`)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, config: BuildConfig, prefix: str, scale: float | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, config=config, prefix=prefix)
        needs = EmbedNeeds(
            dtype=config.dtype_name, num_rows=self.num_rows, hidden_size=hidden_size, scale=scale,
            tp_size=config.parallel.size, weight_format=self.linear_weights.spec.weight_format,
        )  # fmt: skip
        matrix = next(iter(self.linear_weights.tensors.values()))
        self.embed: Embed = config.ops.bind("embed", needs, EmbedTensors(matrix, self.first_row, self.linear_weights))

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        return self.embed(input_ids)


class LMHead(nn.Module):
    """The final add and norm, and logits of the rows that sample (`add_norm_logits`)."""

    def __init__(
        self,
        *,
        norm: RMSNorm,
        embedding: VocabEmbedding | None,
        config: BuildConfig,
        prefix: str = "lm_head",
        tied: bool = False,
        post_norm: RMSNorm | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """tied: the embedding's matrix is used, not a copy of it in the checkpoint. embedding: None where another stage has it."""
        super().__init__()
        vocab_size, hidden_size = config.hf.vocab_size if embedding is None else embedding.vocab_size, norm.spec.size
        self._bind_norm = partial(_bind_norm, norm, post_norm, config)
        self.has_post_norm = post_norm is not None  # then layers' outputs are not what is added to the residual
        if config.pooling is not None:
            config.weights.ignore(rf"{prefix}\.weight")
            self.keep_norm()
            return
        if tied:
            config.weights.ignore(rf"{prefix}\.weight")
            if config.adapters is not None:
                config.adapters.refuse(prefix, "embeddings and output heads take none")
            assert embedding is not None
            matrix: VocabMatrix = embedding
        else:
            self.matrix = matrix = VocabMatrix(vocab_size, hidden_size, config=config, prefix=prefix)
        parallel = config.parallel
        self.linear_weights = weights = matrix.linear_weights
        needs = AddNormLogitsNeeds(
            dtype=config.dtype_name, norm=norm.spec, linear=weights.spec, vocab_size=vocab_size, soft_cap=soft_cap,
            post_norm=post_norm.spec if post_norm else None, tp_size=parallel.size,
        )  # fmt: skip
        tensors = AddNormLogitsTensors(
            norm.weight,
            weights,
            post_norm.weight if post_norm else None,
            config.all_reduce(hidden_size),
            parallel.all_gather if parallel.size > 1 else None,
        )
        self.add_norm_logits: AddNormLogits = config.ops.bind("add_norm_logits", needs, tensors)

    def forward(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """rows [n] int64 -> [n, vocab_size] float32"""
        return self.add_norm_logits(hidden, residual, rows)

    def keep_norm(self) -> None:
        """Let a model that generates be asked for hidden states too. Before weights are loaded."""
        self.add_norm = self._bind_norm()

    def hidden_states(self, hidden: Tensor, residual: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return hidden states in place of logits, of a model that pools or whose norm is kept: rows [n] int64, or all -> [n, H]."""
        if rows is not None:
            hidden, residual = hidden[rows], None if residual is None else residual[rows]
        else:  # `add_norm` may overwrite them
            hidden, residual = hidden.clone(), None if residual is None else residual.clone()
        return self.add_norm(hidden, residual)[0]


def _bind_norm(norm: RMSNorm, post_norm: RMSNorm | None, config: BuildConfig) -> AddNorm:
    needs = AddNormNeeds(
        dtype=config.dtype_name,
        norm=norm.spec,
        post_norm=post_norm.spec if post_norm else None,
        tp_size=config.parallel.size,
    )
    post_weight = post_norm.weight if post_norm else None
    tensors = AddNormTensors(norm.weight, post_weight, config.all_reduce(norm.spec.size))
    bound: AddNorm = config.ops.bind("add_norm", needs, tensors)
    return bound
