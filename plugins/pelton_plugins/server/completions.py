"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.beam_search import beam_request
from pelton_plugins.server.completion_answer import CompletionAnswer
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Ready
from pelton_plugins.server.logprobs import (
    TextOffsets,
    TokenWriter,
    completion_logprobs,
    prompt_logprobs_json,
    prompt_offsets,
)
from pelton_plugins.server.params import check_completion, sampling_params
from pelton_plugins.server.prompts import Prompt, read_prompts
from pelton_plugins.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)

encode = msgspec.json.encode

DEFAULT_MAX_TOKENS = 16  # fewer where the context ends before


async def create_completion(exchange: Exchange, request: CompletionRequest) -> None:
    llm, params, prompts = await prepare_completion(exchange, request)
    await _TextAnswer(exchange, llm, request, params, prompts).run()


async def prepare_completion(
    exchange: Exchange, request: CompletionRequest
) -> tuple[Any, SamplingParams, list[Prompt]]:
    """The engine, and what it is to do. Raises `RequestError` for whatever is wrong with the request, before anything runs."""
    state = exchange.state
    llm = state.generating_engine()
    exchange.lora_request = await state.adapter_of(request.model)
    check_completion(request)
    params = _params(request, llm.model.generation_config)
    return llm, params, await read_prompts(llm, request, params)


