"""Matches of a regular expression that a text has only begun.

Python's `re` finds whole matches only. This walks the expression's own syntax tree with the set of places that a match can have
reached; an expression that refers to what it captured, or looks around, counts as one that may go on.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_KINDS = {c.MAX_REPEAT, c.MIN_REPEAT, getattr(c, "POSSESSIVE_REPEAT", None)}


def first_partial(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The first place from `start` on where a match may begin that needs more text; `len(text)` where there is none."""
    tree, beginnings = _tree(pattern)
    for place in range(start, len(text)):
        if beginnings.may_begin(text[place]):
            walk = _Walk(text, pattern)
            walk.sequence(tree, {place})
            if walk.needs_more:
                return place
    return len(text)


@lru_cache(maxsize=64)
def _tree(pattern: re.Pattern[str]) -> tuple[Any, _Beginnings]:
    tree = _parser.parse(pattern.pattern, pattern.flags)
    return tree, _Beginnings(pattern, tree)


class _Beginnings:
    """Characters that a match may begin with."""

    def __init__(self, pattern: re.Pattern[str], tree: Any) -> None:
        self._pattern, self._tree = pattern, tree
        self._known: dict[str, bool] = {}

    def may_begin(self, character: str) -> bool:
        found = self._known.get(character)
        if found is None:
            walk = _Walk(character, self._pattern)
            ends = walk.sequence(self._tree, {0})
            # What gets past this character, or stands for none at all.
            found = self._known[character] = walk.needs_more or bool(ends)
        return found


class _Walk:
    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        self.needs_more = False
        self._text = text
        self._ignores_case = bool(pattern.flags & re.IGNORECASE)
        self._dot_is_all = bool(pattern.flags & re.DOTALL)

    def sequence(self, nodes: Any, places: set[int]) -> set[int]:
        for node in nodes:
            if not places:
                break
            places = self._node(node, places)
        return places

    def _node(self, node: Any, places: set[int]) -> set[int]:
        op, argument = node
        if op in _KINDS:
            return self._repeat(argument, places)
        if op is c.SUBPATTERN:
            return self.sequence(argument[-1], places)
        if op is c.BRANCH:
            return set().union(*(self.sequence(branch, places) for branch in argument[1]))
        if op is c.AT:
            return self._at(argument, places)
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN):
            return self._character(node, places)
        self.needs_more = True
        return set()

    def _character(self, node: Any, places: set[int]) -> set[int]:
        found = set()
        for place in places:
            if place >= len(self._text):
                self.needs_more = True
            elif self._fits(node, self._text[place]):
                found.add(place + 1)
        return found

    def _repeat(self, argument: Any, places: set[int]) -> set[int]:
        least, most, body = argument
        found = set(places) if least == 0 else set()
        seen, current, count = set(places), places, 0
        while current and (most is c.MAXREPEAT or count < most):
            current = self.sequence(body, current)
            count += 1
            if count >= least:
                found |= current
                current = current - seen
            seen |= current
        return found

    def _at(self, kind: Any, places: set[int]) -> set[int]:
        if kind in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return {place for place in places if place == 0}
        if any(place >= len(self._text) for place in places):
            self.needs_more = True  # an end, or a border of a word, that is seen with the next character
        return places

    def _fits(self, node: Any, character: str) -> bool:
        op, argument = node
        if op is c.ANY:
            return self._dot_is_all or character != "\n"
        if op is c.IN:
            return self._is_in(argument, character)
        same = self._same(argument, character)
        return same if op is c.LITERAL else not same

    def _same(self, code: int, character: str) -> bool:
        return chr(code) == character or (self._ignores_case and chr(code).lower() == character.lower())

    def _is_in(self, items: Any, character: str) -> bool:
        negated, found = False, False
        for op, argument in items:
            if op is c.NEGATE:
                negated = True
            elif op is c.LITERAL:
                found = found or self._same(argument, character)
            elif op is c.RANGE:
                cases = {character, character.lower(), character.upper()} if self._ignores_case else {character}
                found = found or any(argument[0] <= ord(one) <= argument[1] for one in cases if len(one) == 1)
            elif op is c.CATEGORY:
                found = found or re.fullmatch(_CATEGORIES[argument], character) is not None
        return found != negated


_CATEGORIES = {
    c.CATEGORY_SPACE: r"\s", c.CATEGORY_NOT_SPACE: r"\S", c.CATEGORY_WORD: r"\w", c.CATEGORY_NOT_WORD: r"\W",
    c.CATEGORY_DIGIT: r"\d", c.CATEGORY_NOT_DIGIT: r"\D",
}  # fmt: skip
