"""POST /v1/chat/completions/batch: several conversations, one answer with a choice for each."""

from __future__ import annotations

import contextlib

import msgspec

from pelton.errors import RequestError
from pelton_plugins.server.chat import ChatAnswer, prepare_chat
from pelton_plugins.server.chat_parsed import ParsedChatAnswer
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Counts, generate
from pelton_plugins.server.prompts import check_fan_out
from pelton_plugins.server.protocol import ChatChoice, ChatCompletionRequest, Message

_ALONE = ("stream", "use_beam_search", "continue_final_message", "echo")
"""Of one conversation."""


class BatchChatRequest(ChatCompletionRequest, kw_only=True):
    """Fields of a chat, which hold for all conversations."""

    messages: list[list[Message]]  # type: ignore[assignment]


async def create_chat_batch(exchange: Exchange, request: BatchChatRequest) -> None:
    for name in _ALONE:
        if getattr(request, name):
            raise RequestError(f"{name} belongs to one conversation; leave it out of a batch.", param=name)
    if request.n not in (None, 1):
        raise RequestError("n must be 1 in a batch", param="n", value=request.n)
    if not request.messages:
        raise RequestError("messages is empty; send at least one conversation.", param="messages")
    check_fan_out(len(request.messages), 1, "messages")
    fields = {name: getattr(request, name) for name in ChatCompletionRequest.__struct_fields__}
    answers: list[ChatAnswer] = []
    for index, messages in enumerate(request.messages):
        try:
            run = await prepare_chat(exchange, ChatCompletionRequest(**(fields | {"messages": messages})))
        except RequestError as error:
            if error.param and error.param.startswith("messages"):
                error.param = f"messages[{index}]" + error.param.removeprefix("messages")
            raise
        parts = (exchange, run.llm, run.request, run.params, [run.prompt])
        answers.append(ChatAnswer(*parts) if run.reading is None else ParsedChatAnswer(*parts, run.reading))
    first, counts = answers[0], Counts()
    first.counts = exchange.counts = counts
    choices: list[ChatChoice] = []
    outputs = generate(
        first.llm, [answer.prompts[0] for answer in answers], first.params, request, first.response_id,
        exchange.lora_request, tenant=exchange.tenant,
    )  # fmt: skip
    async with contextlib.aclosing(outputs):
        async for ready in outputs:
            counts.add(ready)
            for index, output in ready:
                for choice in answers[index].choices([(0, output)]):
                    choice.index = index
                    choices.append(choice)
    choices.sort(key=lambda choice: choice.index)
    await exchange.answer(msgspec.json.encode(first.response(choices, counts.usage())))
