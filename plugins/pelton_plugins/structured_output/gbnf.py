"""Grammars as llama.cpp writes them (GBNF: `root ::= "a" b*`) in Lark's form.

Lark's brackets, alternatives and repetitions are GBNF's, so that a rule's body is a list of Lark's tokens and of names of rules. A
rule that leads to no recursion becomes a terminal, which llguidance reads as one regular expression: between two terminals it
divides the text greedily, and `[ab]* "b"` in a rule of another kind would have no text.
"""

from __future__ import annotations

import json
import re

from pelton.errors import RequestError

ROOT, START = "root", "start"
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_COUNTS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {character: character for character in '\\"[]'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Reference(str):
    """Name of a rule among Lark's tokens."""


Parts = list[str]


def gbnf_to_lark(text: str) -> str:
    """Raises `RequestError` that names the line."""
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise _wrong(f"there is no rule {ROOT!r}, which is where a text begins")
    terminals = _without_recursion(rules)
    names = {name: f"{'R' if name in terminals else 'r'}_{index}" for index, name in enumerate(rules)}
    if ROOT not in terminals:
        names[ROOT] = START
    lines = [
        f"{names[name]}: {' '.join(names[part] if isinstance(part, _Reference) else part for part in parts)}"
        for name, parts in rules.items()
    ]
    return "\n".join([f"{START}: {names[ROOT]}", *lines] if ROOT in terminals else lines) + "\n"


def _without_recursion(rules: dict[str, Parts]) -> set[str]:
    """Names of the rules that lead to none of a circle of rules. Raises `RequestError` for a rule that is not defined."""
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    num_open = dict.fromkeys(rules, 0)  # references to rules that are not known to be without recursion
    for name, parts in rules.items():
        for part in parts:
            if isinstance(part, _Reference):
                if part not in rules:
                    raise _wrong(f"rule {name!r} refers to {part!r}, which is not defined")
                used_by[part].append(name)
                num_open[name] += 1
    found = [name for name in rules if not num_open[name]]
    for name in found:
        for user in used_by[name]:
            num_open[user] -= 1
            if not num_open[user]:
                found.append(user)
    return set(found)


def _wrong(what: str) -> RequestError:
    return RequestError(f"structured_outputs.grammar cannot be read as GBNF: {what}", param="structured_outputs")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> dict[str, Parts]:
        found: dict[str, Parts] = {}
        while self._skip(_SPACE_AND_LINES):
            name = self._match(_NAME)
            if not name:
                raise self._expected("the name of a rule")
            self._skip(_SPACE)
            if not self._takes("::="):
                raise self._expected("::=")
            if name in found:
                raise self._expected(f"another name: rule {name!r} is defined twice")
            self._skip(_SPACE_AND_LINES)
            found[name] = self._alternatives(is_nested=False)
        return found

    def _alternatives(self, *, is_nested: bool) -> Parts:
        parts = self._sequence(_SPACE_AND_LINES if is_nested else _SPACE)
        while True:
            end = self._at
            self._skip(_SPACE_AND_LINES)
            if not self._takes("|"):
                self._at = end
                return parts
            self._skip(_SPACE_AND_LINES)
            parts += ["|", *self._sequence(_SPACE_AND_LINES if is_nested else _SPACE)]

    def _sequence(self, space: re.Pattern[str]) -> Parts:
        """space: what may stand between the parts; at the top a line's end ends the rule."""
        parts: Parts = []
        while self._skip(space) and self._peek() not in "|)\r\n":
            item = self._item()
            self._skip(space)
            count = 0
            while (repeat := self._repetition()) is not None:
                item = [*(["(", *item, ")"] if count else item), repeat]
                count += 1
                self._skip(space)
            parts += item
        return parts or ['""']

    def _item(self) -> Parts:
        if name := self._match(_NAME):
            return [_Reference(name)]
        if self._takes('"'):
            characters = []
            while not self._takes('"'):
                characters.append(self._character('the "'))
            return [json.dumps("".join(characters), ensure_ascii=False)]
        if self._takes("["):
            return [self._class()]
        if self._takes("."):
            return [r"/[\x{0}-\x{10FFFF}]/"]
        if self._takes("("):
            parts = self._alternatives(is_nested=True)
            self._skip(_SPACE_AND_LINES)
            if not self._takes(")"):
                raise self._expected(")")
            return ["(", *parts, ")"]
        raise self._expected("a text, a class, a rule or a bracket")

    def _class(self) -> str:
        """Characters by their numbers: to a regular expression some of them mean something."""
        negation = "^" if self._takes("^") else ""
        ranges = ""
        while not self._takes("]"):
            first = last = self._character("the ]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character("the ]")
            if last < first:
                raise self._expected(f"a range that goes up, not {first!r} to {last!r},")
            ranges += rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}"
        if not ranges:
            raise self._expected("a character in the class")
        return f"/[{negation}{ranges}]/"

    def _character(self, end: str) -> str:
        """One that may be escaped. end: what the text lacks where it is over."""
        character = self._take(end)
        if character != "\\":
            return character
        kind = self._take(end)
        if kind in _ESCAPED:
            return _ESCAPED[kind]
        digits = self._match(re.compile(rf"[0-9a-fA-F]{{{_HEX_DIGITS[kind]}}}")) if kind in _HEX_DIGITS else ""
        if not digits or int(digits, 16) > 0x10FFFF or 0xD800 <= int(digits, 16) < 0xE000:
            raise self._expected(f"another escape than \\{kind}")
        return chr(int(digits, 16))

    def _repetition(self) -> str | None:
        if self._peek() in ("*", "+", "?"):
            return self._take("")
        if self._peek() != "{":
            return None
        found = _COUNTS.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            raise self._expected("a count such as {2}, {2,} or {2,5}")
        self._at = found.end()
        least, most = int(found[1] or 0), found[3] if found[2] else found[1]
        if most and int(most) < least:
            raise self._expected(f"a count that goes up, not {found[0]},")
        return f"{{{least},{most}}}"

    # Reading

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, end: str) -> str:
        if self._at == len(self._text):
            raise self._expected(end)
        self._at += 1
        return self._text[self._at - 1]

    def _takes(self, text: str) -> bool:
        is_next = self._text.startswith(text, self._at)
        self._at += len(text) if is_next else 0
        return is_next

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Read past what matches; False at the end of the text."""
        self._match(pattern)
        return self._at < len(self._text)

    def _expected(self, what: str) -> RequestError:
        line = self._text.count("\n", 0, self._at) + 1
        found = self._text[self._at : self._at + 20]
        return _wrong(f"line {line} needs {what} " + (f"before {found!r}" if found else "at its end"))
