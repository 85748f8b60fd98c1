"""POST /v1/responses, and what was kept of earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton_plugins.server.chat import ChatRun, prepare_chat
from pelton_plugins.server.chat_stream import Step, chat_steps
from pelton_plugins.server.errors import ErrorResponse, describe
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Counts
from pelton_plugins.server.logprobs import TokenWriter, chat_logprobs
from pelton_plugins.server.params import check_chat
from pelton_plugins.server.prompts import render
from pelton_plugins.server.protocol import ChatCompletionRequest
from pelton_plugins.server.responses_events import ResponseBuilder
from pelton_plugins.server.responses_input import as_chat, input_items
from pelton_plugins.server.responses_protocol import DeletedResponse, InputItems, InputTokens, ResponsesRequest
from pelton_plugins.server.state import ServerState


class ResponseNotFoundError(RequestError):
    status = 404


@dataclass(eq=False)
class StoredResponse:
    """A response, and the items that led to it."""

    builder: ResponseBuilder
    items: list[dict[str, Any]]
    """Of the conversation up to and without the answer."""
    task: asyncio.Task[None] | None = None


@dataclass
class ResponseStore:
    """The latest responses that asked to be kept, in this process's memory."""

    size: int
    _found: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        self._found[response_id] = stored
        while len(self._found) > self.size:
            _, oldest = self._found.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        found = self._found.get(response_id)
        if found is None:
            shown = response_id[:100]
            raise ResponseNotFoundError(
                f"No response with id {shown!r} is kept here (max_stored_responses is {self.size}).", param=param
            )
        return found

    def delete(self, response_id: str) -> None:
        stored = self.get(response_id)
        if stored.task is not None:
            stored.task.cancel()
        del self._found[response_id]


def store_of(state: ServerState) -> ResponseStore:
    if state.responses is None:
        state.responses = ResponseStore(state.config.max_stored_responses)
    return state.responses


