"""Requests that pool, for asyncio programs: a part of `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from pelton.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from pelton.engine.output_queue import OnText, OutputQueue
from pelton.errors import DeadlineExceededError, RequestError, error_from_info
from pelton.lora.registry import AdapterRegistry
from pelton.lora.request import LoRARequest
from pelton.messages.request import PoolingParams
from pelton.outputs import PoolingOutput, PoolingRequestOutput
from pelton.pooling.io_processor import DATA, NO_PROCESSOR, IOProcessor, discarding, is_for_processor, parse, prompts_of
from pelton.sampling_params import SamplingParams

SENT_TOGETHER = 64  # prompts of one call, in one message to the engine
TOKENS_SENT_TOGETHER = 16_384  # of them
DEADLINE_GRACE_S = 1.0  # the engine keeps requests' time limits; after this long it does not answer


class AsyncPooling(ABC):
    """Prompts are tokenized and sent by the subclass; here they are grouped, awaited and put in order."""

    input_processor: InputProcessor
    io_processor: IOProcessor[Any, Any] | None
    adapters: AdapterRegistry

    async def encode(
        self,
        prompt: Prompt | Mapping[str, Any],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **arguments: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """The one output of a prompt that pools. Closing or cancelling the iteration aborts it. arguments: priority,
        cache_salt, timeout_s, truncate_prompt_tokens and lora_request, as `encode_all` has them. With an IO processor the prompt may be
        {"data": ...}, and `outputs` is what the processor made. Raises as `generate`."""
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        if is_for_processor(prompt):
            yield await self._encode_data(prompt[DATA], pooling_params, request_id, arguments)  # type: ignore[call-overload,index]
            return
        async with contextlib.aclosing(self._encode_each([prompt], [pooling_params], request_id, arguments)) as found:
            async for _, output in found:
                yield output

    async def encode_all(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams | None] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Outputs of many prompts, in their order; the first that fails ends all. pooling_params: one for all, or one each.
        lora_request: the adapter of all."""
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            pooling_params = [pooling_params] * len(prompts)
        arguments = {
            "priority": priority, "cache_salt": cache_salt, "timeout_s": timeout_s,
            "truncate_prompt_tokens": truncate_prompt_tokens, "lora_request": lora_request,
        }  # fmt: skip
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        async with contextlib.aclosing(self._encode_each(prompts, pooling_params, request_id, arguments)) as found:
            return [output async for _, output in found]

    async def _encode_each(
        self,
        prompts: Sequence[Any],
        pooling_params: Sequence[PoolingParams | None],
        request_id: str,
        arguments: Mapping[str, Any],
    ) -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
        """Yield (index, output) of each prompt, in order. All are computed together; closing the iteration aborts the rest."""
        arguments = dict(arguments)
        timeout_s, lora_request = arguments.get("timeout_s"), arguments.pop("lora_request", None)
        arguments["adapter"] = None if lora_request is None else self.adapters.ref(lora_request)
        deadline = deadline_of(timeout_s)
        waiting: dict[str, OutputQueue] = {}
        unsent: list[tuple[ProcessedRequest, float]] = []
        num_tokens = 0
        try:
            for index, (prompt, params) in enumerate(zip(prompts, pooling_params, strict=True)):
                own_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
                arrival = time.monotonic()
                process = self.input_processor.process_pooling
                processed = await self._processed_prompt(process, prompt, params, own_id, **arguments)
                unsent.append((processed, arrival))
                num_tokens += len(processed.prompt_token_ids)
                if len(unsent) == SENT_TOGETHER or num_tokens >= TOKENS_SENT_TOGETHER or index == len(prompts) - 1:
                    waiting |= self._send(unsent)
                    unsent, num_tokens = [], 0
            for index, own_id in enumerate(list(waiting)):
                queue = waiting[own_id]
                output = await (queue.get() if deadline is None else get_until(deadline, queue, timeout_s))
                del waiting[own_id]
                if output.error is not None:
                    raise error_from_info(output.error)
                yield index, output
        finally:
            for own_id in waiting:
                self._abort(own_id)

    async def _encode_data(
        self, data: Any, params: PoolingParams | None, request_id: str, arguments: Mapping[str, Any]
    ) -> PoolingRequestOutput[Any]:
        processor = self.io_processor
        if processor is None:
            raise RequestError(NO_PROCESSOR, param=DATA)
        parsed = parse(processor, data)
        merged = processor.merge_pooling_params(params)
        with discarding(processor, request_id):
            prompts = prompts_of(processor, await processor.pre_process_async(parsed, request_id))
            return await self._processed(processor, prompts, merged, request_id, arguments)

    async def _processed(
        self,
        processor: IOProcessor[Any, Any],
        prompts: Sequence[Prompt],
        params: PoolingParams,
        request_id: str,
        arguments: Mapping[str, Any],
    ) -> PoolingRequestOutput[Any]:
        ids: list[int] = []

        async def each() -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]], None]:
            found = self._encode_each(prompts, [params] * len(prompts), request_id, arguments)
            async with contextlib.aclosing(found):
                async for index, output in found:
                    ids.extend(output.prompt_token_ids)
                    yield index, output

        async with contextlib.aclosing(each()) as outputs:
            made = await processor.post_process_async(outputs, request_id)
        return PoolingRequestOutput(request_id, made, ids, True)

    @abstractmethod
    async def _processed_prompt(
        self,
        process: Callable[..., ProcessedRequest],
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        request_id: str,
        **arguments: Any,
    ) -> ProcessedRequest:
        """Check and tokenize a prompt. process: of the input processor; arguments: further ones of it."""

    @abstractmethod
    def _send(
        self, unsent: Sequence[tuple[ProcessedRequest, float]], on_text: OnText | None = None
    ) -> dict[str, OutputQueue]:
        """Send requests and when they came, in one message; their queues by id."""

    @abstractmethod
    def _abort(self, request_id: str) -> None:
        """End a request; one that is finished is not an error."""


def deadline_of(timeout_s: float | None) -> float | None:
    """Return when, on the event loop's clock, a request with this time limit is given up."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s + DEADLINE_GRACE_S


async def get_until(deadline: float, queue: OutputQueue, timeout_s: float | None) -> Any:
    """Wait for the next output. Raises `DeadlineExceededError` at the deadline of `deadline_of`."""
    try:
        async with asyncio.timeout_at(deadline):
            return await queue.get()
    except TimeoutError:
        raise DeadlineExceededError(
            f"The request's time limit of {timeout_s} s passed, and the engine is not responding."
        ) from None
