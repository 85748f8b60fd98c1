"""Calls of DeepSeek V3, R1 and V3.1: between markers with full-width bars."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.call_parts import SPACE, Part, either, functions, guarded, json_arguments, many, sequence
from pelton_plugins.parsers.json_calls import JsonParser
from pelton_plugins.parsers.machine import Steps

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV31Parser(JsonParser):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>`."""

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return CALLS_OPEN, CALLS_CLOSE, CALL_OPEN, CALL_CLOSE, SEPARATOR

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        call = either([cls._written(name, json_arguments(name, tool)) for name, tool in functions(context)])
        more = [many(sequence(SPACE, CALL_OPEN, call))] if is_parallel else []
        calls = sequence(SPACE, CALL_OPEN, call, *more, SPACE, CALLS_CLOSE)
        triggers = [{"text": CALLS_OPEN, "content": calls}, {"text": CALL_OPEN, "content": call}]
        return guarded(triggers, is_parallel=is_parallel)

    @classmethod
    def _written(cls, name: str, arguments: Part) -> Part:
        """One call, behind its marker."""
        return sequence(f"{name}{SEPARATOR}", SPACE, arguments, SPACE, CALL_CLOSE)

    def script(self) -> Generator[None, None, None]:
        while (marker := (yield from self.until((CALLS_OPEN, CALLS_CLOSE, CALL_OPEN), self.content))) is not None:
            if marker != CALL_OPEN:
                self.trim()
                continue
            head, end = yield from self.gather((SEPARATOR, CALL_CLOSE))
            if end != SEPARATOR:
                self.content(CALL_OPEN + head + (end or ""))
                continue
            yield from self._call(head.strip())
            yield from self.until((CALL_CLOSE, CALLS_CLOSE))
        self.end_content()

    def _call(self, name: str) -> Steps[None]:
        self.call(name)
        yield from self.space()
        if (yield from self.peek(1)) == "{":
            yield from self.json_value(self.arguments, CALL_CLOSE)
        self.end_call()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The same with a type before the name, and the arguments in a fenced block:
    `function<｜tool▁sep｜>name` and, from the next line on, "```json", the arguments and "```"."""

    @classmethod
    def _written(cls, name: str, arguments: Part) -> Part:
        return sequence(f"function{SEPARATOR}{name}\n```json\n", arguments, "\n```", SPACE, CALL_CLOSE)

    def _call(self, name: str) -> Steps[None]:
        name, marker = yield from self.gather(("\n", "```", "{", CALL_CLOSE))
        self.call(name.strip())
        if marker in ("{", CALL_CLOSE):
            self.unread(marker)
        elif marker is not None:
            yield from self.space()
            if marker == "```" or (yield from self.takes("```")):
                yield from self.takes("json")
                yield from self.space()
        if (yield from self.peek(1)) == "{":
            yield from self.json_value(self.arguments, CALL_CLOSE)
        self.end_call()
