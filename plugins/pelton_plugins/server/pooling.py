"""POST /v1/embeddings, /classify, /score, /rerank and /pooling."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pelton import limits
from pelton.errors import EngineError, RequestError
from pelton.messages.request import PoolingParams
from pelton.outputs import PoolingOutput, PoolingRequestOutput
from pelton.pooling.io_processor import DATA
from pelton.pooling.scoring import cosine, pair_prompt, paired, reads_pairs, score_of
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.params import check_template
from pelton_plugins.server.pooling_protocol import (
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    InputRequest,
    PooledData,
    PooledRequest,
    PoolingRequest,
    PoolingResponse,
    ProcessorResponse,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from pelton_plugins.server.prompts import check_fan_out, max_model_len, render, tokenize_all
from pelton_plugins.server.protocol import PromptTokensDetails, Usage
from pelton_plugins.server.rules import check_offered

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

MANY_NUMBERS = 50_000  # writing more of them would hold up the event loop for milliseconds

Outputs = list[PoolingRequestOutput[PoolingOutput]]
Prompts = list[dict[str, Any]]


async def embeddings_of(exchange: Exchange, request: EmbeddingRequest) -> tuple[Outputs, Usage]:
    """The vector of each input, and what the prompts used."""
    llm = await _engine(exchange, request)
    params = _params(llm, "embed", request.dimensions, request.use_activation)
    outputs = await _run(llm, exchange, request, await _read(exchange, llm, request), params, "embd")
    return outputs, _usage(outputs)


async def create_embedding(exchange: Exchange, request: EmbeddingRequest) -> None:
    outputs, usage = await embeddings_of(exchange, request)
    as_text = request.encoding_format == "base64"

    def response() -> EmbeddingResponse:
        return EmbeddingResponse(
            id=_id(exchange, request, "embd"), created=int(time.time()), model=_model(exchange, request),
            data=[
                Embedding(index=index, embedding=as_base64(output) if as_text else output.outputs.numbers())
                for index, output in enumerate(outputs)
            ],
            usage=usage,
        )  # fmt: skip

    await _answer(exchange, response, 0 if as_text else _count(outputs))


async def create_classification(exchange: Exchange, request: ClassifyRequest) -> None:
    llm = await _engine(exchange, request)
    params = _params(llm, "classify", None, request.use_activation)
    outputs = await _run(llm, exchange, request, await _read(exchange, llm, request), params, "classify")
    pooling = llm.model.pooling
    labels = (pooling and pooling.labels) or []

    def row(index: int, output: PoolingRequestOutput[PoolingOutput]) -> Classification:
        probs = output.outputs.numbers()
        best = max(range(len(probs)), key=probs.__getitem__)
        label = labels[best] if best < len(labels) else None
        return Classification(index=index, label=label, probs=probs, num_classes=len(probs))

    await _answer(
        exchange,
        lambda: ClassifyResponse(
            id=_id(exchange, request, "classify"), created=int(time.time()), model=_model(exchange, request),
            data=[row(index, output) for index, output in enumerate(outputs)], usage=_usage(outputs),
        ),
        _count(outputs),
    )  # fmt: skip


async def create_score(exchange: Exchange, request: ScoreRequest) -> None:
    llm = await _engine(exchange, request)
    sides = _sides(request)
    scores, usage = await _score(
        llm, exchange, request, *sides, "score", request.truncate_prompt_tokens, request.use_activation
    )
    response = ScoreResponse(
        id=_id(exchange, request, "score"), created=int(time.time()), model=_model(exchange, request),
        data=[Score(index=index, score=score) for index, score in enumerate(scores)], usage=usage,
    )  # fmt: skip
    await exchange.answer(msgspec.json.encode(response))


async def create_rerank(exchange: Exchange, request: RerankRequest, *, shows_documents: bool = True) -> None:
    """shows_documents: where the request does not say."""
    llm = await _engine(exchange, request)
    if request.top_n is not None and request.top_n < 0:
        raise RequestError("top_n must be at least 0", param="top_n", value=request.top_n)
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    if not texts:
        raise RequestError("documents is empty; send at least one.", param="documents")
    most = request.truncate_prompt_tokens if request.max_tokens_per_doc is None else request.max_tokens_per_doc
    scores, usage = await _score(
        llm, exchange, request, [request.query], texts, ("query", "documents"), "rerank", most, None
    )
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: request.top_n or None]
    shows = shows_documents if request.return_documents is None else request.return_documents
    response = RerankResponse(
        id=_id(exchange, request, "rerank"), model=_model(exchange, request), usage=usage,
        results=[
            RerankResult(
                index=index, relevance_score=scores[index],
                document=RerankDocument(text=texts[index]) if shows else None,
            )
            for index in order
        ],
    )  # fmt: skip
    await exchange.answer(msgspec.json.encode(response))


async def create_rerank_v2(exchange: Exchange, request: RerankRequest) -> None:
    await create_rerank(exchange, request, shows_documents=False)


async def create_pooling(exchange: Exchange, request: PoolingRequest) -> None:
    llm = await _engine(exchange, request)
    if request.data is not msgspec.UNSET:
        await _process(exchange, llm, request)
        return
    params = _params(llm, request.task, request.dimensions, request.use_activation)
    outputs = await _run(llm, exchange, request, await _read(exchange, llm, request), params, "pool")
    as_text = request.encoding_format == "base64"

    def rows(output: PoolingRequestOutput[PoolingOutput]) -> Any:
        return as_base64(output) if as_text else output.outputs.data.tolist()

    await _answer(
        exchange,
        lambda: PoolingResponse(
            id=_id(exchange, request, "pool"), created=int(time.time()), model=_model(exchange, request),
            data=[PooledData(index=index, data=rows(output)) for index, output in enumerate(outputs)],
            usage=_usage(outputs),
        ),
        0 if as_text else _count(outputs),
    )  # fmt: skip


async def _process(exchange: Exchange, llm: AsyncLLM | Any, request: PoolingRequest) -> None:
    """With the server's IO processor."""
    if request.input is not None or request.messages is not None:
        raise RequestError("Send data or input, not both.", param=DATA)
    given = (request.task, request.dimensions, request.use_activation)
    params = None if given == (None, None, None) else _params(llm, *given)
    request_id = _id(exchange, request, "pool")
    stream = llm.encode(
        {DATA: request.data}, params, _engine_id(request_id), priority=request.priority or 0,
        cache_salt=request.cache_salt, timeout_s=request.timeout_s, truncate_prompt_tokens=request.truncate_prompt_tokens,
        **_adapter(exchange),
    )  # fmt: skip
    async with contextlib.aclosing(stream):
        async for output in stream:
            response = ProcessorResponse(request_id=request_id, created_at=int(time.time()), data=output.outputs)
            try:
                body = msgspec.json.encode(response)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise EngineError(f"The IO processor's answer is not plain data: {error}") from error
            await exchange.answer(body)