async def chat_of(exchange: Exchange, request: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that a request stands for, after the responses that it continues."""
    return as_chat(request, await _before(exchange, request))


async def _before(exchange: Exchange, request: ResponsesRequest) -> list[dict[str, Any]]:
    if request.previous_response_id is None:
        return []
    found: list[dict[str, Any]] = msgspec.json.decode(
        await act(exchange.state, "items", request.previous_response_id, "previous_response_id")
    )
    return found


async def create_response(exchange: Exchange, request: ResponsesRequest) -> None:
    store = store_of(exchange.state)
    before = await _before(exchange, request)
    is_stored = store.size > 0 and request.store is not False
    if request.background and not is_stored:
        raise RequestError(
            "background needs store: start the server with --max-stored-responses, and leave store out.",
            param="background",
        )
    if request.background and request.stream:
        raise RequestError(
            "background and stream exclude each other here; poll GET /v1/responses/ID.", param="background"
        )
    chat = as_chat(request, before)
    run = await prepare_chat(exchange, msgspec.structs.replace(chat, stream=bool(request.stream)))
    response_id = new_id(exchange.state, request.request_id)
    model = request.model or exchange.state.model_name
    builder = ResponseBuilder(response_id, model, request, is_stored=is_stored)
    stored = StoredResponse(builder, [*before, *input_items(request.input)])
    if is_stored:
        store.put(response_id, stored)
    answer = _Answer(exchange, run, builder, response_id)
    if request.background:
        stored.task = asyncio.create_task(answer.in_background())
        await exchange.answer(msgspec.json.encode(builder.response))
    elif request.stream:
        await answer.stream()
    else:
        async for _ in answer.events():
            pass
        await exchange.answer(msgspec.json.encode(builder.response))


@dataclass(eq=False)
class _Answer:
    exchange: Exchange
    run: ChatRun
    builder: ResponseBuilder
    response_id: str

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Lists of events; a failure is noted in the response too."""
        counts, writer = Counts(), TokenWriter.of(self.run.llm.tokenizer, self.run.params, as_ids=False)
        begin: list[dict[str, Any]] | None = self.builder.begin()
        finish_reason: str | None = None
        steps = chat_steps(self.exchange, self.run, counts, self.response_id)
        try:
            async with contextlib.aclosing(steps) as found:
                async for step in found:
                    finish_reason = step.finish_reason or finish_reason
                    # Errors before the first step are plain HTTP errors.
                    yield [*(begin or ()), *self.builder.take(step.events, self._logprobs(step, writer))]
                    begin = None
        except (asyncio.CancelledError, GeneratorExit):
            self.builder.fail("cancelled", None)
            raise
        except Exception as error:
            event = self.builder.fail("failed", self._error(error))
            if begin is not None or not self.run.request.stream:
                raise
            yield [event]
            return
        yield self.builder.finish(finish_reason, counts.usage())

    def _logprobs(self, step: Step, writer: TokenWriter) -> Any:
        if step.output.logprobs is None:
            return None
        num_top = self.run.request.top_logprobs or 0
        return chat_logprobs(step.output.token_ids, step.output.logprobs, num_top, writer)

    def _error(self, error: BaseException) -> dict[str, Any]:
        body = describe(error, self.exchange.request_id).error
        return {"code": "server_error" if body.code >= 500 else "invalid_prompt", "message": body.message}

    async def stream(self) -> None:
        self.exchange.stream_error = self._error_event
        async with contextlib.aclosing(self.events()) as found:
            async for events in found:
                if events:
                    await self.exchange.write(b"".join(map(frame, events)))
        await self.exchange.finish(b"")

    def _error_event(self, body: ErrorResponse) -> bytes:
        error = body.error
        return frame(self.builder.event("error", code=str(error.code), message=error.message, param=error.param))

    async def in_background(self) -> None:
        with contextlib.suppress(Exception):  # the response says what failed
            async for _ in self.events():
                pass


def frame(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


async def count_input_tokens(exchange: Exchange, request: ResponsesRequest) -> None:
    state = exchange.state
    llm = state.generating_engine()
    state.check_model(request.model)
    chat = await chat_of(exchange, request)
    offer = check_chat(chat, trust_template=False)
    prompt = await render(llm, chat, offer.tools, with_specials=state.config.special_tokens_in_messages)
    await exchange.answer(msgspec.json.encode(InputTokens(input_tokens=len(prompt.token_ids))))


MAX_LISTED = 100  # items of one page


async def list_input_items(
    state: ServerState, response_id: str, *, limit: int, order: str, after: str | None
) -> InputItems:
    """Return items that a response was asked with, in pages as OpenAI's client reads them. Raises `RequestError`."""
    if not 1 <= limit <= MAX_LISTED:
        raise RequestError(f"limit must be from 1 to {MAX_LISTED}", param="limit", value=limit)
    if order not in ("asc", "desc"):
        raise RequestError('order must be "asc" or "desc"', param="order", value=order[:20])
    given = msgspec.json.decode(await act(state, "input_items", response_id))
    items = [{**item, "id": item.get("id") or f"item_{index}"} for index, item in enumerate(given)]
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError("after names no item of this response", param="after", value=after[:100])
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page]
    return InputItems(
        data=page, has_more=len(items) > limit, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None
    )


async def act(state: ServerState, action: str, response_id: str, param: str | None = None) -> bytes:
    """Do something with a response, whichever process keeps it; returns JSON. Raises `RequestError`.

    action: get, delete, cancel, input_items: what it was asked with, or items: of the conversation up to and with the answer.
    """
    keeper = _KEEPER.match(response_id)
    if state.ask_kept is None or keeper is None or int(keeper[1]) == state.index:
        return await act_here(state, action, response_id, param)
    found = await state.ask_kept(int(keeper[1]), action, response_id)
    if not found:
        raise ResponseNotFoundError(
            f"The response {response_id[:100]!r} is lost: the process that kept it ended, or does not answer.",
            param=param,
        )
    return found


async def act_here(state: ServerState, action: str, response_id: str, param: str | None = None) -> bytes:
    """`act`, on what this process keeps."""
    store = store_of(state)
    stored = store.get(response_id, param)
    found: Any
    if action == "delete":
        store.delete(response_id)
        found = DeletedResponse(id=response_id)
    elif action == "items":
        if stored.builder.response["status"] == "in_progress":
            raise RequestError(f"The response {response_id[:100]!r} is in progress; wait for its end.", param=param)
        found = [*stored.items, *stored.builder.output]
    elif action == "input_items":
        found = stored.items
    else:
        if action == "cancel":
            await _cancel(stored)
        found = stored.builder.copy()
    return msgspec.json.encode(found)


async def _cancel(stored: StoredResponse) -> None:
    """Stop a response in the background; one that is over stays as it is."""
    if stored.task is None:
        raise RequestError("Only a response that was made with background can be cancelled.", param="response_id")
    if not stored.task.done():
        stored.task.cancel()
        await asyncio.wait([stored.task])


_KEEPER = re.compile(r"resp_(\d{1,3})-")


def new_id(state: ServerState, request_id: str | None) -> str:
    """The id of a response: where several processes serve it begins with the index of the one that keeps it."""
    keeper = "" if state.ask_kept is None else f"{state.index}-"
    return f"resp_{keeper}{request_id or uuid.uuid4().hex}"
