"""A parser as straight-line code that waits for text: a generator, which yields whenever it needs more than has come.

The same code runs over an answer that comes at once and over one that comes token by token, so the two cannot differ. Positions
are never kept over a `yield`: what was read is thrown away when more comes.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from pelton.parsing.interface import Arguments, Content, Event, OutputParser, ParserContext, Reasoning, ToolCall

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Code that waits: called with `yield from`, it gives a T."""
Emit = Callable[[str], None]

SPACE = " \t\r\n"
_NOTHING: Any = object()


class ScriptParser(OutputParser):
    """Subclasses write `script`, from the answer's first character to its end."""

    def __init__(self, context: ParserContext) -> None:
        self.context = context
        self._text = ""
        self._at = 0
        self._is_whole = False
        self._events: list[Event] = []
        self._space = ""  # behind what was written last: dropped where a call follows
        self._trims = False  # space before the next text is dropped
        self._has_arguments = True  # of the call that was begun last
        self._has_called = False
        self._script: Generator[None, None, None] | None = self.script()

    @abstractmethod
    def script(self) -> Generator[None, None, None]:
        """Read the whole answer with the methods below."""

    def feed(self, text: str) -> Sequence[Event]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go_on()

    def finish(self) -> Sequence[Event]:
        self._is_whole = True
        found = self._go_on()
        assert self._script is None, "a script waits for text after the end"
        return found

    def _go_on(self) -> list[Event]:
        if self._script is not None:
            try:
                next(self._script)
            except StopIteration:
                self._script = None
        found, self._events = self._events, []
        return found

    # Writing

    def content(self, text: str) -> None:
        """Write content. Space at its end is kept back: a call may follow."""
        if self._trims:
            text = text.lstrip()
            if not text or (self._is_whole and self._has_called and self._is_cut_marker(text)):
                return
            self._trims = False
        if self._space:
            text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._events.append(Content(kept))

    def _is_cut_marker(self, text: str) -> bool:
        """The answer ends in the middle of a marker, with nothing else behind its last call."""
        found = self.markers(self.context) or ()
        return any(len(text) < len(marker) and marker.startswith(text) for marker in found)

    def end_content(self) -> None:
        """The answer is over: the space at its end belongs to it."""
        if self._space:
            self._events.append(Content(self._space))
            self._space = ""

    def reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def trim(self) -> None:
        """Drop the space around here: reasoning ended, or a call."""
        self._space, self._trims = "", True

    def call(self, name: str, call_id: str | None = None) -> None:
        self.trim()
        self._has_arguments, self._has_called = False, True
        self._events.append(ToolCall(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._events.append(Arguments(text))

    def end_call(self) -> None:
        """A call without arguments has an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    # Reading

    def more(self) -> Steps[bool]:
        """Wait until there is a character to read; False at the end."""
        while self._at == len(self._text):
            if self._is_whole:
                return False
            yield
        return True

    def peek(self, count: int) -> Steps[str]:
        """Return the next `count` characters without reading them; fewer at the end."""
        while len(self._text) - self._at < count and not self._is_whole:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Read characters that were peeked at."""
        found = self._text[self._at : self._at + count]
        self._at += count
        return found

    def unread(self, text: str) -> None:
        """Let `text`, which was read last, be read again."""
        self._text, self._at = text + self._text[self._at :], 0

    def takes(self, text: str) -> Steps[bool]:
        """Read `text` if it comes next."""
        for count in range(1, len(text) + 1):
            if (yield from self.peek(count)) != text[:count]:
                return False
        self._at += len(text)
        return True

    def space(self) -> Steps[str]:
        """Read white space."""
        found = ""
        while (yield from self.more()) and self._text[self._at] in SPACE:
            found += self.take(1)
        return found

    def until(self, markers: tuple[str, ...], emit: Emit | None = None) -> Steps[str | None]:
        """Read up to one of `markers` and over it; which it was, or None at the end. What stands before goes to `emit` as it comes."""
        pattern, firsts, longest = _search_of(markers)
        while True:
            text, at = self._text, self._at
            # Most pieces of a stream hold no character that a marker begins with.
            found = pattern.search(text, at) if _has_any(text, at, firsts) else _NOTHING
            if found is _NOTHING:
                if emit is not None and len(text) > at:
                    emit(text[at:])
                self._at = len(text)
                if self._is_whole:
                    return None
            elif found is not None:
                is_open = found.end() == len(text) and not self._is_whole and _grows(markers, found[0])
                if emit is not None and found.start() > at:
                    emit(text[at : found.start()])
                self._at = found.start() if is_open else found.end()
                if not is_open:
                    return found[0]
            else:
                end = len(text) if self._is_whole else _held_from(text, at, markers, firsts, longest)
                if end > at:
                    if emit is not None:
                        emit(text[at:end])
                    self._at = end
                if self._is_whole:
                    return None
            yield

    def gather(self, markers: tuple[str, ...]) -> Steps[tuple[str, str | None]]:
        """Return the text before one of `markers`, and which it was."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def rest(self, emit: Emit) -> Steps[None]:
        """Hand everything to the end to `emit`."""
        while (yield from self.more()):
            emit(self.take(len(self._text) - self._at))


@lru_cache(maxsize=256)
def _search_of(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    ordered = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))), frozenset(m[0] for m in markers), len(ordered[0])


def _grows(markers: tuple[str, ...], found: str) -> bool:
    return any(len(marker) > len(found) and marker.startswith(found) for marker in markers)


def _held_from(text: str, at: int, markers: tuple[str, ...], firsts: frozenset[str], longest: int) -> int:
    """Where the part of `text` begins that may be the start of a marker."""
    for place in range(max(at, len(text) - longest + 1), len(text)):
        if text[place] in firsts:
            tail = text[place:]
            if any(marker.startswith(tail) for marker in markers):
                return place
    return len(text)


def tool_names(context: ParserContext) -> frozenset[str]:
    return frozenset(name for tool in context.tools if isinstance(name := tool.get("name"), str))


def parameters_of(context: ParserContext, name: str) -> dict[str, Any]:
    """Return the JSON schema of a function's parameters; empty where nothing is known of it."""
    for tool in context.tools:
        if tool.get("name") == name and isinstance(tool.get("parameters"), dict):
            found: dict[str, Any] = tool["parameters"]
            return found
    return {}


def _has_any(text: str, at: int, firsts: frozenset[str]) -> bool:
    for first in firsts:  # noqa: SIM110  (a generator takes longer than the look-up)
        if text.find(first, at) >= 0:
            return True
    return False
