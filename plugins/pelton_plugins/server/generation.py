"""Running the prompts of one HTTP request on the engine, and counting what they used."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pelton import limits
from pelton.errors import EngineError, RequestError
from pelton.outputs import RequestOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.protocol import GenerateRequest, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

LONG_TEXT_CHARS = 20_000  # tokenizing more than this would hold up the event loop for milliseconds

T = TypeVar("T")

Ready = list[tuple[int, RequestOutput]]
"""Outputs that are ready together, each with the index of its prompt."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here when `size` (characters or tokens) is small, else on a thread."""
    return work() if size <= LONG_TEXT_CHARS else await asyncio.to_thread(work)


async def tokenize(llm: AsyncLLM | Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Off the event loop where the text is long."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise RequestError("The server runs without a tokenizer; send token ids.", param="prompt")
    return await off_loop(len(text), lambda: list(tokenizer.encode(text, add_special_tokens=add_special_tokens)))


def truncate(request: GenerateRequest, prompt: Prompt, max_model_len: int, max_tokens: int | None) -> Prompt:
    """Apply truncate_prompt_tokens; -1 leaves room for max_tokens."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max(max_model_len - max(max_tokens or 1, 1), 1)
    if len(prompt.token_ids) <= most:
        return prompt
    ids = prompt.token_ids[:most] if request.truncation_side == "right" else prompt.token_ids[-most:]
    return Prompt(token_ids=ids)


def max_model_len(llm: AsyncLLM | Any) -> int:
    """Of the running engine, which may have shrunk the model's own to what fits."""
    return int(min(llm.model.max_model_len, llm.info.max_model_len))


def check_length(llm: AsyncLLM | Any, prompt: Prompt, max_tokens: int | None) -> None:
    """A client that asks for more than the context holds hears so, instead of getting less."""
    most, found = max_model_len(llm), len(prompt.token_ids)
    if found + (max_tokens or 1) > most:
        wanted = f" and max_tokens asks for {max_tokens} more" if max_tokens else ", and the output needs at least one"
        raise RequestError(
            f"This model's maximum context length is {most} tokens. However, your prompt contains {found} tokens"
            f"{wanted}. Shorten the prompt or lower max_tokens.",
            param="input_tokens" if prompt.text is None else "input_text",
        )


def check_fan_out(num_prompts: int, n: int) -> None:
    if num_prompts > limits.MAX_PROMPTS_PER_REQUEST:
        raise RequestError(
            f"prompt has {num_prompts} prompts; at most {limits.MAX_PROMPTS_PER_REQUEST} in one request", param="prompt"
        )
    if num_prompts * n > limits.MAX_TOTAL_SEQUENCES_PER_REQUEST:
        raise RequestError(
            f"{num_prompts} prompts x n {n} are {num_prompts * n} sequences; at most "
            f"{limits.MAX_TOTAL_SEQUENCES_PER_REQUEST} in one request",
            param="n",
        )


async def generate(
    llm: AsyncLLM | Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: GenerateRequest,
    response_id: str,
) -> AsyncGenerator[Ready, None]:
    """Outputs of all prompts as they come, those that are ready together in one list. Closing it aborts what still runs."""
    unique = uuid.uuid4().hex[:12]  # a client may send one X-Request-Id twice
    readable = response_id[: limits.MAX_REQUEST_ID_CHARS - 40]
    streams: list[AsyncIterator[RequestOutput]] = [
        llm.generate(
            {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text},
            params,
            f"{readable}-{index}-{unique}",
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
        )
        for index, prompt in enumerate(prompts)
    ]
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:  # type: ignore[type-var]
            async for output in stream:
                yield [(0, _checked(output))]
        return
    async with contextlib.aclosing(_merged(streams)) as merged:
        async for ready in merged:
            yield ready


async def _merged(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncGenerator[Ready, None]:
    ready: Ready = []
    news = asyncio.Event()
    error: BaseException | None = None
    num_open = len(streams)

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        nonlocal error, num_open
        try:
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    ready.append((index, _checked(output)))
                    news.set()
        except Exception as found:
            error = error or found
        finally:
            num_open -= 1
            news.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        while num_open or ready:
            if not ready and error is None:
                news.clear()
                await news.wait()
            if error is not None:
                raise error
            if ready:
                batch, ready[:] = list(ready), []
                yield batch
        if error is not None:
            raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(output: RequestOutput) -> RequestOutput:
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise EngineError("The engine ended the request with an error.")
    return output


@dataclass(slots=True)
class Counts:
    """Tokens of one HTTP request. A prompt counts once, however many samples it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, ready: Ready) -> None:
        for index, output in ready:
            if index not in self._seen:
                self._seen.add(index)
                self.prompt_tokens += len(output.prompt_token_ids)
                self.cached_tokens += output.num_cached_tokens or 0
            for choice in output.outputs:
                self.completion_tokens += len(choice.token_ids)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


class Usages:
    """What a stream says about usage: nothing, totals at the end, or also running totals in every chunk."""

    def __init__(self, request: GenerateRequest, *, force: bool) -> None:
        options = request.stream_options
        self.at_end = force or bool(options and options.include_usage)
        self.in_chunks = force or (self.at_end and bool(options and options.continuous_usage_stats))


class Frames:
    """Chunks of one stream as bytes: what all share is encoded once."""

    def __init__(self, response_id: str, kind: str, created: int, model: str) -> None:
        shared = msgspec.json.encode({"id": response_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + shared[:-1] + b',"choices":['

    def chunk(self, choice: bytes, usage: Usage | None = None) -> bytes:
        if usage is None:
            return self._head + choice + b"]}\n\n"
        return self._head + choice + b'],"usage":' + msgspec.json.encode(_without_details(usage)) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the totals, and no null fields."""
        totals = msgspec.to_builtins(usage)
        return (
            self._head
            + b'],"usage":'
            + msgspec.json.encode({key: value for key, value in totals.items() if value is not None})
            + b"}\n\n"
        )


def _without_details(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
    }
