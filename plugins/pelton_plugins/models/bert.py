"""BERT: encoder layers that norm behind each sub-layer; MiniLM and other distilled ones have its shape.

T tokens, H hidden size. A text's tokens see each other in both directions, so a prompt is computed in one step.
"""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.embedding import VocabEmbedding
from pelton.layers.encoder import WholeLinear
from pelton.layers.pooler import Pooler
from pelton.model.build import BuildConfig
from pelton_plugins.models.encoder_attention import EncoderAttention
from pelton_plugins.models.encoder_layers import (
    ActivatedLinear,
    EmbeddingParts,
    EncoderLayers,
    EncoderModel,
    LayerNorm,
    LayerParts,
    Table,
)


class BertEmbeddings(nn.Module):
    """Word, position and token type, summed and normed."""

    def __init__(self, *, config: BuildConfig, prefix: str, first_position: int = 0) -> None:
        super().__init__()
        hf = config.hf
        self.first_position = first_position
        self.word = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix=f"{prefix}.word_embeddings")
        self.position = Table(
            hf.max_position_embeddings, hf.hidden_size, config=config, prefix=f"{prefix}.position_embeddings"
        )
        self.token_type = Table(
            hf.get("type_vocab_size", 2), hf.hidden_size, config=config, prefix=f"{prefix}.token_type_embeddings"
        )
        self.norm = LayerNorm(
            hf.hidden_size, config=config, prefix=f"{prefix}.LayerNorm", eps=hf.get("layer_norm_eps", 1e-12)
        )
        config.weights.ignore(rf"{re.escape(prefix)}\.(position_ids|token_type_ids)")

    def forward(self, batch: ForwardBatch) -> Tensor:
        types = batch.token_types
        tells_apart = types is not None and len(self.token_type.weight) > 1  # RoBERTa does not
        embedded = self.word(batch.input_ids) + (self.token_type(types) if tells_apart else self.token_type.weight[0])
        return self.norm(embedded, self.position(self.position_ids(batch)))

    def position_ids(self, batch: ForwardBatch) -> Tensor:
        return batch.positions + self.first_position if self.first_position else batch.positions

    @property
    def parts(self) -> EmbeddingParts:
        return EmbeddingParts(self.word.embed, self.position.weight, self.token_type.weight, self.norm.add_norm)


class BertLayer(nn.Module):
    """Attention, norm, MLP, norm."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        hidden_size, num_heads, eps = hf.hidden_size, hf.num_attention_heads, hf.get("layer_norm_eps", 1e-12)
        inner = f"{prefix}.attention"
        self.qkv = WholeLinear(
            hidden_size, {f"{inner}.self.{name}": hidden_size for name in ("query", "key", "value")},
            config=config, bias=True,
        )  # fmt: skip
        self.attn = EncoderAttention(num_heads, hidden_size // num_heads, config=config, prefix=f"{inner}.self")
        self.attn_out = WholeLinear(hidden_size, {f"{inner}.output.dense": hidden_size}, config=config, bias=True)
        self.attn_norm = LayerNorm(hidden_size, config=config, prefix=f"{inner}.output.LayerNorm", eps=eps)
        self.up = ActivatedLinear(
            hidden_size, {f"{prefix}.intermediate.dense": hf.intermediate_size}, config=config, bias=True,
            activation_name=hf.get("hidden_act", "gelu"),
        )  # fmt: skip
        self.down = WholeLinear(hf.intermediate_size, {f"{prefix}.output.dense": hidden_size}, config=config, bias=True)
        self.norm = LayerNorm(hidden_size, config=config, prefix=f"{prefix}.output.LayerNorm", eps=eps)

    def forward(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        hidden = self.attn_norm(self.attn_out(self.attn(self.qkv(hidden), batch)), hidden)
        return self.norm(self.down(self.up(hidden)), hidden)

    @property
    def parts(self) -> LayerParts:
        """The ops of `forward`, for who runs several layers at once."""
        return LayerParts(
            self.attn, self.qkv.bare, self.attn_out.bare, self.up.bare if self.up.is_activated else None, self.down.bare,
            self.attn_norm.add_norm, self.norm.add_norm,
        )  # fmt: skip


class BertModel(EncoderModel):
    """Hidden states for vectors."""

    inner: ClassVar[str] = ""
    """Before the encoder's names in the checkpoint."""
    ignored: ClassVar[tuple[str, ...]] = (r"pooler\..*", r"cls\..*")
    """Heads of training that no vector is made by."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        base = f"{prefix}{self.inner}"
        for pattern in self.ignored:
            config.weights.ignore(pattern)
        self.embeddings = BertEmbeddings(
            config=config, prefix=f"{base}embeddings", first_position=self.first_position(config)
        )
        self.layers = EncoderLayers(
            BertLayer(config=config, prefix=f"{base}encoder.layer.{index}")
            for index in range(config.hf.num_hidden_layers)
        )
        self.pooler = Pooler(config=config)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.layers(self.embeddings, batch)
        return hidden

    def first_position(self, config: BuildConfig) -> int:
        """Return the position of a prompt's first token."""
        return 0


class BertForMaskedLM(BertModel):
    """Saved with its pre-training head, which is left out."""

    inner = "bert."
    ignored = (r"bert\.pooler\..*", r"cls\..*")


class BertForSequenceClassification(BertModel):
    """The head on the first token's hidden state: BERT's own pooler, then the classes. Cross-encoders are this."""

    inner = "bert."
    ignored = ()

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        assert config.pooling is not None
        size = config.hf.hidden_size
        self.dense = WholeLinear(size, {f"{prefix}bert.pooler.dense": size}, config=config, bias=True)
        self.classifier = WholeLinear(
            size, {f"{prefix}classifier": config.pooling.num_labels}, config=config, bias=True
        )

    def classify(self, vectors: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.dense(vectors)))


class TokenClassifier(BertModel):
    """A class for each token."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        assert config.pooling is not None
        self.classifier = WholeLinear(
            config.hf.hidden_size, {f"{prefix}classifier": config.pooling.num_labels}, config=config, bias=True
        )

    def classify(self, vectors: Tensor) -> Tensor:
        return self.classifier(vectors)


class BertForTokenClassification(TokenClassifier):
    inner = "bert."
    ignored = (r"bert\.pooler\..*",)
