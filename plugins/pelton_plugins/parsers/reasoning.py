"""Reasoning before the answer: between tags, or between the sentences that Granite writes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import ClassVar

from pelton.parsing.interface import ParserContext
from pelton_plugins.parsers.machine import ScriptParser, Steps


class _ReasoningScript(ScriptParser):
    """White space around the reasoning belongs to neither part."""

    def read_reasoning(self, end: str) -> Steps[None]:
        """Read up to `end` and over it."""
        self._has_thought, self._pause = False, ""
        yield from self.until((end,), self._think)
        self.trim()

    def _think(self, text: str) -> None:
        if not self._has_thought:
            text = text.lstrip()
        text = self._pause + text
        kept = text.rstrip()
        self._pause = text[len(kept) :]
        if kept:
            self._has_thought = True
            self.reasoning(kept)


class ThinkParser(_ReasoningScript):
    """`<think>...</think>` at the beginning of the answer, or in the prompt, which may also have closed it already."""

    OPEN, CLOSE = "<think>", "</think>"
    begins_thinking: ClassVar[bool] = False
    """The model thinks first although nothing says so."""
    reasoning_end: ClassVar[Sequence[str]] = (CLOSE,)
    reasoning_begin: ClassVar[Sequence[str]] = (OPEN,)

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return cls.OPEN, cls.CLOSE

    def script(self) -> Generator[None, None, None]:
        prompt = self.context.prompt.rstrip()
        if prompt.endswith(self.OPEN):
            yield from self.space()
            yield from self.takes(self.OPEN)  # some models write it again
            yield from self.read_reasoning(self.CLOSE)
        elif not prompt.endswith(self.CLOSE):
            space = yield from self.space()
            if (yield from self.takes(self.OPEN)) or self.begins_thinking:
                yield from self.read_reasoning(self.CLOSE)
            else:
                self.content(space)
        yield from self.rest(self.content)
        self.end_content()


class DeepSeekR1Parser(ThinkParser):
    """The same, of models that think first even where neither they nor their template write `<think>`."""

    begins_thinking = True
    reasoning_begin = ()


class MistralReasoningParser(ThinkParser):
    """`[THINK]...[/THINK]`, of Magistral."""

    OPEN, CLOSE = "[THINK]", "[/THINK]"
    reasoning_end = (CLOSE,)
    reasoning_begin = (OPEN,)


class GraniteReasoningParser(_ReasoningScript):
    """ "Here is my thought process: ... Here is my response: ...", of Granite 3.2."""

    OPENINGS = ("Here is my thought process:", "Here's my thought process:")
    CLOSINGS = ("Here is my response:", "Here's my response:")
    reasoning_end: ClassVar[Sequence[str]] = CLOSINGS
    reasoning_begin: ClassVar[Sequence[str]] = OPENINGS

    @classmethod
    def markers(cls, context: ParserContext) -> Collection[str]:
        return ()

    def script(self) -> Generator[None, None, None]:
        space = yield from self.space()
        for opening in self.OPENINGS:
            if (yield from self.takes(opening)):
                self._has_thought, self._pause = False, ""
                yield from self.until(self.CLOSINGS, self._think)
                self.trim()
                break
        else:
            self.content(space)
        yield from self.rest(self.content)
        self.end_content()
