"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.types import ASGIApp

from pelton.errors import NotSupportedError, RequestError
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.openapi import api
from pelton_plugins.server.params import check_template
from pelton_plugins.server.prompts import max_model_len, off_loop, render, tokenize
from pelton_plugins.server.protocol import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.tools import check_tools


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Beside it stand the special tokens, by the names that tokenizer_config.json gives them."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None = None


def routes(state: ServerState) -> list[Any]:
    @post("/tokenize", status_code=200, opt=api(TokenizeRequest, TokenizeResponse))
    async def tokenize_route() -> ASGIApp:
        """Token ids of a prompt, or of messages under the chat template."""
        return Exchange(state, TokenizeRequest, _tokenize, generates=False)

    @post("/detokenize", status_code=200, opt=api(DetokenizeRequest, DetokenizeResponse))
    async def detokenize_route() -> ASGIApp:
        """Text of token ids."""
        return Exchange(state, DetokenizeRequest, _detokenize, generates=False)

    @get("/tokenizer_info", opt=api(None, TokenizerInfo))
    async def tokenizer_info() -> Response[bytes]:
        """Return special tokens, the chat template and the longest context."""
        return Response(msgspec.json.encode(_tokenizer_info(state)), media_type="application/json")

    shown = [tokenizer_info] if state.config.enable_tokenizer_info_endpoint else []
    return [tokenize_route, detokenize_route, *shown]


def _tokenizer_info(state: ServerState) -> dict[str, Any]:
    llm = state.engine()
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise NotSupportedError("The server runs without a tokenizer.")
    template = getattr(tokenizer, "chat_template", None)
    found = TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        model_max_length=max_model_len(llm),
        vocab_size=llm.model.vocab_size,
        chat_template=getattr(template, "source", None),
    )
    return {**getattr(tokenizer, "special_tokens", {}), **msgspec.to_builtins(found)}


async def _tokenize(exchange: Exchange, request: TokenizeRequest) -> None:
    llm = exchange.state.engine()
    exchange.state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Send prompt or messages, one of them.", param="prompt")
    if request.prompt is not None:
        special = True if request.add_special_tokens is None else request.add_special_tokens
        ids = await tokenize(llm, request.prompt, add_special_tokens=special)
    else:
        check_template(request, trust_template=exchange.state.config.trust_request_chat_template)
        specials = exchange.state.config.special_tokens_in_messages
        tools = check_tools(request.tools).tools if request.tools else ()
        ids = (await render(llm, request, tools, with_specials=specials)).token_ids
    tokenizer = llm.tokenizer
    strings = None
    if request.return_token_strs and tokenizer is not None:
        strings = await off_loop(
            len(ids), lambda: [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
        )
    response = TokenizeResponse(count=len(ids), max_model_len=max_model_len(llm), tokens=ids, token_strs=strings)
    await exchange.answer(msgspec.json.encode(response))


async def _detokenize(exchange: Exchange, request: DetokenizeRequest) -> None:
    llm = exchange.state.engine()
    exchange.state.check_model(request.model)
    tokenizer: Any = llm.tokenizer
    if tokenizer is None:
        raise NotSupportedError("The server runs without a tokenizer.")
    most = max_model_len(llm)
    if len(request.tokens) > most:
        raise RequestError(
            f"tokens has {len(request.tokens)} ids; at most {most}, the model's context.", param="tokens"
        )
    vocab_size = llm.model.vocab_size
    for token_id in (min(request.tokens, default=0), max(request.tokens, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token ids go from 0 to {vocab_size - 1}", param="tokens", value=token_id)
    text = await off_loop(len(request.tokens), lambda: str(tokenizer.decode(request.tokens, skip_special_tokens=False)))
    await exchange.answer(msgspec.json.encode(DetokenizeResponse(prompt=text)))
