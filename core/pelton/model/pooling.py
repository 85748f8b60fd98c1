"""`PoolingSpec`: how a model's hidden states become vectors or scores. Plain data, part of `ResolvedModel`; no torch."""

from __future__ import annotations

import msgspec

ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "softmax")


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer behind the pooling, a module of a sentence-transformers folder."""

    path: str
    """Folder below the model's; its weights are named `<path>.linear.weight` and `<path>.linear.bias`."""
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: str = "tanh"


class PoolingFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling as the files beside config.json describe it; None where they say nothing."""

    pooling_type: str | None = None
    normalize: bool | None = None
    dense: list[DenseSpec] = []
    max_seq_length: int | None = None
    is_embedding: bool = False
    """The folder was saved to embed, whatever its architecture can do besides."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were found for one model."""

    tasks: list[str]
    """Tasks that requests may name, the one of `LLM.encode` first."""
    pooling_type: str
    """last, mean or cls: which hidden states a vector is made of."""
    attends_both_ways: bool = False
    """Each token attends to the later ones too, so that a prompt is computed in one step."""
    normalize: bool = True
    """Vectors have length 1, unless a request says otherwise."""
    dense: list[DenseSpec] = []
    dimensions: list[int] = []
    """Lengths that a request may shorten vectors to, where the model names them."""
    is_matryoshka: bool = False
    """Vectors may be shortened."""
    labels: list[str] = []
    """Names of the classes, by index; empty without a classification head."""
    activation: str = "softmax"
    """Makes probabilities of a head's logits: sigmoid, softmax or identity."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def reads_all_tokens(self) -> bool:
        """True where a vector needs the hidden states of tokens that the prefix cache may hold."""
        return self.pooling_type != "last"
