"""Bodies of requests for vectors and scores, and of their answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pelton_plugins.server.protocol import Message, Usage

Input = str | list[int | str | list[int]] | None
"""A text, texts, token ids, or lists of token ids; not a mixture."""


class PooledRequest(msgspec.Struct, kw_only=True):
    """Fields that all pooling requests have in common."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of a longer text; -1: as many as fit."""
    truncation_side: Literal["right"] = "right"
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout_s: float | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Refused: see `rules`."""


class InputRequest(PooledRequest, kw_only=True):
    """`input`, or a conversation under the chat template."""

    input: Input = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputRequest, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32 numbers, little-endian."""
    dimensions: int | None = None
    use_activation: bool | None = None
    """Give vectors length 1; as the model says when left out."""
    # Refused unless they ask for nothing: see `rules`.
    embed_dtype: str | None = None
    endianness: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class ClassifyRequest(InputRequest, kw_only=True):
    use_activation: bool | None = None
    """False: the head's bare numbers in place of probabilities."""


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage


Texts = str | list[str] | None


class ScoreRequest(PooledRequest, kw_only=True):
    """One text against each of others, or each against its own; any of the four pairs of names."""

    text_1: Texts = None
    text_2: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    use_activation: bool | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(PooledRequest, kw_only=True):
    """Jina's and Cohere's."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """The best so many; all when left out, or 0."""
    return_documents: bool | None = None
    """Yes when left out, but for /v2/rerank."""
    max_tokens_per_doc: int | None = None
    """Cohere's name: tokens of query and document together, of a model that reads both at once."""
    relevant_spans: bool | None = None
    """Refused: see `rules`."""


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


class PoolingRequest(InputRequest, kw_only=True):
    """`data` is for the server's IO processor; `input` gives plain results."""

    data: Any = msgspec.UNSET
    task: str | None = None
    """embed, classify, score, reward, token_embed or token_classify; the model's first when left out."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    # Refused unless they ask for nothing: see `rules`.
    embed_dtype: str | None = None
    endianness: str | None = None


class PooledData(msgspec.Struct, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[Any] | str
    """Numbers, rows of numbers, or base64 of them."""


class PoolingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: Usage


class ProcessorResponse(msgspec.Struct, kw_only=True):
    """Response with what the IO processor made."""

    request_id: str
    created_at: int
    data: Any
