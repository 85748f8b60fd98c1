"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.errors import RequestError
from pelton.outputs import CompletionOutput, RequestOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.exchange import DONE, Exchange
from pelton_plugins.server.generation import (
    Counts,
    Frames,
    Prompt,
    Usages,
    check_fan_out,
    check_length,
    generate,
    max_model_len,
    tokenize,
    truncate,
)
from pelton_plugins.server.logprobs import completion_logprobs, prompt_logprobs_json
from pelton_plugins.server.params import check_completion, sampling_params
from pelton_plugins.server.protocol import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

encode = msgspec.json.encode

DEFAULT_MAX_TOKENS = 16  # fewer where the context ends before


async def create_completion(exchange: Exchange, request: CompletionRequest) -> None:
    state = exchange.state
    llm = state.engine()
    state.check_model(request.model)
    check_completion(request)
    params = _params(request, llm.model.generation_config)
    prompts = await read_prompts(llm, request, params)
    response_id = f"cmpl-{request.request_id or exchange.request_id}"
    job = _Job(request, params, prompts, llm, response_id, request.model or state.model_name)
    if request.stream:
        await job.stream(exchange, Usages(request, force=state.config.enable_force_include_usage))
    else:
        await job.answer(exchange)


def _params(request: CompletionRequest, model_defaults: dict[str, Any]) -> SamplingParams:
    only_prompt = request.max_tokens == 0  # echo: the engine samples one token, which is dropped
    return sampling_params(
        request,
        model_defaults,
        max_tokens=1 if only_prompt else DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


async def read_prompts(llm: AsyncLLM | Any, request: CompletionRequest, params: SamplingParams) -> list[Prompt]:
    """Text, texts, token ids or lists of token ids. Raises `RequestError` before anything runs."""
    given = request.prompt
    if given is None or given == []:
        raise RequestError("prompt is empty; send text or token ids.", param="prompt")
    items: list[Any]
    if isinstance(given, str) or all(isinstance(item, int) for item in given):
        items = [given]
    elif all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        items = given
    else:
        raise RequestError("prompt mixes texts, token ids and lists; send one kind.", param="prompt")
    check_fan_out(len(items), params.n)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    prompts: list[Prompt] = []
    item: Any
    for item in items:
        if isinstance(item, str):
            prompt = Prompt(token_ids=await tokenize(llm, item, add_special_tokens=special), text=item)
        else:
            prompt = Prompt(token_ids=item)
        if not prompt.token_ids:
            raise RequestError("prompt is empty; send text or token ids.", param="prompt")
        prompt = truncate(request, prompt, max_model_len(llm), params.max_tokens)
        check_length(llm, prompt, request.max_tokens)
        prompts.append(prompt)
    return prompts


class _Job:
    """One request on its way: what its chunks and choices are made from."""

    def __init__(
        self,
        request: CompletionRequest,
        params: SamplingParams,
        prompts: list[Prompt],
        llm: AsyncLLM | Any,
        response_id: str,
        model: str,
    ) -> None:
        self.request = request
        self.params = params
        self.prompts = prompts
        self.llm = llm
        self.response_id = response_id
        self.model = model
        self.created = int(time.time())
        self.only_prompt = request.max_tokens == 0
        self.as_ids = bool(request.return_tokens_as_token_ids)
        self._text_offsets: dict[int, int] = {}

    # Whole

    async def answer(self, exchange: Exchange) -> None:
        counts = Counts()
        choices: list[CompletionChoice] = []
        async with contextlib.aclosing(
            generate(self.llm, self.prompts, self.params, self.request, self.response_id)
        ) as outputs:
            async for ready in outputs:
                self._drop_sample(ready)
                counts.add(ready)
                for index, output in ready:
                    choices += [self._choice(index, output, choice) for choice in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        response = CompletionResponse(
            id=self.response_id, created=self.created, model=self.model, choices=choices, usage=counts.usage()
        )
        await exchange.answer(encode(response))

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        text = choice.text
        if self.request.echo:
            text = self._prompt_text(index) + text
        return CompletionChoice(
            index=index * self.params.n + choice.index,
            text=text,
            logprobs=self._logprobs(index, output, choice, is_first=True),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=list(choice.token_ids) if self.request.return_token_ids else None,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs)
            if self.request.prompt_logprobs is not None
            else None,
            prompt_token_ids=output.prompt_token_ids if self.request.return_token_ids else None,
        )

    def _drop_sample(self, ready: list[tuple[int, RequestOutput]]) -> None:
        """With max_tokens 0 only the prompt goes out."""
        if self.only_prompt:
            for _, output in ready:
                for choice in output.outputs:
                    choice.text, choice.token_ids, choice.logprobs = "", [], [] if choice.logprobs is not None else None

    def _prompt_text(self, index: int) -> str:
        prompt = self.prompts[index]
        if prompt.text is None:
            prompt.text = str(self.llm.tokenizer.decode(prompt.token_ids)) if self.llm.tokenizer else ""
        return prompt.text

    def _logprobs(
        self, index: int, output: RequestOutput, choice: CompletionOutput, *, is_first: bool
    ) -> CompletionLogprobs | None:
        num_top = self.request.logprobs
        if num_top is None or choice.logprobs is None:
            return None
        ids, rows = list(choice.token_ids), list(choice.logprobs)
        first = ""
        if self.request.echo and is_first and output.prompt_logprobs is not None:
            ids = [*output.prompt_token_ids, *ids]
            rows = [*output.prompt_logprobs, *rows]  # type: ignore[list-item]
            first = str(self.llm.tokenizer.decode(ids[:1])) if self.llm.tokenizer else ""
        position = index * self.params.n + choice.index
        offset = self._text_offsets.get(position)
        if offset is None:
            offset = len(self._prompt_text(index)) if self.request.echo and not first else 0
        found, self._text_offsets[position] = completion_logprobs(
            ids, rows, num_top, text_offset=offset, decode_first=first, as_ids=self.as_ids
        )
        return found

    # Streamed

    async def stream(self, exchange: Exchange, usages: Usages) -> None:
        frames = Frames(self.response_id, "text_completion", self.created, self.model)
        counts = Counts()
        is_plain = self.request.logprobs is None and not self.request.return_token_ids
        is_first = [True] * (len(self.prompts) * self.params.n)
        async with contextlib.aclosing(
            generate(self.llm, self.prompts, self.params, self.request, self.response_id)
        ) as outputs:
            async for ready in outputs:
                self._drop_sample(ready)
                counts.add(ready)
                usage = counts.usage() if usages.in_chunks else None
                events: list[bytes] = []
                for index, output in ready:
                    for choice in output.outputs:
                        position = index * self.params.n + choice.index
                        first, is_first[position] = is_first[position], False
                        if is_plain and choice.finish_reason is None and not (first and self.request.echo):
                            if choice.text:
                                events.append(frames.chunk(_plain(position, choice.text), usage))
                            continue
                        events.append(frames.chunk(self._delta(index, output, choice, first), usage))
                if events:
                    await exchange.write(b"".join(events))
        tail = frames.usage(counts.usage()) if usages.at_end else b""
        await exchange.write(b"")  # headers, in case that no chunk was due
        await exchange.finish(tail + DONE)

    def _delta(self, index: int, output: RequestOutput, choice: CompletionOutput, is_first: bool) -> bytes:
        text = choice.text
        if is_first and self.request.echo:
            text = self._prompt_text(index) + text
        chunk: dict[str, Any] = {
            "index": index * self.params.n + choice.index,
            "text": text,
            "logprobs": self._logprobs(index, output, choice, is_first=is_first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = output.prompt_token_ids if is_first else None
            chunk["token_ids"] = list(choice.token_ids)
        return encode(chunk)


def _plain(index: int, text: str) -> bytes:
    return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (index, encode(text))
