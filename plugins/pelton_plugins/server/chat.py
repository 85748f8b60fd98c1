"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.errors import ConfigError, NotSupportedError, RequestError
from pelton.outputs import CompletionOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.exchange import DONE, Exchange
from pelton_plugins.server.generation import (
    LONG_TEXT_CHARS,
    Counts,
    Frames,
    Prompt,
    Usages,
    check_fan_out,
    check_length,
    generate,
    max_model_len,
    off_loop,
    tokenize,
    truncate,
)
from pelton_plugins.server.logprobs import chat_logprobs, prompt_logprobs_json
from pelton_plugins.server.params import check_chat, sampling_params
from pelton_plugins.server.protocol import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Message,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

encode = msgspec.json.encode


async def create_chat_completion(exchange: Exchange, request: ChatCompletionRequest) -> None:
    state = exchange.state
    llm = state.engine()
    state.check_model(request.model)
    check_chat(request, trust_template=state.config.trust_request_chat_template)
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    params = sampling_params(
        request,
        llm.model.generation_config,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    check_fan_out(1, params.n)
    prompt = truncate(request, await render(llm, request), max_model_len(llm), max_tokens)
    check_length(llm, prompt, max_tokens)
    response_id = f"chatcmpl-{request.request_id or exchange.request_id}"
    job = _Job(request, params, prompt, llm, response_id, request.model or state.model_name, state.config.response_role)
    if request.stream:
        await job.stream(exchange, Usages(request, force=state.config.enable_force_include_usage))
    else:
        await job.answer(exchange)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates read them: content as one text, fields that are not there left out."""
    return [
        {
            key: value
            for key, value in (
                ("role", message.role),
                ("content", _content(message, index)),
                ("name", message.name),
                ("tool_calls", message.tool_calls),
                ("tool_call_id", message.tool_call_id),
                ("reasoning", message.reasoning),
            )
            if value is not None
        }
        for index, message in enumerate(messages)
    ]


def _content(message: Message, index: int) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise RequestError("content is missing", param=f"messages[{index}].content")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise NotSupportedError(
                f"This model reads text only; a content part has type {part.type[:40]!r}.",
                param=f"messages[{index}].content",
            )
        if part.text is None:
            raise RequestError("a text part has no text", param=f"messages[{index}].content")
        texts.append(part.text)
    return "\n".join(texts)


async def render(llm: AsyncLLM | Any, request: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """Messages to a prompt, by the chat template."""
    keep_open = bool(request.continue_final_message)
    add_prompt = not keep_open if request.add_generation_prompt is None else request.add_generation_prompt
    options: dict[str, Any] = {
        "add_generation_prompt": add_prompt,
        "continue_final_message": keep_open,
        "chat_template_kwargs": dict(request.chat_template_kwargs or {}),
    }
    if request.chat_template is not None:
        options["chat_template"] = request.chat_template
    if isinstance(request, ChatCompletionRequest) and request.documents:
        options["documents"] = request.documents
    messages: Sequence[Mapping[str, Any]] = plain_messages(request.messages or ())
    is_small = not (request.chat_template or request.chat_template_kwargs or options.get("documents"))
    size = sum(len(message["content"]) for message in messages) if is_small else LONG_TEXT_CHARS + 1
    try:
        text = await off_loop(size, lambda: str(llm.render_chat(messages, **options)))
    except ConfigError as error:
        if request.chat_template is None:
            raise
        raise RequestError(str(error), param="chat_template") from None
    ids = await tokenize(llm, text, add_special_tokens=bool(request.add_special_tokens))
    if not ids:
        raise RequestError("The messages render to an empty prompt.", param="messages")
    return Prompt(token_ids=ids, text=text)


class _Job:
    """One request on its way: what its chunks and choices are made from."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        params: SamplingParams,
        prompt: Prompt,
        llm: AsyncLLM | Any,
        response_id: str,
        model: str,
        role: str,
    ) -> None:
        self.request = request
        self.params = params
        self.prompt = prompt
        self.llm = llm
        self.response_id = response_id
        self.model = model
        self.role = role
        self.created = int(time.time())

    def _echoed(self) -> str:
        """With echo, the text of a last message that has the role of the answer."""
        last = self.request.messages[-1]
        if not self.request.echo or last.role != self.role:
            return ""
        return _content(last, len(self.request.messages) - 1)

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs or choice.logprobs is None:
            return None
        return chat_logprobs(
            choice.token_ids,
            choice.logprobs,
            self.request.top_logprobs or 0,
            as_ids=bool(self.request.return_tokens_as_token_ids),
        )

    async def answer(self, exchange: Exchange) -> None:
        counts = Counts()
        choices: list[ChatChoice] = []
        prompt_logprobs = None
        async with contextlib.aclosing(
            generate(self.llm, [self.prompt], self.params, self.request, self.response_id)
        ) as outputs:
            async for ready in outputs:
                counts.add(ready)
                for _, output in ready:
                    prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
                    choices += [self._choice(choice) for choice in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        response = ChatCompletionResponse(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=counts.usage(),
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self.prompt.token_ids if self.request.return_token_ids else None,
        )
        await exchange.answer(encode(response))

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role=self.role, content=self._echoed() + choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=list(choice.token_ids) if self.request.return_token_ids else None,
        )

    async def stream(self, exchange: Exchange, usages: Usages) -> None:
        frames = Frames(self.response_id, "chat.completion.chunk", self.created, self.model)
        counts = Counts()
        is_plain = not self.request.logprobs and not self.request.return_token_ids
        has_begun = False
        async with contextlib.aclosing(
            generate(self.llm, [self.prompt], self.params, self.request, self.response_id)
        ) as outputs:
            async for ready in outputs:
                counts.add(ready)
                usage = counts.usage() if usages.in_chunks else None
                events: list[bytes] = []
                if not has_begun:
                    has_begun = True
                    events += [frames.chunk(choice, usage) for choice in self._opening()]
                for _, output in ready:
                    for choice in output.outputs:
                        if is_plain and choice.finish_reason is None:
                            if choice.text:
                                events.append(frames.chunk(_plain(choice.index, choice.text), usage))
                            continue
                        if choice.finish_reason is not None or choice.text or choice.token_ids:
                            events.append(frames.chunk(self._delta(choice), usage))
                await exchange.write(b"".join(events))
        tail = frames.usage(counts.usage()) if usages.at_end else b""
        await exchange.finish(tail + DONE)

    def _opening(self) -> list[bytes]:
        """The role of every choice, then with echo the text that is continued."""
        more = {"prompt_token_ids": self.prompt.token_ids} if self.request.return_token_ids else {}
        opening = [
            encode(
                {
                    "index": index,
                    "delta": {"role": self.role, "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                    **more,
                }
            )
            for index in range(self.params.n)
        ]
        echoed = self._echoed()
        if echoed:
            opening += [_plain(index, echoed) for index in range(self.params.n)]
        return opening

    def _delta(self, choice: CompletionOutput) -> bytes:
        chunk: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": choice.text} if choice.text or choice.finish_reason is None else {},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            chunk["stop_reason"] = choice.stop_reason
        if self.request.return_token_ids:
            chunk["token_ids"] = list(choice.token_ids)
        return encode(chunk)


def _plain(index: int, text: str) -> bytes:
    return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, encode(text))
