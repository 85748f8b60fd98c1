"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.outputs import CompletionOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.beam_search import beam_request
from pelton_plugins.server.chat_reading import ChatReading, read_chat
from pelton_plugins.server.completion_answer import CompletionAnswer
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Ready
from pelton_plugins.server.logprobs import TokenWriter, chat_logprobs, prompt_logprobs_json
from pelton_plugins.server.params import check_chat, sampling_params
from pelton_plugins.server.prompts import Prompt, check_fan_out, check_length, content_text, render, truncate
from pelton_plugins.server.protocol import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Usage,
)

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRun:
    """A chat that is checked and rendered."""

    llm: Any
    request: ChatCompletionRequest
    params: SamplingParams
    prompt: Prompt
    reading: ChatReading | None
    """None: the answers are content, and nothing else."""


async def prepare_chat(exchange: Exchange, request: ChatCompletionRequest) -> ChatRun:
    """Raises `RequestError` for whatever is wrong with the request, before anything runs."""
    state = exchange.state
    llm = state.generating_engine()
    exchange.lora_request = await state.adapter_of(request.model)
    offer = check_chat(request, trust_template=state.config.trust_request_chat_template)
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    params = sampling_params(
        beam_request(request),
        llm.model.generation_config,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    check_fan_out(1, params.n)
    rendered = await render(llm, request, offer.tools, with_specials=state.config.special_tokens_in_messages)
    prompt = truncate(llm, request, rendered, max_tokens)
    check_length(llm, prompt, max_tokens)
    assert state.parsers is not None
    reading, params = read_chat(state.parsers, llm, request, offer, params, rendered.text)
    return ChatRun(llm=llm, request=request, params=params, prompt=prompt, reading=reading)


async def create_chat_completion(exchange: Exchange, request: ChatCompletionRequest) -> None:
    from pelton_plugins.server.chat_parsed import ParsedChatAnswer

    run = await prepare_chat(exchange, request)
    parts = (exchange, run.llm, request, run.params, [run.prompt])
    await (ChatAnswer(*parts) if run.reading is None else ParsedChatAnswer(*parts, run.reading)).run()


@dataclass(eq=False)
class ChatAnswer(CompletionAnswer[ChatCompletionRequest, ChatChoice]):
    """One prompt."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    _prompt_logprobs: list[dict[str, Any] | None] | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._role = self.exchange.state.config.response_role
        self._prompt_token_ids = self.prompts[0].token_ids if self.request.return_token_ids else None
        self._is_plain = not self.request.logprobs and not self.request.return_token_ids
        self._writer = TokenWriter.of(
            self.llm.tokenizer, self.params, as_ids=bool(self.request.return_tokens_as_token_ids)
        )

    def _echoed(self) -> str:
        """With echo, the text of a last message that has the role of the answer."""
        last = self.request.messages[-1]
        if not self.request.echo or last.role != self._role:
            return ""
        return content_text(last, len(self.request.messages) - 1)

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self.request.logprobs or choice.logprobs is None:
            return None
        return chat_logprobs(choice.token_ids, choice.logprobs, self.request.top_logprobs or 0, self._writer)

    # Whole

    def choices(self, ready: Ready) -> list[ChatChoice]:
        for _, output in ready:
            self._prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
        return [self._choice(choice) for _, output in ready for choice in output.outputs]

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role=self._role, content=self._echoed() + choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=list(choice.token_ids) if self.request.return_token_ids else None,
        )

    def response(self, choices: list[ChatChoice], usage: Usage) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt_token_ids,
            prompt_text=self.prompts[0].text if self.request.return_prompt_text else None,
            kv_transfer_params=self.counts.kv_transfer_params,
            metrics=self.counts.times if self.request.return_metrics else None,
        )

    # Streamed

    def around_text(self) -> tuple[bytes, bytes] | None:
        return PLAIN if self._is_plain else None

    def deltas(self, ready: Ready) -> list[bytes]:
        found = [] if self._has_begun else self._opening()
        self._has_begun = True
        for _, output in ready:
            for choice in output.outputs:
                if self._is_plain and choice.finish_reason is None:
                    if choice.text:
                        found.append(_plain(choice.index, choice.text))
                elif choice.finish_reason is not None or choice.text or choice.token_ids:
                    found.append(self._delta(choice))
        return found

    def _opening(self) -> list[bytes]:
        """The role of every choice, then with echo the text that is continued."""
        more: dict[str, Any] = {"prompt_token_ids": self._prompt_token_ids} if self.request.return_token_ids else {}
        if self.request.return_prompt_text:
            more["prompt_text"] = self.prompts[0].text
        begun = {"delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None, **more}
        opening = [encode({"index": index, **begun}) for index in range(self.params.n)]
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


PLAIN = b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
"""Around the text of the first choice."""


def _plain(index: int, text: str) -> bytes:
    return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, encode(text))
