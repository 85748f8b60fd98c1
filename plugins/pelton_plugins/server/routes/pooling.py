"""/v1/embeddings, /classify, /score, /rerank, /pooling."""

from __future__ import annotations

from typing import Any

from litestar import post
from litestar.types import ASGIApp

from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.pooling import (
    create_classification,
    create_embedding,
    create_pooling,
    create_rerank,
    create_rerank_v2,
    create_score,
)
from pelton_plugins.server.pooling_protocol import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from pelton_plugins.server.state import ServerState


def routes(state: ServerState) -> list[Any]:
    @post("/v1/embeddings", status_code=200, opt=api(EmbeddingRequest, EmbeddingResponse))
    async def embeddings() -> ASGIApp:
        """Make a vector of each input."""
        return Exchange(state, EmbeddingRequest, create_embedding)

    @post("/classify", status_code=200, opt=api(ClassifyRequest, ClassifyResponse))
    async def classify() -> ASGIApp:
        """Give each input's class, and the probability of each."""
        return Exchange(state, ClassifyRequest, create_classification)

    @post(["/score", "/v1/score"], status_code=200, opt=api(ScoreRequest, ScoreResponse))
    async def score() -> ASGIApp:
        """Score how well texts fit each other."""
        return Exchange(state, ScoreRequest, create_score)

    @post(["/rerank", "/v1/rerank"], status_code=200, opt=api(RerankRequest, RerankResponse))
    async def rerank() -> ASGIApp:
        """Order documents by how well they fit a query."""
        return Exchange(state, RerankRequest, create_rerank)

    @post("/v2/rerank", status_code=200, opt=api(RerankRequest, RerankResponse))
    async def rerank_v2() -> ASGIApp:
        """Order documents by how well they fit a query, without their texts in the answer."""
        return Exchange(state, RerankRequest, create_rerank_v2)

    @post("/pooling", status_code=200, opt=api(PoolingRequest, PoolingResponse))
    async def pooling() -> ASGIApp:
        """Give a model's results as they are, or what the IO processor makes of them."""
        return Exchange(state, PoolingRequest, create_pooling)

    return [embeddings, classify, score, rerank, rerank_v2, pooling]
