r"""Lark grammars of texts that stand within something else: in JSON between quotation marks, or between tags.

In JSON, what a terminal matches is rewritten character by character: a quotation mark becomes `\"`, a line break `\n`, and so on, each in
the shortest form that JSON has. The lexer takes the longest match, and does not go back over the backslash of an escape that another
terminal begins with: where several have escapes in them, the rules become terminals too, so that all is one regex in the end. So it is
between tags, where the text must not have the tag in it that ends it. That needs rules without recursion.
"""

from __future__ import annotations

import graphlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache

from pelton.errors import RequestError

_PART = re.compile(
    r"""
      (?P<range> "(?:[^"\\\n]|\\.)*" \s*\.\.\s* "(?:[^"\\\n]|\\.)*" )
    | (?P<string> "(?:[^"\\\n]|\\.)*"i? )
    | (?P<regex> /(?!/)(?:[^/\\\n]|\\.)+/[imsuxl]* )
    | (?P<comment> (?://|\#)[^\n]* )
    | (?P<import> %import [^\n]* )
    | (?P<alias> ->\s*\w+ )
    | (?P<mark> [?!](?=[a-z_]\w*\s*[.:]) | (?<=[a-z_0-9])\.-?\d+(?=\s*:) )
    | (?P<option> %llguidance\b[^\n]* )
    | (?P<ignore> %ignore\b )
    | (?P<rule> \b_*[a-z]\w*\b )
    | (?P<refused> %json\b | %regex\b | %lark\b | <[^>\n]*> | [~&] | (?<=\w)\[[^\]\n]*\](?=\s*:) | ["/] )
    """,
    re.VERBOSE | re.DOTALL,
)
_MAX_CHARS = 32_768
_IMPORTED = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*(?://.*)?$|%import\s+common\s*\(([\w\s,]+)\)\s*$")
COMMON = {
    "DIGIT": '"0".."9"', "HEXDIGIT": "/[0-9a-fA-F]/", "INT": "/[0-9]+/", "SIGNED_INT": "/[+-]?[0-9]+/",
    "DECIMAL": r"/[0-9]+\.[0-9]*|\.[0-9]+/", "FLOAT": r"/[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "NUMBER": r"/[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/",
    "SIGNED_NUMBER": r"/[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/', "LCASE_LETTER": "/[a-z]/", "UCASE_LETTER": "/[A-Z]/", "LETTER": "/[A-Za-z]/",
    "WORD": "/[A-Za-z]+/", "CNAME": "/[A-Za-z_][A-Za-z0-9_]*/", "WS_INLINE": r"/[ \t]+/", "WS": r"/[ \t\f\r\n]+/",
    "CR": r"/\r/", "LF": r"/\n/", "NEWLINE": r"/(\r?\n)+/",
}  # fmt: skip
"""Terminals of Lark's `common`, by name."""
_ATOM = re.compile(
    r"""
      (?P<group> \(\?: | \(\?P?<\w+> | \((?!\?) | [)|] | [*+?] | \{\d+(?:,\d*)?\} | \{,\d+\} )
    | (?P<anchor> \( | [\^$] | \\[bBAzZ] )
    | (?P<atom> \\[pP](?:\{[^}]*\}|.) | \\x\{[0-9a-fA-F]+\} | \\x[0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\u\{[0-9a-fA-F]+\} | \\. | \. )
    | (?P<class> \[\^?\]?(?:[^\]\\]|\\.)*\] )
    | (?P<plain> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_WRITTEN_APART = ['"', "\\", *map(chr, range(32))]
_PLAIN = r"[^\x22\x5c\x00-\x1f]"


def in_json(lark: str, name: str) -> str:
    """Raises `RequestError` that begins with `name` for what cannot be rewritten."""
    if len(lark) > _MAX_CHARS:
        raise _cannot(name, f"its {len(lark)} characters, of which there may be {_MAX_CHARS}")
    writer = _Writer(name)
    made = writer.write(lark)
    if len(writer.escaping) < 2:
        return made
    made = _inlined(lark, _Writer(name, inlines=True), "beside several terminals of characters that JSON escapes")
    return f"start: {START}\n{made}"


def in_terminals(lark: str, name: str) -> str:
    """Return the definitions of terminals of which `START` matches the grammar's texts. Raises as `in_json`."""
    if len(lark) > _MAX_CHARS:
        raise _cannot(name, f"its {len(lark)} characters, of which there may be {_MAX_CHARS}")
    return _inlined(lark, _Writer(name, inlines=True, is_json=False), "between tags")


def _inlined(lark: str, writer: _Writer, where: str) -> str:
    made = writer.write(lark)
    if (rule := _recursive(made)) is not None:
        raise _cannot(writer.name, f"the rule {rule}, which has itself in it, {where}")
    return made


_INLINED = "INLINED_"
START = f"{_INLINED}START"
_DEFINED = re.compile(rf"^\s*({_INLINED}\w+)\s*:", re.MULTILINE)


def _recursive(lark: str) -> str | None:
    """A rule that refers to itself, in a grammar whose rules are terminals."""
    parts = _DEFINED.split(_PART.sub(lambda found: "" if found.lastgroup in ("string", "regex") else found[0], lark))
    uses = {
        rule: set(re.findall(rf"\b{_INLINED}\w+", body)) for rule, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        return str(error.args[1][0]).removeprefix(_INLINED).lower()
    return None


class _Writer:
    """inlines: rules become terminals. is_json: texts get the escapes of JSON."""

    def __init__(self, name: str, *, inlines: bool = False, is_json: bool = True) -> None:
        self.name = name
        self.escaping: set[str] = set()
        """Terminals with escapes in them."""
        self._inlines, self._is_json = inlines, is_json

    def write(self, lark: str) -> str:
        return _PART.sub(self._part, lark)

    def _part(self, found: re.Match[str]) -> str:
        kind, text = found.lastgroup, found.group()
        if kind == "range":
            text = _range(text)
            kind = "regex"
        if kind in ("string", "regex"):
            made = text if not self._is_json else self._in_json(text, is_regex=kind == "regex")
            if made != text:
                self.escaping.add(text)
            return made
        if kind == "import":
            return "\n".join(self.write(one) for one in _imported(text, self.name))
        if kind == "refused" or (kind == "ignore" and self._inlines):
            raise _cannot(self.name, text)
        if kind == "rule" and self._inlines:
            return _INLINED + text.upper()
        return "" if kind in ("alias", "mark", "comment", "option") else text

    def _in_json(self, text: str, *, is_regex: bool) -> str:
        if not is_regex:
            return _string(text, self.name)
        body, _, flags = text[1:].rpartition("/")
        return f"/{_regex(body, flags, self.name)}/{flags}"


def _cannot(name: str, what: str) -> RequestError:
    return RequestError(
        f"{name} cannot be held within a call because of {what[:100]!r}; name the tool in tool_choice, or write it without", param="tools"
    )  # fmt: skip


def _string(text: str, name: str) -> str:
    body, _, flags = text[1:].rpartition('"')
    try:
        read: str = json.loads(f'"{body}"')
    except ValueError:
        raise _cannot(name, text) from None
    made = _escaped(read)
    if flags and made != read:  # the letter of an escape has one case
        raise _cannot(name, text)
    return json.dumps(made, ensure_ascii=False) + flags


def _escaped(text: str) -> str:
    """As JSON writes it, without the quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _range(text: str) -> str:
    """`"a".."z"` as a regex."""
    first, last = (re.escape(json.loads(one)) for one in re.split(r"(?<=\")\s*\.\.\s*(?=\")", text, maxsplit=1))
    return f"/[{first}-{last}]/"


def _imported(text: str, name: str) -> Iterator[str]:
    found = _IMPORTED.match(text.strip())
    if found is None:
        raise _cannot(name, text)
    several = [one.strip() for one in (found[3] or "").split(",") if one.strip()]
    for terminal in several or [found[1]]:
        if terminal not in COMMON:
            raise _cannot(name, text)
        yield f"{found[2] or terminal}: {COMMON[terminal]}"


def _regex(body: str, flags: str, name: str) -> str:
    parts: list[str] = []
    for found in _ATOM.finditer(body):
        kind, text = found.lastgroup, found.group()
        if kind == "anchor" or "x" in flags:
            raise _cannot(name, text if kind == "anchor" else f"flag x of {body}")
        try:
            parts.append(text if kind == "group" else _atom(text, flags))
        except (re.error, ValueError):
            raise _cannot(name, text) from None
    return "".join(parts)


@lru_cache(maxsize=1024)
def _atom(text: str, flags: str) -> str:
    """One that matches a character, of any that JSON escapes too. Raises `ValueError` where that cannot be told."""
    apart = _escaped_characters(text, takes_all="s" in flags)
    if not apart:
        return text
    written = "|".join(re.escape(_escaped(char)) for char in apart)
    written = f"(?-i:{written})" if "i" in flags else f"(?:{written})"
    if text[0] not in ".[" and text[1:2] not in _OF_MANY:
        return written
    inner = text if text != "." else r"[\s\S]" if "s" in flags else r"[^\n]"
    return f"(?:[{inner}&&{_PLAIN}]|{written})"


_OF_MANY = tuple("dDwWsS")
"""Letters of the escapes that match several characters."""


def _escaped_characters(text: str, *, takes_all: bool) -> list[str]:
    """The characters that match and that JSON escapes."""
    if len(text) == 1 and text != ".":
        return [text] if text in _WRITTEN_APART else []
    if re.match(r"\\p\{?[LMN]", text):
        return []
    if re.search(r"\\[pP]|&&|--|~~|.\[", text):
        raise ValueError(text)
    read = re.sub(r"\\[xu]\{([0-9a-fA-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", text)
    pattern = re.compile(read, re.DOTALL if takes_all else 0)
    return [char for char in _WRITTEN_APART if pattern.fullmatch(char)]
