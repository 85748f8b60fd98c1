"""The vocabulary's two ends: token embedding and logits, each rank with its rows, tied or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pelton.layers.norm import RMSNorm
from pelton.ops.interface import (
    AddNormLogits,
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    Embed,
    EmbedNeeds,
    EmbedTensors,
    LinearSpec,
    LinearWeights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.model.build import BuildConfig


class _VocabMatrix(nn.Module):
    """This rank's rows [first_row, first_row + num_rows) of a [vocab_size, H] matrix; zeros beyond the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // config.parallel.size)
        self.first_row = min(config.parallel.rank * self.num_rows, vocab_size)
        stop = min(self.first_row + self.num_rows, vocab_size)
        self.weight = nn.Parameter(
            torch.zeros(self.num_rows, hidden_size, dtype=config.dtype, device=config.device), requires_grad=False
        )
        config.weights.expect(
            f"{prefix}.weight", (vocab_size, hidden_size), self.weight[: stop - self.first_row],
            dim=0, start=self.first_row, stop=stop,
        )  # fmt: skip


class VocabEmbedding(_VocabMatrix):
    """Token ids to the first sub-layer output, partial over ranks (`embed`)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, config: BuildConfig, prefix: str, scale: float | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, config=config, prefix=prefix)
        needs = EmbedNeeds(
            dtype=config.dtype_name, num_rows=self.num_rows, hidden_size=hidden_size, scale=scale,
            tp_size=config.parallel.size,
        )  # fmt: skip
        self.embed: Embed = config.ops.bind("embed", needs, EmbedTensors(self.weight, self.first_row))

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        return self.embed(input_ids)


class LMHead(nn.Module):
    """The final add and norm, and logits of the rows that sample (`add_norm_logits`)."""

    def __init__(
        self,
        *,
        norm: RMSNorm,
        embedding: VocabEmbedding,
        config: BuildConfig,
        prefix: str = "lm_head",
        tied: bool = False,
        post_norm: RMSNorm | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """tied: the embedding's matrix is used, and a copy of it in the checkpoint is not read."""
        super().__init__()
        vocab_size, hidden_size = embedding.vocab_size, norm.spec.size
        if tied:
            config.weights.ignore(rf"{prefix}\.weight")
            matrix: _VocabMatrix = embedding
        else:
            self.matrix = matrix = _VocabMatrix(vocab_size, hidden_size, config=config, prefix=prefix)
        parallel = config.parallel
        spec = LinearSpec(in_features=hidden_size, out_features=matrix.num_rows)
        needs = AddNormLogitsNeeds(
            dtype=config.dtype_name, norm=norm.spec, linear=spec, vocab_size=vocab_size, soft_cap=soft_cap,
            post_norm=post_norm.spec if post_norm else None, tp_size=parallel.size,
        )  # fmt: skip
        tensors = AddNormLogitsTensors(
            norm.weight, LinearWeights(spec, {"weight": matrix.weight}, is_shared=tied),
            post_norm.weight if post_norm else None,
            config.all_reduce(hidden_size), parallel.all_gather if parallel.size > 1 else None,
        )  # fmt: skip
        self.add_norm_logits: AddNormLogits = config.ops.bind("add_norm_logits", needs, tensors)

    def forward(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """rows [n] int64 -> [n, vocab_size] float32"""
        return self.add_norm_logits(hidden, residual, rows)