def _params(request: CompletionRequest, model_defaults: dict[str, Any]) -> SamplingParams:
    only_prompt = request.max_tokens == 0  # echo: the engine samples one token, which is dropped
    chooses = _chooses(request)
    return sampling_params(
        msgspec.structs.replace(request, n=request.best_of) if chooses else beam_request(request),
        model_defaults,
        max_tokens=1 if only_prompt else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=0 if chooses and request.logprobs is None else request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def _chooses(request: CompletionRequest) -> bool:
    """More samples are made than are returned."""
    return request.best_of is not None and request.best_of > (request.n or 1)


@dataclass(eq=False)
class _TextAnswer(CompletionAnswer[CompletionRequest, CompletionChoice]):
    """Choices are numbered through all prompts: n of the first, n of the second, and so on."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"

    _begun: set[int] = field(init=False, default_factory=set)  # choices that the stream has told of
    _prompt_rows: dict[int, PromptLogprobs] = field(init=False, default_factory=dict)  # by prompt
    _text_offsets: dict[int, TextOffsets] = field(init=False, default_factory=dict)  # by choice

    def __post_init__(self) -> None:
        super().__post_init__()
        self._n = self.request.n or 1
        self._is_plain = self.request.logprobs is None and not self.request.return_token_ids
        self._writer = TokenWriter.of(
            self.llm.tokenizer, self.params, as_ids=bool(self.request.return_tokens_as_token_ids)
        )

    def outputs(self) -> AsyncGenerator[Ready, None]:
        outputs = super().outputs()
        if _chooses(self.request):
            return self._best(outputs)
        return _without_samples(outputs) if self.request.max_tokens == 0 else outputs

    async def _best(self, outputs: AsyncGenerator[Ready, None]) -> AsyncGenerator[Ready, None]:
        """The n likeliest a token of best_of, the likeliest first; all of them are counted."""
        async with contextlib.aclosing(outputs):
            async for ready in outputs:
                for _, output in ready:
                    ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)
                    self.counts.completion_tokens += sum(len(choice.token_ids) for choice in ranked[self._n :])
                    output.outputs = ranked[: self._n]
                    for place, choice in enumerate(output.outputs):
                        choice.index = place
                yield ready

    def _prompt_text(self, index: int) -> str:
        prompt = self.prompts[index]
        if prompt.text is None:
            prompt.text = str(self.llm.tokenizer.decode(prompt.token_ids)) if self.llm.tokenizer else ""
        return prompt.text

    def _prompt_ids(self, index: int, output: RequestOutput) -> list[int] | None:
        """None of embeddings: nobody knows their tokens."""
        return output.prompt_token_ids if self.prompts[index].embeds is None else None

    def _logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput, *, is_first: bool
    ) -> CompletionLogprobs | None:
        num_top = self.request.logprobs
        if num_top is None or choice.logprobs is None:
            return None  # best_of asks the engine for them too
        writer = self._writer
        position = index * self._n + choice.index
        offsets = self._text_offsets.get(position)
        if offsets is None:
            start = len(self._prompt_text(index)) if self.request.echo else 0
            offsets = TextOffsets(writer, output.prompt_token_ids, self.params, start)
            self._text_offsets[position] = offsets
        ids, rows = choice.token_ids, choice.logprobs
        text_offsets = offsets.take(ids, rows)
        if output.prompt_logprobs is not None:
            self._prompt_rows[index] = output.prompt_logprobs  # told once; each choice repeats them
        prompt_rows = self._prompt_rows.get(index)
        if not (self.request.echo and is_first and prompt_rows is not None):
            return completion_logprobs(ids, rows, text_offsets, num_top, writer)
        prompt_ids = output.prompt_token_ids
        first = ""
        if self.llm.tokenizer:
            first = str(self.llm.tokenizer.decode(prompt_ids[:1], skip_special_tokens=False))
        texts = [
            first if row is None else row[token_id].decoded_token or ""
            for token_id, row in zip(prompt_ids, prompt_rows, strict=True)
        ]
        return completion_logprobs(
            [*prompt_ids, *ids],
            [*prompt_rows, *rows],
            [*prompt_offsets(writer, texts, prompt_ids, self._prompt_text(index)), *text_offsets],
            num_top,
            writer,
            first_text=first,
        )

    # Whole

    def choices(self, ready: Ready) -> list[CompletionChoice]:
        return [self._choice(index, output, choice) for index, output in ready for choice in output.outputs]

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        text = choice.text
        if self.request.echo:
            text = self._prompt_text(index) + text
        return CompletionChoice(
            index=index * self._n + choice.index,
            text=text,
            logprobs=self._logprobs(index, output, choice, is_first=True),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=list(choice.token_ids) if self.request.return_token_ids else None,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs)
            if self.request.prompt_logprobs is not None
            else None,
            prompt_token_ids=self._prompt_ids(index, output) if self.request.return_token_ids else None,
        )

    def response(self, choices: list[CompletionChoice], usage: Usage) -> CompletionResponse:
        return CompletionResponse(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            kv_transfer_params=self.counts.kv_transfer_params,
            metrics=self.counts.times if self.request.return_metrics else None,
        )

    # Streamed

    def around_text(self) -> tuple[bytes, bytes] | None:
        return PLAIN if self._is_plain and self.request.max_tokens != 0 else None

    def deltas(self, ready: Ready) -> list[bytes]:
        found = []
        for index, output in ready:
            for choice in output.outputs:
                position = index * self._n + choice.index
                is_first = position not in self._begun
                if is_first:
                    self._begun.add(position)
                if not self._is_plain or choice.finish_reason is not None or (is_first and self.request.echo):
                    found.append(self._delta(index, output, choice, is_first))
                elif choice.text:
                    found.append(_plain(position, choice.text))
        return found

    def _delta(self, index: int, output: RequestOutput, choice: CompletionOutput, is_first: bool) -> bytes:
        text = choice.text
        if is_first and self.request.echo:
            text = self._prompt_text(index) + text
        chunk: dict[str, Any] = {
            "index": index * self._n + choice.index,
            "text": text,
            "logprobs": self._logprobs(index, output, choice, is_first=is_first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids(index, output) if is_first else None
            chunk["token_ids"] = list(choice.token_ids)
        return encode(chunk)


PLAIN = b'{"index":0,"text":', b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
"""Around the text of the first choice."""


def _plain(index: int, text: str) -> bytes:
    return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (index, encode(text))


def _mean_logprob(choice: CompletionOutput) -> float:
    return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)


async def _without_samples(outputs: AsyncGenerator[Ready, None]) -> AsyncGenerator[Ready, None]:
    """With max_tokens 0 only the prompt goes out."""
    async with contextlib.aclosing(outputs):
        async for ready in outputs:
            for _, output in ready:
                for choice in output.outputs:
                    choice.text, choice.token_ids, choice.logprobs = "", [], [] if choice.logprobs is not None else None
            yield ready
