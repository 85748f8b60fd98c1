"""RoBERTa and XLM-RoBERTa: BERT's layers, positions counted from behind the padding id, a head of two layers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from pelton.layers.encoder import WholeLinear
from pelton.model.build import BuildConfig
from pelton_plugins.models.bert import BertModel, TokenClassifier


class RobertaModel(BertModel):
    ignored: ClassVar[tuple[str, ...]] = (r"pooler\..*", r"lm_head\..*")

    def first_position(self, config: BuildConfig) -> int:
        return int(config.hf.get("pad_token_id", 1)) + 1


class RobertaForMaskedLM(RobertaModel):
    """Saved with its pre-training head, which is left out."""

    inner = "roberta."
    ignored: ClassVar[tuple[str, ...]] = (r"roberta\.pooler\..*", r"lm_head\..*")


class RobertaForSequenceClassification(RobertaModel):
    """The head on the first token's hidden state. Rerankers are this."""

    inner = "roberta."
    ignored: ClassVar[tuple[str, ...]] = (r"roberta\.pooler\..*",)

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config, prefix=prefix)
        assert config.pooling is not None
        size, head = config.hf.hidden_size, f"{prefix}classifier"
        self.dense = WholeLinear(size, {f"{head}.dense": size}, config=config, bias=True)
        self.out_proj = WholeLinear(size, {f"{head}.out_proj": config.pooling.num_labels}, config=config, bias=True)

    def classify(self, vectors: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(vectors)))


class RobertaForTokenClassification(TokenClassifier, RobertaModel):
    inner = "roberta."
    ignored: ClassVar[tuple[str, ...]] = (r"roberta\.pooler\..*",)
