"""One answer of a chat as a series of parts, for APIs that are not OpenAI's chat completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pelton.outputs import CompletionOutput
from pelton.parsing.interface import Event
from pelton_plugins.server.chat import ChatRun
from pelton_plugins.server.chat_reading import ChatReading
from pelton_plugins.server.exchange import Exchange
from pelton_plugins.server.generation import Counts, generate


@dataclass(frozen=True, slots=True)
class Step:
    """Something new of the answer."""

    events: list[Event]
    output: CompletionOutput
    finish_reason: str | None
    """ "tool_calls" too."""


async def chat_steps(exchange: Exchange, run: ChatRun, counts: Counts, response_id: str) -> AsyncGenerator[Step, None]:
    """Steps of the one choice; `counts` adds up. Closing it aborts what still runs."""
    exchange.counts = counts
    exchange.mark("prepared")
    reader = (run.reading or ChatReading()).choice()
    adapter, tenant = exchange.lora_request, exchange.tenant
    found = generate(run.llm, [run.prompt], run.params, run.request, response_id, adapter, tenant=tenant)
    async with contextlib.aclosing(found) as outputs:
        async for ready in outputs:
            counts.add(ready)
            for _, output in ready:
                for choice in output.outputs:
                    events = reader.take(choice)
                    if choice.finish_reason is not None and reader.reasoning and run.llm.tokenizer is not None:
                        ids = run.llm.tokenizer.encode(reader.reasoning, add_special_tokens=False)
                        counts.reasoning_tokens = len(ids)
                    yield Step(events, choice, reader.finish_reason(choice))
