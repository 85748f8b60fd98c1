"""OpenAI's Harmony format, of gpt-oss: messages with a channel each, which may be addressed to a function."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, ClassVar

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.call_parts import SPACE, either, functions, is_held, json_arguments, maybe, sequence, text
from pelton_plugins.parsers.json_calls import JsonParser
from pelton_plugins.parsers.machine import Steps, tool_names

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyParser(JsonParser):
    """Channel `analysis` is reasoning, `final` and `commentary` are content, and what is addressed to `functions.NAME` is a call.

    It reads reasoning and calls alike, so that it is the parser of both.
    """

    reads_reasoning: ClassVar[bool] = True
    reasoning_end: ClassVar[Sequence[str]] = (f"{CHANNEL}final{MESSAGE}",)

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any]:
        channel = maybe(sequence(CHANNEL, either([text("commentary"), text("analysis")])))
        header = sequence(channel, maybe(sequence(" ", maybe(text(CONSTRAIN)), "json")), MESSAGE)
        calls = [
            sequence(f"functions.{name}", header, SPACE, json_arguments(name, tool))
            for name, tool in functions(context)
        ]
        begun = context.prompt.rpartition(f"{START}assistant")[2] if START in context.prompt else ""
        return {
            "type": "messages", "header_end": MESSAGE, "ends": [CALL, END, RETURN, START], "trigger": "to=",
            "content": either(calls), "repeats": is_parallel, "starts_inside": MESSAGE in begun,
            "shown": [START, CHANNEL, MESSAGE, CONSTRAIN],
        }  # fmt: skip

    def script(self) -> Generator[None, None, None]:
        begun = self.context.prompt.rpartition(f"{START}assistant")[2] if START in self.context.prompt else ""
        self.unread(begun)
        yield from self.space()
        is_first = True
        while (yield from self.more()):
            if is_first and not begun and (yield from self.peek(2)) != "<|":
                yield from self.rest(self.content)  # a model that does not write the format
                break
            is_first = False
            header, marker = yield from self.gather((MESSAGE, END, CALL, RETURN))
            if marker == MESSAGE:
                yield from self._message(header)
        self.end_content()

    def _message(self, header: str) -> Steps[None]:
        ends = (END, CALL, RETURN, START)
        found, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        recipient = "" if found is None else found[1]
        name = recipient.removeprefix("functions.")
        if recipient and recipient != "assistant" and (recipient != name or name in tool_names(self.context)):
            self.call(name)
            yield from self.space()
            if is_held(self.context) and (yield from self.peek(1)) == "{":  # a text in it may have markers
                yield from self.json_value(self.arguments)
                marker = yield from self.until(ends)
            else:
                marker = yield from self.until(ends, self.arguments)
            self.end_call()
        elif recipient not in ("", "assistant") or (channel is not None and channel[1] == "analysis"):
            marker = yield from self.until(ends, self.reasoning)
        else:
            marker = yield from self.until(ends, self.content)
        if marker == START:
            self.unread(START)