# What they have in common.


async def _engine(exchange: Exchange, request: PooledRequest) -> AsyncLLM | Any:
    llm = exchange.state.engine()
    exchange.lora_request = await exchange.state.adapter_of(request.model)
    if llm.model.pooling is None:
        raise RequestError(
            "This model generates; it makes no vectors or scores. Use /v1/completions or /v1/chat/completions.",
            param="model",
        )
    check_offered(request)
    return llm


def _params(llm: Any, task: str | None, dimensions: int | None, use_activation: bool | None) -> PoolingParams:
    return PoolingParams(task=task or llm.model.pooling.tasks[0], dimensions=dimensions, use_activation=use_activation)


async def _read(exchange: Exchange, llm: AsyncLLM | Any, request: InputRequest) -> Prompts:
    """Text, texts, token ids, lists of token ids, or a conversation. Raises `RequestError` before anything runs."""
    if (request.input is None) == (request.messages is None):
        raise RequestError("Send input or messages, one of them.", param="input")
    if request.messages is not None:
        check_template(request, trust_template=exchange.state.config.trust_request_chat_template)  # type: ignore[arg-type]
        prompt = await render(llm, request, with_specials=exchange.state.config.special_tokens_in_messages)  # type: ignore[arg-type]
        return [{"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}]
    given = request.input
    items: Any
    if isinstance(given, str) or (given and all(isinstance(item, int) for item in given)):
        items = [given]
    elif given and (all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given)):
        items = given
    else:
        raise RequestError("input is empty or mixes texts, token ids and lists; send one kind.", param="input")
    check_fan_out(len(items), 1, "input")
    if isinstance(items[0], str):
        return await _tokenized(llm, items, request)
    return [{"prompt_token_ids": ids} for ids in items]


async def _tokenized(
    llm: AsyncLLM | Any, texts: Sequence[str], request: PooledRequest, field: str = "input"
) -> Prompts:
    """field: that holds the texts."""
    if not all(texts):
        raise RequestError(f"{field} holds an empty text.", param=field)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    found = await tokenize_all(llm, texts, add_special_tokens=special, request=request)  # type: ignore[arg-type]
    return [{"prompt": text, "prompt_token_ids": ids} for text, ids in zip(texts, found, strict=True)]


async def _run(
    llm: AsyncLLM | Any,
    exchange: Exchange,
    request: PooledRequest,
    prompts: Prompts,
    params: PoolingParams | list[PoolingParams],
    kind: str,
    truncate: int | None = None,
) -> Outputs:
    found: Outputs = await llm.encode_all(
        prompts, params, _engine_id(_id(exchange, request, kind)),
        priority=request.priority or 0, cache_salt=request.cache_salt, timeout_s=request.timeout_s,
        truncate_prompt_tokens=request.truncate_prompt_tokens if truncate is None else truncate,
        **_adapter(exchange),
    )  # fmt: skip
    return found


async def _score(
    llm: AsyncLLM | Any,
    exchange: Exchange,
    request: PooledRequest,
    first: list[str],
    second: list[str],
    fields: tuple[str, str],
    kind: str,
    truncate: int | None,
    use_activation: bool | None,
) -> tuple[list[float], Usage]:
    """Return the score of each pair, and what the prompts used. fields: that hold the two lists of texts."""
    check_fan_out(len(first), 1, fields[0])
    check_fan_out(len(second), 1, fields[1])
    pairs = paired(first, second)
    if reads_pairs(llm.model):
        if request.add_special_tokens is False:
            raise RequestError(
                "This model reads two texts at once, and tells them apart by special tokens; leave add_special_tokens out.",
                param="add_special_tokens",
            )
        most = max_model_len(llm) if truncate == -1 else truncate

        def work() -> list[Any]:
            return [pair_prompt(pair, llm.tokenizer, max_tokens=most, use_activation=use_activation) for pair in pairs]

        made = await asyncio.to_thread(work)
        outputs = await _run(
            llm,
            exchange,
            request,
            [prompt for prompt, _ in made],
            [params for _, params in made],
            kind,
            -1 if most else None,
        )
        return [score_of(output.outputs) for output in outputs], _usage(outputs)
    if use_activation is False:
        raise RequestError(
            "This model's scores are the cosine of two vectors, which have no activation; leave use_activation out.",
            param="use_activation",
        )
    prompts = await _tokenized(llm, first, request, fields[0]) + await _tokenized(llm, second, request, fields[1])
    outputs = await _run(llm, exchange, request, prompts, PoolingParams(task="embed"), kind, truncate)
    vectors = [output.outputs for output in outputs]
    return [cosine(*pair) for pair in paired(vectors[: len(first)], vectors[len(first) :])], _usage(outputs)


def _adapter(exchange: Exchange) -> dict[str, Any]:
    """Return the argument that names the request's adapter; none for the model alone, as engines without adapters are called."""
    return {} if exchange.lora_request is None else {"lora_request": exchange.lora_request}


def _sides(request: ScoreRequest) -> tuple[list[str], list[str], tuple[str, str]]:
    """The two lists of texts, and under which names they came."""
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        one, other = getattr(request, first), getattr(request, second)
        if one is not None and other is not None:
            return _listed(one), _listed(other), (first, second)
    raise RequestError(
        "Send two sides: text_1 and text_2, data_1 and data_2, queries and documents, or queries and items.",
        param="text_1",
    )


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _answer(exchange: Exchange, response: Callable[[], msgspec.Struct], num_numbers: int) -> None:
    """Written on a thread where it is long."""

    def body() -> bytes:
        return msgspec.json.encode(response())

    await exchange.answer(body() if num_numbers <= MANY_NUMBERS else await asyncio.to_thread(body))


def as_base64(output: PoolingRequestOutput[PoolingOutput]) -> str:
    """float32 numbers, little-endian."""
    return base64.b64encode(output.outputs.tensor.data).decode()


def _count(outputs: Outputs) -> int:
    return sum(len(output.outputs.tensor.data) // 4 for output in outputs)


def _id(exchange: Exchange, request: PooledRequest, kind: str) -> str:
    return f"{kind}-{request.request_id or exchange.request_id}"


def _engine_id(request_id: str) -> str:
    """One that never comes again: a client may send one X-Request-Id twice."""
    return f"{request_id[: limits.MAX_REQUEST_ID_CHARS - 40]}-{uuid.uuid4().hex[:12]}"


def _model(exchange: Exchange, request: PooledRequest) -> str:
    return request.model or exchange.state.model_name


def _usage(outputs: Outputs) -> Usage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return Usage(
        prompt_tokens=count, completion_tokens=0, total_tokens=count,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )  # fmt: skip
