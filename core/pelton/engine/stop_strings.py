"""Find stop strings in text that arrives in pieces.

Text that might be the start of a stop string is held back, so that what was given out never has to be
taken back. What is found does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """`push` text until `matched` is set; `flush` when the output ends for another reason."""

    __slots__ = ("_firsts", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be given out now. Sets `matched`, with the text cut there, at the first occurrence."""
        text = self._held + text
        self._held = ""
        if not any(first in text for first in self._firsts):
            return text
        found = min(((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            end, start, self.matched = found
            return text[: end if self._include else start]
        at = self._possible_start(text)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """Return what was held back: nothing follows that could make it a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the earliest suffix that a stop string starts with begins; len(text) when there is none."""
        longest = max(map(len, self._stops))
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if text[at] in self._firsts:
                tail = text[at:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return at
        return len(text)
