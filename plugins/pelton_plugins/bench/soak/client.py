"""A client that sends one request of a soak, reads its answer or leaves, and notes when chunks came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pelton.errors import EngineError
from pelton_plugins.bench.http_target import HttpTarget
from pelton_plugins.bench.soak.requests import Request, wrong_answer

ERRORS = (EngineError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError)


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class Answer:
    """Outcome of one request."""

    error: str | None = None
    has_left: bool = False
    num_tokens: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks of a stream of one choice that brought tokens."""


class SoakClient(HttpTarget):
    """One server, any request."""

    async def send(self, request: Request) -> Answer:
        answer = Answer()
        body = msgspec.json.encode(request.body)
        try:
            if request.is_stream:
                await self._stream(request, body, answer)
            else:
                leaving = (
                    contextlib.nullcontext() if request.leaves_after is None else asyncio.timeout(request.leaves_after)
                )
                async with leaving:
                    await self._whole(request, body, answer)
        except TimeoutError:
            if request.leaves_after is None or request.is_stream:
                answer.error = "The connection timed out."
            answer.has_left = answer.error is None
        except ERRORS as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _whole(self, request: Request, body: bytes, answer: Answer) -> None:
        async with self._connection("POST", request.path, body) as lines:
            found = msgspec.json.decode(b"".join([line async for line in lines]))
        answer.error = wrong_answer(request, found)
        answer.num_tokens = found.get("usage", {}).get("completion_tokens", 0)

    async def _stream(self, request: Request, body: bytes, answer: Answer) -> None:
        began = last = time.perf_counter()
        finished: set[int] = set()
        num_chunks, is_done = 0, False
        async with self._connection("POST", request.path, body) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_done = True
                    break
                chunk = msgspec.json.decode(data, type=_Chunk)
                if chunk.error is not None:
                    raise EngineError(str(chunk.error))
                finished |= {choice.index for choice in chunk.choices if choice.finish_reason in ("stop", "length")}
                made = chunk.usage.completion_tokens if chunk.usage is not None else 0
                if made > answer.num_tokens:
                    answer.num_tokens, now = made, time.perf_counter()
                    if answer.ttft_s is None:
                        answer.ttft_s = now - began
                    elif request.num_choices == 1:
                        answer.gaps_s.append(now - last)
                    last = now
                num_chunks += 1
                if request.leaves_after is not None and num_chunks >= request.leaves_after:
                    answer.has_left = True
                    return
        if not is_done or len(finished) != request.num_choices:
            answer.error = f"the stream ended after {len(finished)} of {request.num_choices} choices"
        elif not 1 <= answer.num_tokens <= request.max_tokens * request.num_choices:
            answer.error = (
                f"{answer.num_tokens} tokens; at most {request.max_tokens * request.num_choices} were asked for"
            )
