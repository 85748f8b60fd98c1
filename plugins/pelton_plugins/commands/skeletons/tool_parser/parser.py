"""One answer, read as it comes. The base class is that of the built-in parsers: `script` is straight-line code that waits."""

from __future__ import annotations

from collections.abc import Collection, Generator

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.json_calls import JsonParser

OPEN, CLOSE = "<call>", "</call>"


class SkeletonParser(JsonParser):
    """Arguments are handed on while the model writes them."""

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return OPEN, CLOSE

    def script(self) -> Generator[None, None, None]:
        while (yield from self.until((OPEN,), self.content)) is not None:
            name, marker = yield from self.gather(("{", CLOSE))
            if marker is None:
                self.content(OPEN + name)
                break
            self.call(name.strip())
            if marker == "{":
                self.unread(marker)
                yield from self.json_value(self.arguments, CLOSE)
                yield from self.until((CLOSE,))
            self.end_call()
        self.end_content()
