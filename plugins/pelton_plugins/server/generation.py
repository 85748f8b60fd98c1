"""Running the prompts of one HTTP request on the engine, and counting what they used."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton import limits
from pelton.engine.output_queue import OnText
from pelton.errors import EngineError
from pelton.lora.request import LoRARequest
from pelton.outputs import RequestMetrics, RequestOutput
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.prompts import Prompt
from pelton_plugins.server.protocol import GenerateRequest, PromptTokensDetails, RequestTimes, Usage

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

Ready = list[tuple[int, RequestOutput]]
"""Outputs that are ready together, each with the index of its prompt."""


async def generate(
    llm: AsyncLLM | Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    request: GenerateRequest,
    response_id: str,
    lora_request: LoRARequest | None = None,
    on_text: OnText | None = None,
    tenant: str = "",
) -> AsyncGenerator[Ready, None]:
    """Outputs of all prompts as they come, those that are ready together in one list. Closing it aborts what still runs.

    on_text: of one prompt with one sample, see `AsyncLLM.generate`.
    """
    more: dict[str, Any] = {} if lora_request is None else {"lora_request": lora_request}
    if tenant:
        more["tenant"] = tenant
    if on_text is not None:
        more["on_text"] = on_text
    unique = uuid.uuid4().hex[:12]  # a client may send one X-Request-Id twice
    readable = response_id[: limits.MAX_REQUEST_ID_CHARS - 40]
    streams: list[AsyncIterator[RequestOutput]] = [
        llm.generate(
            {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text}
            if prompt.embeds is None
            else {"prompt_embeds": prompt.embeds},
            params,
            f"{readable}-{index}-{unique}",
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
            kv_transfer_params=request.kv_transfer_params,
            **more,
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
    kv_transfer_params: dict[str, Any] | None = None
    """Of the first prompt that a KV connector says something of."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """Of the prompts that have ended."""
    reasoning_tokens: int | None = None
    _seen: set[int] = field(default_factory=set)

    def add(self, ready: Ready) -> None:
        for index, output in ready:
            if index not in self._seen:
                self._seen.add(index)
                self.prompt_tokens += len(output.prompt_token_ids)
                self.cached_tokens += output.num_cached_tokens or 0
            if output.finished and output.metrics is not None:
                self.metrics.append(output.metrics)
            if self.kv_transfer_params is None:
                self.kv_transfer_params = output.kv_transfer_params
            for choice in output.outputs:
                self.completion_tokens += len(choice.token_ids)

    @property
    def times(self) -> RequestTimes | None:
        """The longest of each time, and all preemptions; None while no prompt has ended."""
        if not self.metrics:
            return None
        times = RequestTimes(num_preemptions=sum(one.num_preemptions for one in self.metrics))
        for name in RequestTimes.__struct_fields__:
            if name.endswith("_s"):
                known = [value for one in self.metrics if (value := getattr(one, name)) is not None]
                setattr(times, name, max(known, default=None))
        return times

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=None
            if self.reasoning_tokens is None
            else {"reasoning_tokens": self.reasoning_tokens},
        )
