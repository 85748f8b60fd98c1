"""A causal model that pools: its own layers and final norm, without its output head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from pelton.layers.encoder import WholeLinear
from pelton.layers.pooler import Pooler
from pelton.model.loading import LazyWeight

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig
    from pelton.model.interface import PooledRows

_INNER = "model."
"""Before the names of a causal model's weights; embedding models are often saved without it."""


class PoolingDecoder(nn.Module):
    """A `pelton.model.interface.PoolingModel` around a model with `hidden_states`."""

    def __init__(self, model: Any, *, config: BuildConfig) -> None:
        super().__init__()
        assert config.pooling is not None
        self.model = model
        self.weights = config.weights
        self.score: WholeLinear | None = None
        if config.pooling.labels:
            self.score = WholeLinear(
                config.hf.hidden_size, {"score": config.pooling.num_labels}, config=config, bias=False
            )
        self.pooler = Pooler(config=config)

    @property
    def layers(self) -> nn.ModuleList:
        """Layers of the model: warm-up steps go through few of them."""
        layers: nn.ModuleList = self.model.layers
        return layers

    @layers.setter
    def layers(self, layers: nn.ModuleList) -> None:
        self.model.layers = layers

    def forward(self, batch: ForwardBatch) -> Any:
        return self.model.forward(batch)

    def pool(self, hidden: Any, rows: PooledRows) -> list[Tensor | None]:
        found: list[Tensor | None] = self.pooler(self, hidden, rows)
        return found

    def hidden_states(self, hidden: Any, rows: Tensor | None) -> Tensor:
        states: Tensor = self.model.hidden_states(hidden, rows)
        return states

    def classify(self, vectors: Tensor) -> Tensor:
        assert self.score is not None
        logits: Tensor = self.score(vectors)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.model.load_weights(self._renamed(weights))  # type: ignore[no-any-return]

    def _renamed(self, weights: Iterable[tuple[str, LazyWeight]]) -> Iterator[tuple[str, LazyWeight]]:
        expected, ignores = self.weights.expected(), self.weights.ignores
        for name, weight in weights:
            inner = _INNER + name
            is_known = name in expected or not (inner in expected or ignores(inner))
            yield (name if is_known else inner), weight
