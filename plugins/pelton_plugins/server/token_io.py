"""Prompts and answers as token ids: rendering before the engine, the engine alone, and what is made of its tokens behind it.

    /v1/chat/completions/render -> /inference/v1/generate -> /v1/chat/completions/derender

Each step is vLLM's, in its shape, so that a proxy may put them on different machines. One server offers them all.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from pelton.errors import NotSupportedError, RequestError
from pelton.outputs import CompletionOutput, RequestOutput
from pelton.sampling_params import RequestOutputKind, SamplingParams
from pelton_plugins.server.anthropic_input import as_chat as as_chat_of_messages
from pelton_plugins.server.anthropic_protocol import MessagesRequest
from pelton_plugins.server.chat import ChatAnswer, prepare_chat
from pelton_plugins.server.chat_parsed import ParsedChatAnswer
from pelton_plugins.server.completions import prepare_completion
from pelton_plugins.server.exchange import DONE, Exchange
from pelton_plugins.server.generation import Counts, generate
from pelton_plugins.server.logprobs import TokenWriter, chat_logprobs
from pelton_plugins.server.prompts import Prompt, check_fan_out, check_length, max_model_len, off_loop
from pelton_plugins.server.protocol import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    GenerateRequest,
    Usage,
)
from pelton_plugins.server.responses import chat_of as as_chat_of_response
from pelton_plugins.server.responses_protocol import ResponsesRequest
from pelton_plugins.server.rules import check_offered
from pelton_plugins.server.token_protocol import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    TokensChoice,
    TokensRequest,
    TokensResponse,
)

# Before the engine.


async def render_chat(exchange: Exchange, request: ChatCompletionRequest) -> None:
    run = await prepare_chat(exchange, request)
    await exchange.answer(msgspec.json.encode(_rendered(exchange, request, run.prompt, run.params)))


async def render_response(exchange: Exchange, request: ResponsesRequest) -> None:
    chat = await as_chat_of_response(exchange, request)
    await render_chat(exchange, chat)


async def render_message(exchange: Exchange, request: MessagesRequest) -> None:
    await render_chat(exchange, as_chat_of_messages(request))


async def render_completion(exchange: Exchange, request: CompletionRequest) -> None:
    """One object for each prompt."""
    _, params, prompts = await prepare_completion(exchange, request)
    if any(prompt.embeds is not None for prompt in prompts):
        raise RequestError("prompt_embeds has no tokens to render.", param="prompt_embeds")
    found = [_rendered(exchange, request, prompt, params, f"-{i}") for i, prompt in enumerate(prompts)]
    await exchange.answer(msgspec.json.encode(found))


def _rendered(
    exchange: Exchange, request: GenerateRequest, prompt: Prompt, params: SamplingParams, suffix: str = ""
) -> TokensRequest:
    fields = {name: value for name, value in msgspec.to_builtins(params).items() if value != []}
    fields.pop("output_kind", None)  # as the request for tokens says
    return TokensRequest(
        request_id=(request.request_id or exchange.request_id) + suffix, token_ids=prompt.token_ids,
        sampling_params=fields, model=request.model or exchange.state.model_name, stream=request.stream,
        stream_options=request.stream_options, priority=request.priority, cache_salt=request.cache_salt,
        timeout_s=request.timeout_s, kv_transfer_params=request.kv_transfer_params,
    )  # fmt: skip


# The engine.


async def create_tokens(exchange: Exchange, request: TokensRequest) -> None:
    state = exchange.state
    llm = state.generating_engine()
    exchange.lora_request = await state.adapter_of(request.model)
    check_offered(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if not request.token_ids:
        raise RequestError("token_ids is empty; send at least one.", param="token_ids")
    params = _params(request)
    check_fan_out(1, params.n)
    prompt = Prompt(token_ids=request.token_ids)
    check_length(llm, prompt, None)
    around = GenerateRequest(
        priority=request.priority, cache_salt=request.cache_salt, timeout_s=request.timeout_s,
        kv_transfer_params=request.kv_transfer_params,
    )  # fmt: skip
    counts = exchange.counts = Counts()
    request_id = request.request_id or exchange.request_id
    writer = TokenWriter.of(llm.tokenizer, params, as_ids=False)

    def choices(output: RequestOutput) -> list[TokensChoice]:
        return [
            TokensChoice(
                index=one.index, token_ids=list(one.token_ids), finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                logprobs=None if one.logprobs is None
                else chat_logprobs(one.token_ids, one.logprobs, params.logprobs or 0, writer),
            )
            for one in output.outputs
        ]  # fmt: skip

    found: list[TokensChoice] = []
    outputs = generate(llm, [prompt], params, around, request_id, exchange.lora_request, tenant=exchange.tenant)
    async with contextlib.aclosing(outputs):
        async for ready in outputs:
            counts.add(ready)
            new = [choice for _, output in ready for choice in choices(output)]
            if request.stream:
                part = TokensResponse(request_id=request_id, choices=new)
                await exchange.write(b"data: " + msgspec.json.encode(part) + b"\n\n")
            found += new
    if request.stream:
        tail = b""
        if request.stream_options is not None and request.stream_options.include_usage:
            last = TokensResponse(request_id=request_id, choices=[], usage=counts.usage())
            tail = b"data: " + msgspec.json.encode(last) + b"\n\n"
        await exchange.finish(tail + DONE)
        return
    found.sort(key=lambda choice: choice.index)
    whole = TokensResponse(
        request_id=request_id, choices=found, kv_transfer_params=counts.kv_transfer_params, usage=counts.usage()
    )
    await exchange.answer(msgspec.json.encode(whole))


def _params(request: TokensRequest) -> SamplingParams:
    """Raises `RequestError` that names the field."""
    unknown = sorted(set(request.sampling_params) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise RequestError(f"sampling_params has {unknown[0][:100]!r}, which is none.", param="sampling_params")
    try:
        params = msgspec.convert(request.sampling_params, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling_params: {error}", param="sampling_params") from None
    params.output_kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    params.detokenize = bool(params.stop)  # nobody reads the text
    return params


# Behind it.


async def derender_chat(exchange: Exchange, request: DerenderChatRequest) -> None:
    state = exchange.state
    llm, chat = state.generating_engine(), request.chat_request
    state.check_model(request.model)
    _check_derender(llm, request)
    assert state.parsers is not None
    parsers = state.parsers.of_model(llm)
    reads = parsers.tool is not None or parsers.reasoning is not None
    if chat is None and reads:
        raise RequestError("This server reads tool calls or reasoning; send chat_request.", param="chat_request")
    choices = []
    run = None if chat is None else await prepare_chat(exchange, chat)
    params = SamplingParams() if run is None else run.params
    answer: ChatAnswer | None = None
    if run is not None:
        parts = (exchange, llm, run.request, run.params, [run.prompt])
        answer = ChatAnswer(*parts) if run.reading is None else ParsedChatAnswer(*parts, run.reading)
    for given in request.generate_response.choices:
        output = await _output(llm, given, skip_special_tokens=params.skip_special_tokens)
        if answer is not None:
            choice = answer._choice(output)
        else:
            message = ChatMessage(role=state.config.response_role, content=output.text)
            choice = ChatChoice(index=given.index, message=message, finish_reason=given.finish_reason)
        choice.stop_reason, choice.logprobs = given.stop_reason, given.logprobs
        choices.append(choice)
    response = ChatCompletionResponse(
        id=request.generate_response.request_id, created=int(time.time()), model=request.model or state.model_name,
        choices=choices, usage=_usage(request), kv_transfer_params=request.generate_response.kv_transfer_params,
    )  # fmt: skip
    await exchange.answer(msgspec.json.encode(response))


async def derender_completion(exchange: Exchange, request: DerenderCompletionRequest) -> None:
    state = exchange.state
    llm = state.generating_engine()
    state.check_model(request.model)
    _check_derender(llm, request)
    choices = [
        CompletionChoice(
            index=given.index, text=(await _output(llm, given)).text, finish_reason=given.finish_reason,
            stop_reason=given.stop_reason,
        )
        for given in request.generate_response.choices
    ]  # fmt: skip
    response = CompletionResponse(
        id=request.generate_response.request_id, created=int(time.time()), model=request.model or state.model_name,
        choices=choices, usage=_usage(request), kv_transfer_params=request.generate_response.kv_transfer_params,
    )  # fmt: skip
    await exchange.answer(msgspec.json.encode(response))


def _check_derender(llm: Any, request: DerenderChatRequest | DerenderCompletionRequest) -> None:
    check_offered(request)
    if llm.tokenizer is None:
        raise NotSupportedError("The server runs without a tokenizer.")
    if request.prompt_tokens is not None and not 0 <= request.prompt_tokens < 2**31:
        raise RequestError("prompt_tokens must be at least 0", param="prompt_tokens", value=request.prompt_tokens)
    check_fan_out(1, max(len(request.generate_response.choices), 1))
    for choice in request.generate_response.choices:
        ids, most, size = choice.token_ids, max_model_len(llm), llm.model.vocab_size
        if len(ids) > most or min(ids, default=0) < 0 or max(ids, default=0) >= size:
            raise RequestError(
                f"token_ids must be at most {most} ids from 0 to {size - 1}",
                param="generate_response.choices.token_ids",
            )


async def _output(llm: Any, given: TokensChoice, *, skip_special_tokens: bool = True) -> CompletionOutput:
    """A token that ended the answer has no text."""
    ids = given.token_ids
    if given.finish_reason == "stop" and ids and ids[-1] in llm.model.eos_token_ids:
        ids = ids[:-1]
    text = await off_loop(len(ids), lambda: str(llm.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)))
    return CompletionOutput(
        given.index, text, given.token_ids, finish_reason=given.finish_reason or "stop", stop_reason=given.stop_reason
    )


def _usage(request: DerenderChatRequest | DerenderCompletionRequest) -> Usage:
    prompt = request.prompt_tokens or 0
    new = sum(len(choice.token_ids) for choice in request.generate_response.choices)
    return Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)
