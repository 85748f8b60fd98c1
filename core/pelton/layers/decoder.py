"""The decoder that runs a model's parts. A model file says which parts it has."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.pooling_decoder import PoolingDecoder
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight


class Decoder(nn.Module):
    """The `pelton.model.interface.CausalLM` that most models are: a subclass makes the parts named here."""

    embed_tokens: VocabEmbedding
    layers: nn.ModuleList
    """Each is called as `layer(hidden, residual, batch)`, both [T, H] (the first layer's residual is None), and returns
    the same: its last sub-layer's bare output, and the residual to add it to."""
    lm_head: LMHead

    def __init__(self, *, config: BuildConfig) -> None:
        super().__init__()
        self.weights = config.weights

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        hidden, residual = self.embed_tokens(batch.input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        return hidden, residual

    def compute_logits(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(*hidden, rows)
        return logits

    def hidden_states(self, hidden: tuple[Tensor, Tensor | None], rows: Tensor | None) -> Tensor:
        """Return, for a model that pools, final hidden states of the tokens `rows` [n], or of all."""
        states: Tensor = self.lm_head.hidden_states(*hidden, rows)
        return states

    def as_pooling(self, *, config: BuildConfig) -> PoolingDecoder:
        """The `PoolingModel` that this model is without its output head; `config` is the one that it was made with."""
        return PoolingDecoder(self, config=config)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.weights.load(weights)
