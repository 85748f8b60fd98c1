"""A decoder whose layers may be spread over stages: pipeline parallelism. Huang et al., GPipe (arXiv:1811.06965), section 2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pelton.errors import ConfigError
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.norm import RMSNorm
    from pelton.model.build import BuildConfig


class StagedDecoder(Decoder):
    """A stage gives the next one hidden states and residual, each [T, H] in the model's dtype (over ranks of tensor parallelism as partial
    as they are). The last one has the head: it samples, and tells the others (the worker does that). Where a layer's
    output has a norm that the next layer applies, the next stage has that norm's weight too. A subclass makes its parts by the methods
    below: only those of this stage are there.
    """

    carries_residual: ClassVar[bool] = True
    """Its layers return a residual, or some of them do; where they add it up themselves, it is None."""

    def __init__(self, *, config: BuildConfig) -> None:
        super().__init__(config=config)
        config.runs_in_stages = True
        stages = config.parallel.stages
        self._stages = stages
        self._stage, self._last = (0, 0) if stages is None else (stages.rank, stages.size - 1)
        self._made_of = config.dtype, config.hf.hidden_size, config.hf.vocab_size
        if self._stage < self._last:  # of the object: in one stage a step has to see that logits are those of the head
            self.compute_logits = self._no_logits  # type: ignore[method-assign]

    def own_layers(self, config: BuildConfig, prefix: str, *, num_joined: int = 1, total: int | None = None) -> range:
        """Return the layers of this stage, of those called `{prefix}.0` and on; the others' tensors stay in the checkpoint. num_joined:
        the last layers that have to be in one stage. total: how many there are; config.json's num_hidden_layers when None."""
        total = config.hf.num_hidden_layers if total is None else total
        for more in range(
            config.hf.get("num_nextn_predict_layers", 0)
        ):  # they predict further tokens, and nobody reads them
            config.weights.ignore(rf"{re.escape(prefix)}\.{total + more}\..*")
        counts = _counts(config, total, self._last + 1, num_joined)
        if self._stages is None:
            return range(total)
        first = sum(counts[: self._stage])
        own = range(first, first + counts[self._stage])
        elsewhere = "|".join(str(index) for index in range(total) if index not in own)
        config.weights.ignore(rf"{re.escape(prefix)}\.({elsewhere})\..*")
        return own

    def make_embedding(self, config: BuildConfig, prefix: str, *, is_tied: bool, scale: float | None = None) -> Any:
        """Make it in the first stage, and in the last one where the head has the same matrix: a `VocabEmbedding`, else None."""
        if self._stage == 0 or (is_tied and self._stage == self._last):
            return VocabEmbedding(
                config.hf.vocab_size, config.hf.hidden_size, scale=scale, config=config, prefix=prefix
            )
        config.weights.ignore(rf"{re.escape(prefix)}\..*")
        return None

    def make_head(
        self,
        config: BuildConfig,
        prefix: str,
        *,
        norm: RMSNorm,
        is_tied: bool,
        post_norm: RMSNorm | None = None,
        soft_cap: float | None = None,
    ) -> Any:
        """Make it, an `LMHead`, in the last stage; None elsewhere. post_norm, soft_cap: as in `LMHead`."""
        if self._stage == self._last:
            embedding = self.embed_tokens
            return LMHead(
                norm=norm,
                post_norm=post_norm,
                embedding=embedding,
                tied=is_tied,
                soft_cap=soft_cap,
                config=config,
                prefix=prefix,
            )
        config.weights.ignore(rf"{re.escape(prefix)}\..*")
        return None

    @property
    def can_forward_tokens(self) -> bool:
        """Return whether the last layer has `forward_tokens`, and computes there what its `forward` does."""
        return False

    def forward_tokens(self, batch: ForwardBatch, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """`forward`, of whose result only these tokens are wanted: [n] int64, in the order of the result's n rows. What the last layer
        does behind its attention for others is left out, of long prompts nearly all of it."""
        return self._forward(batch, tokens)

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return super().forward(batch) if self._stages is None else self._forward(batch, None)

    def _forward(self, batch: ForwardBatch, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        residual: Any = None
        if self._stage == 0:
            hidden = self.embed_tokens(batch.input_ids)
        else:
            shape = len(batch.input_ids), self._made_of[1]
            hidden = self._received(batch, *shape)
            residual = self._received(batch, *shape) if self.carries_residual else None
        layers: list[Any] = list(self.layers)
        cut = layers.pop() if tokens is not None and self._stage == self._last else None
        for layer in layers:
            hidden, residual = layer(hidden, residual, batch)
        if cut is not None:
            hidden, residual = cut.forward_tokens(hidden, residual, batch, tokens)
        if self._stages is not None and self._stage < self._last:
            if self.carries_residual and residual is None:
                residual = torch.zeros_like(hidden)
            for tensor in (hidden, residual) if self.carries_residual else (hidden,):
                self._stages.send(tensor.contiguous(), self._stage + 1)
        return hidden, residual

    def _no_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        """Zeros: before the last stage warm-ups alone ask."""
        return torch.zeros(len(rows), self._made_of[2], device=rows.device)

    def _received(self, batch: ForwardBatch, *shape: int) -> Tensor:
        assert self._stages is not None
        made = torch.empty(shape, dtype=self._made_of[0], device=batch.input_ids.device)
        return self._stages.recv(made, self._stage - 1)


def _counts(config: BuildConfig, total: int, num_stages: int, num_joined: int) -> Sequence[int]:
    """Layers of each stage: as the setting says; else as equal as can be, stages in front of the last, which has the head too, with
    one more. The last one has at least `num_joined`."""
    given = None if config.engine_config is None else config.engine_config.parallel.pipeline_layer_partition
    if given is None:
        each, more = divmod(total, num_stages)
        given = [each + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages)]
        if given[-1] < num_joined and num_stages > 1:
            each, more = divmod(total - num_joined, num_stages - 1)
            given = [*(each + (stage < more) for stage in range(num_stages - 1)), num_joined]
        if min(given) < 1 and num_stages > 1:
            joined = f", of which the last {num_joined} share a cache and stay together" if num_joined > 1 else ""
            raise ConfigError(
                f"pipeline_parallel_size is {num_stages}, and the model has {total} layers{joined}. Use at most {total - num_joined + 1}."
            )
    elif len(given) != num_stages or sum(given) != total or min(given) < 1:
        raise ConfigError(
            f"pipeline_layer_partition is {', '.join(map(str, given))}; give {num_stages} numbers of 1 or more "
            f"(pipeline_parallel_size) that add up to the model's {total} layers."
        )
    elif given[-1] < num_joined and num_stages > 1:
        raise ConfigError(
            f"pipeline_layer_partition is {', '.join(map(str, given))}, and the model's last {num_joined} layers, of which some read the "
            f"keys and values of others, have to be in one stage. Give the last stage {num_joined} or more."
        )
    return given
