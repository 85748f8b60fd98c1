"""One completion request from its prompts to its answer, whole or as a stream of events."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from pelton.engine.output_queue import OnText
from pelton.sampling_params import SamplingParams
from pelton_plugins.server.beam_search import beams
from pelton_plugins.server.exchange import DONE, Exchange
from pelton_plugins.server.generation import Counts, Ready, generate
from pelton_plugins.server.prompts import Prompt
from pelton_plugins.server.protocol import ChatChoice, CompletionChoice, GenerateRequest, RequestTimes, Usage

if TYPE_CHECKING:
    from pelton.sdk.async_llm import AsyncLLM

Request = TypeVar("Request", bound=GenerateRequest)
Choice = TypeVar("Choice", CompletionChoice, ChatChoice)


@dataclass(eq=False)
class CompletionAnswer(ABC, Generic[Request, Choice]):
    """Subclasses give what the engine puts out the shape of their endpoint."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    exchange: Exchange
    llm: AsyncLLM | Any
    request: Request
    params: SamplingParams
    prompts: Sequence[Prompt]
    counts: Counts = field(init=False, default_factory=Counts)
    _on_text: OnText | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.exchange.counts = self.counts
        self.response_id = f"{self.id_prefix}-{self.request.request_id or self.exchange.request_id}"
        self.model = self.request.model or self.exchange.state.model_name
        self.created = int(time.time())

    async def run(self) -> None:
        self.exchange.mark("prepared")
        await (self._stream() if self.request.stream else self._answer())

    async def _answer(self) -> None:
        choices: list[Choice] = []
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for ready in outputs:
                self.counts.add(ready)
                choices += self.choices(ready)
        choices.sort(key=lambda choice: choice.index)
        await self.exchange.answer(msgspec.json.encode(self.response(choices, self.counts.usage())))

    async def _stream(self) -> None:
        usages = Usages(self.request, force=self.exchange.state.config.enable_force_include_usage)
        frames = Frames(self.response_id, self.chunk_object, self.created, self.model)
        around = self.around_text() if self.exchange.can_write_now and not usages.in_chunks else None
        if around is not None and len(self.prompts) == self.params.n == 1:
            self._on_text = self._text_writer(*frames.around_text(*around))
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for ready in outputs:
                self.counts.add(ready)
                usage = self.counts.usage() if usages.in_chunks else None
                choices = self.deltas(ready)
                if choices:
                    await self.exchange.write(frames.chunks(choices, usage))
        times = self.counts.times if self.request.return_metrics else None
        tail = frames.usage(self.counts.usage(), times) if usages.at_end or times is not None else b""
        await self.exchange.write(b"")  # headers, in case that no chunk was due
        await self.exchange.finish(tail + DONE)

    def outputs(self) -> AsyncGenerator[Ready, None]:
        """As they come; closing it aborts what still runs."""
        adapter = self.exchange.lora_request
        if self.request.use_beam_search:
            return beams(
                self.llm,
                self.prompts,
                self.params,
                self.request,
                self.response_id,
                adapter,
                tenant=self.exchange.tenant,
            )
        return generate(
            self.llm, self.prompts, self.params, self.request, self.response_id, adapter,
            on_text=self._on_text, tenant=self.exchange.tenant,
        )  # fmt: skip

    def around_text(self) -> tuple[bytes, bytes] | None:
        """JSON before and after the text of a choice in a stream, where text is all that `deltas` tells of an output before the
        last; None where there may be more, or where text is looked at before it goes out."""
        return None

    def _text_writer(self, head: bytes, tail: bytes) -> OnText:
        write, counts, encode = self.exchange.write_now, self.counts, msgspec.json.encode

        def on_text(text: str, num_tokens: int) -> bool:
            if not write(head + encode(text) + tail):
                return False
            counts.completion_tokens += num_tokens
            return True

        return on_text

    @abstractmethod
    def choices(self, ready: Ready) -> list[Choice]:
        """Return the choices of finished outputs."""

    @abstractmethod
    def response(self, choices: list[Choice], usage: Usage) -> msgspec.Struct:
        """The whole answer; choices in the order of their index."""

    @abstractmethod
    def deltas(self, ready: Ready) -> list[bytes]:
        """Return what a stream reports of these outputs: a choice as JSON for each of its chunks."""


class Usages:
    """Kinds of usage that a stream reports: nothing, totals at the end, or also running totals in every chunk."""

    def __init__(self, request: GenerateRequest, *, force: bool) -> None:
        options = request.stream_options
        self.at_end = force or bool(options and options.include_usage)
        self.in_chunks = force or (self.at_end and bool(options and options.continuous_usage_stats))


class Frames:
    """Chunks of one stream as bytes: what all share is encoded once."""

    def __init__(self, response_id: str, kind: str, created: int, model: str) -> None:
        shared = msgspec.json.encode({"id": response_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + shared[:-1] + b',"choices":['

    def chunks(self, choices: list[bytes], usage: Usage | None = None) -> bytes:
        """A chunk for each choice, one at least."""
        tail = b"]}\n\n" if usage is None else b'],"usage":' + msgspec.json.encode(_without_details(usage)) + b"}\n\n"
        return self._head + (tail + self._head).join(choices) + tail

    def around_text(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Bytes around the text of a chunk of one choice; before and after: of the choice."""
        return self._head + before, after + b"]}\n\n"

    def usage(self, usage: Usage, times: RequestTimes | None = None) -> bytes:
        """The last chunk: no choices, the totals, and no null fields."""
        totals = msgspec.to_builtins(usage)
        tail = msgspec.json.encode({key: value for key, value in totals.items() if value is not None})
        if times is not None:
            tail += b',"metrics":' + msgspec.json.encode(times)
        return self._head + b'],"usage":' + tail + b"}\n\n"


def _without_details(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens": usage.completion_tokens,
    }
