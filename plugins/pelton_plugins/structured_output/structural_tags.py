"""Structural tags: free text in which a tag's begin starts a part that a schema, a regex or a grammar constrains.

Both of vLLM's forms are read: `structures` with `triggers`, and a `format` that is put together from parts. The result is a
grammar of llguidance in Lark's form. Special tokens in a literal stand for themselves, not for their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pelton.errors import RequestError
from pelton_plugins.structured_output.guarded_text import guarded, messages, quoted_regex, raw_text, without_marks
from pelton_plugins.structured_output.lark_text import START, in_json, in_terminals
from pelton_plugins.structured_output.vocabulary import Vocabulary

_MAX_PARTS, _MAX_DEPTH = 2000, 64
_TEXT = r"/(?s:.*)/"
_LONG_CHARS = 80
_SPACE = r"/[ \t\r\n]{0,8}/"


def structural_tag_grammar(
    tag: Any, vocabulary: Vocabulary, schema_of: Callable[[Any], dict[str, Any]], lark_of: Callable[[str], str]
) -> str:
    """schema_of checks a JSON schema, lark_of a grammar. Raises `RequestError` naming the part that is wrong."""
    if not isinstance(tag, Mapping):
        raise _bad("", f"is a {type(tag).__name__}; give an object with a format, or with structures and triggers")
    return Builder(vocabulary, schema_of, lark_of).build(tag)


class Builder:
    def __init__(
        self, vocabulary: Vocabulary, schema_of: Callable[[Any], dict[str, Any]], lark_of: Callable[[str], str]
    ) -> None:
        self.vocabulary = vocabulary
        self.special = vocabulary.special_texts
        self.special_ids = frozenset(vocabulary.special_token_ids)
        texts = sorted(filter(None, self.special), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._schema_of = schema_of
        self._lark_of = lark_of
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._schemas: dict[str, str] = {}  # rules of those that were seen before
        self._terminals: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._reads_bytes = False

    def build(self, tag: Mapping[str, Any]) -> str:
        if "structures" in tag:
            body = self._triggered(
                {
                    "triggers": tag.get("triggers"),
                    "tags": [
                        {"begin": part.get("begin"), "content": {"type": "json_schema", "json_schema": part.get("schema")},
                         "end": part.get("end")}
                        if isinstance(part, Mapping) else part
                        for part in _list(tag.get("structures"), "structures")
                    ],
                },
                "structures", 0,
            )  # fmt: skip
        elif "format" in tag:
            body = self.part(tag["format"], "format", 0)
        else:
            raise _bad("", "has neither format nor structures")
        options = [f"%llguidance {json.dumps({'allow_invalid_utf8': True})}"] if self._reads_bytes else []
        lark = "\n".join([*options, f"start: {body}", *self._rules])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]})

    def rule(self, body: str, *, suffix: str = "", name: str = "part") -> str:
        if len(self._rules) >= _MAX_PARTS:
            raise _bad("", f"has more than {_MAX_PARTS} parts")
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{suffix}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """One that may read bytes which are no UTF-8."""
        self._reads_bytes = True
        if body not in self._terminals:
            self._terminals[body] = self.rule(body, name="TEXT")
        return self._terminals[body]

    def _shared(self, body: str) -> str:
        """A long part as a rule, which parts that are equal have in common."""
        if len(body) <= _LONG_CHARS:
            return body
        if body not in self._bodies:
            self._bodies[body] = self.rule(body)
        return self._bodies[body]

    def first_special(self, text: str) -> tuple[str, int, str] | None:
        """The text before the first special token in a literal, that token's id, and the text behind it."""
        found = self._split.search(text) if self._split is not None else None
        return None if found is None else (text[: found.start()], self.special[found.group()], text[found.end() :])

    def literal(self, text: Any, where: str = "", *, is_empty_fine: bool = True) -> str:
        if not isinstance(text, str) or not (text or is_empty_fine):
            raise _bad(where, f"is {text!r}; give a text")
        parts, start = [], 0
        for found in self._split.finditer(text) if self._split is not None else ():
            parts += [_quoted(text[start : found.start()]), f"<[{self.special[found.group()]}]>"]
            start = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[start:])])) or '""'

    def part(self, part: Any, where: str, depth: int) -> str:
        if not isinstance(part, Mapping):
            raise _bad(where, f"is a {type(part).__name__}; give an object with a type")
        if depth > _MAX_DEPTH:
            raise _bad(where, f"is nested more than {_MAX_DEPTH} deep")
        kind = part.get("type")
        make = _PARTS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise _bad(f"{where}.type", f"is {kind!r}; use one of {', '.join(_PARTS)}")
        try:
            made: str = make(self, part, where, depth)
        except RequestError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # of the kinds below that only servers write
            raise _bad(where, f"is no part of type {kind}: {type(error).__name__} {error}") from None
        return made

    def _const_string(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        return self.literal(part.get("value"), f"{where}.value", is_empty_fine=False)

    def _json_schema(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        schema = part.get("json_schema")
        if part.get("style", "json") != "json":
            raise _bad(f"{where}.style", f"is {part['style']!r}; json is enforced, other styles are not")
        try:
            made = json.dumps(self._schema_of(True if schema is None else schema))
        except RequestError as error:
            if (name := part.get("name")) is None:
                raise
            raise RequestError(str(error).replace("structured_outputs.json", str(name)), param=error.param) from None
        if made not in self._schemas:
            self._schemas[made] = self.rule(f"%json {made}")
        return self._schemas[made]

    def _regex(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        pattern = part.get("pattern")
        if not isinstance(pattern, str):
            raise _bad(f"{where}.pattern", f"is {pattern!r}; give a regex")
        return self._embed(
            {"lark_grammar": "start: /" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n") + "/"}
        )

    def _grammar(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        text = part.get("grammar")
        if not isinstance(text, str):
            raise _bad(f"{where}.grammar", f"is {text!r}; give a grammar")
        return self._embed({"lark_grammar": self._lark_of(text)})

    def _json_text(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        """A JSON text whose content keeps to a grammar."""
        name = part.get("name", where)
        made = in_json(self._lark_of(part["grammar"]), name)
        return f'"\\"" {self._embed({"lark_grammar": made})} "\\""'

    def _lark_text(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        """A text that keeps to a grammar up to `end` and over it, without any of `excludes`, and without `marker` but at its end."""
        terminals = in_terminals(self._lark_of(part["grammar"]), part.get("name", where))
        found = self.first_special(part["end"])
        before = part["end"] if found is None else found[0]
        whole = f"{START} {_quoted(before)}" if before else START
        conditions = without_marks(part["marker"] if found is None else "", part.get("excludes", ()))
        lark = f"start{'[lazy]' if found is None else ''}: TEXT\nTEXT: {' & '.join(['WHOLE', *conditions])}\nWHOLE: {whole}\n{terminals}"
        options = f"%llguidance {json.dumps({'allow_invalid_utf8': True})}\n"
        text = self._embed({"lark_grammar": options + lark})
        return text if found is None else f"{text} <[{found[1]}]> {self.literal(found[2]) if found[2] else ''}"

    def _embed(self, grammar: dict[str, Any]) -> str:
        name = f"inner_{len(self._grammars)}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _space(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        return _SPACE

    def _any_text(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        if part.get("excludes"):
            raise _bad(f"{where}.excludes", "is not enforced; leave it out")
        return _TEXT

    def _sequence(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        elements = _list(part.get("elements"), f"{where}.elements")
        made = []
        for index, element in enumerate(elements):
            before = f"{where}.elements[{index}]"
            follows = elements[index + 1] if index + 1 < len(elements) else None
            if _is_text(element) and follows is not None and follows.get("type") in ("const_string", "tag"):
                # Text up to what follows: the shortest that ends with it.
                made.append(None)
                continue
            if index and made[-1] is None:
                made[-1] = ""
                made.append(self._after_text(element, before, depth + 1))
                continue
            made.append(self.part(element, before, depth + 1))
        return self._shared("(" + " ".join(filter(None, made)) + ")")

    def _after_text(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        """Text, and then a part that begins with a literal."""
        if part.get("type") == "const_string":
            return self._until(part.get("value"), f"{where}.value")
        return f"{self._until(part.get('begin'), f'{where}.begin')} {self._content(part, where, depth)}"

    def _until(self, text: Any, where: str) -> str:
        """Text that ends with the first occurrence of a literal."""
        literal = self.literal(text, where, is_empty_fine=False)
        if literal.startswith("<["):  # of a special token, which no text has in it
            return f"{_TEXT} {literal}"
        first, _, rest = literal.partition(" <[")
        trigger = self.rule(f"/(?s:.*)/ {first}", suffix="[lazy]")
        return f"{trigger} <[{rest}" if rest else trigger

    def _or(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        elements = _list(part.get("elements"), f"{where}.elements")
        made = [self.part(element, f"{where}.elements[{i}]", depth + 1) for i, element in enumerate(elements)]
        return self._shared("(" + " | ".join(made) + ")")

    def _optional(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        return f"({self.part(part.get('content'), f'{where}.content', depth + 1)})?"

    def _repeated(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        sign = "+" if part["type"] == "plus" else "*"
        return f"({self.part(part.get('content'), f'{where}.content', depth + 1)}){sign}"

    def _tag(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        return f"{self.literal(part.get('begin'), f'{where}.begin')} {self._content(part, where, depth)}"

    def _content(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        """A tag's part behind its begin."""
        ends = part.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        content = part.get("content")
        if _is_text(content):
            made = [self._until(end, f"{where}.end") if end else _TEXT for end in ends]
            return "(" + " | ".join(made) + ")"
        end = " | ".join(self.literal(end, f"{where}.end") for end in ends)
        return f"{self.part(content, f'{where}.content', depth + 1)} ({end})"

    def _triggered(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        triggers, tags = _list(part.get("triggers"), "triggers"), _list(part.get("tags"), f"{where}.tags")
        if part.get("excludes"):
            raise _bad(f"{where}.excludes", "is not enforced; leave it out")
        made, plain = [], []
        used: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            here = f"{where}[{index}]"
            if not isinstance(tag, Mapping) or not isinstance(tag.get("begin"), str):
                raise _bad(f"{here}.begin", "is missing; give a text")
            begin: str = tag["begin"]
            trigger = next(
                (text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None
            )
            if trigger is None:
                raise _bad(f"{here}.begin", f"is {begin!r}, which begins with none of the triggers {triggers}")
            content = self._content(tag, here, depth)
            plain.append(f"{self.literal(begin, f'{here}.begin')} {content}")
            rest = begin[len(trigger) :]
            used.setdefault(trigger, []).append(f"{self.literal(rest, here) if rest else ''} {content}")
        for trigger, contents in used.items():
            made.append(f"{self._until(trigger, 'triggers')} ({' | '.join(contents)})")
        one = self.rule(" | ".join(made))
        first = self.rule(" | ".join(plain))
        if part.get("stop_after_first"):
            return f"({first})" if part.get("at_least_one") else f"({one} | {self._last_text(used)})"
        start = first if part.get("at_least_one") else ""
        return f"({start} {one}* {self._last_text(used)})"

    def _last_text(self, triggers: Mapping[str, Any]) -> str:
        """Text behind the last tag: a trigger in it would have begun one."""
        plain = [text for text in triggers if self._split is None or not self._split.match(text)]
        if not plain:
            return _TEXT
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(map(quoted_regex, plain))})(?s:.*)/")
        return name

    def _separated(self, part: Mapping[str, Any], where: str, depth: int) -> str:
        tags = _list(part.get("tags"), f"{where}.tags")
        one = self.rule(
            " | ".join(self._tag(_tag_of(tag, where), f"{where}.tags[{i}]", depth) for i, tag in enumerate(tags))
        )
        separator = self.literal(part.get("separator"), f"{where}.separator")
        more = "" if part.get("stop_after_first") else f"({separator} {one})*"
        return f"({one} {more})" + ("" if part.get("at_least_one") else "?")


_PARTS: dict[str, Callable[[Builder, Mapping[str, Any], str, int], str]] = {
    "const_string": Builder._const_string,
    "json_schema": Builder._json_schema,
    "regex": Builder._regex,
    "grammar": Builder._grammar,
    "json_text": Builder._json_text,
    "lark_text": Builder._lark_text,
    "any_text": Builder._any_text,
    "sequence": Builder._sequence,
    "or": Builder._or,
    "optional": Builder._optional,
    "plus": Builder._repeated,
    "star": Builder._repeated,
    "tag": Builder._tag,
    "triggered_tags": Builder._triggered,
    "tags_with_separator": Builder._separated,
    "space": Builder._space,
    "guarded": guarded,
    "messages": messages,
    "raw_text": raw_text,
}


def _tag_of(tag: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tag, Mapping):
        raise _bad(f"{where}.tags", f"has a {type(tag).__name__}; give objects with begin, content and end")
    return tag


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "any_text" and not part.get("excludes")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _bad(where, f"is {value!r}; give a list that is not empty" if not isinstance(value, list) else "is empty")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _bad(where: str, what: str) -> RequestError:
    place = f"structured_outputs.structural_tag{'.' if where else ''}{where}"
    return RequestError(f"{place} {what}.", param="structured_outputs")
