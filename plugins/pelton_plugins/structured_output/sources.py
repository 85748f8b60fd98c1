"""From a constraint to what llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance

from pelton.config.structured_outputs import StructuredOutputsConfig
from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton_plugins.structured_output.gbnf import gbnf_to_lark
from pelton_plugins.structured_output.json_schema import check_writable, prepare_schema, read_json
from pelton_plugins.structured_output.structural_tags import structural_tag_grammar
from pelton_plugins.structured_output.vocabulary import Vocabulary

WHITESPACE = r"(?:\r?\n[ \t]{0,64}|[ \t]{1,4})"
"""Between the parts of a JSON text: a line break and an indent, or a few spaces. Without a bound, models that are unsure go on
with white space to the end."""
_MAX_GROUPS = 200
"""Brackets that are open at once in a grammar or a regex."""
_DIRECTIVE = re.compile(r"^%llguidance[ \t]*(\{[^\n]*\})[ \t]*$", re.MULTILINE)
_UNFORCED = {"no_forcing": True}
"""Where one text alone may follow, masks allow all tokens that begin it. Otherwise llguidance asks the tokenizer which token is the
usual one: Python code, for which its threads wait in turn while the engine computes (12 % of masks on maskbench's schemas)."""


class Sources:
    def __init__(self, vocabulary: Vocabulary, settings: StructuredOutputsConfig) -> None:
        self._vocabulary = vocabulary
        self._settings = settings

    def make(self, params: StructuredOutputsParams) -> str:
        """Raises `RequestError` for a constraint that is not valid."""
        return unforced(self.forced(params))

    def forced(self, params: StructuredOutputsParams) -> str:
        """The same for masks of one token where one text alone may follow; llguidance's errors say more about it."""
        if params.json is not None or params.json_object:
            schema = {"type": "object"} if params.json is None else params.json
            return self._json(
                read_json(schema, "structured_outputs.json") if isinstance(schema, str) else schema, params
            )
        if params.regex is not None:
            check_nesting(params.regex, "regex")
            source: str = llguidance.LLMatcher.grammar_from_regex(ascii_digits(params.regex))
            return source
        if params.choice is not None:
            return choice_grammar(params.choice)
        if params.structural_tag is not None:
            tag = params.structural_tag
            tag = read_json(tag, "structured_outputs.structural_tag") if isinstance(tag, str) else tag
            check_writable(tag, "structured_outputs.structural_tag")
            options = self._options(params)
            return structural_tag_grammar(
                tag, self._vocabulary, lambda schema: {**self._schema(schema, params), "x-guidance": options}, lark_of
            )
        assert params.grammar is not None
        return lark_of(params.grammar)

    def _schema(self, schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
        closed = params.disable_additional_properties
        return prepare_schema(
            schema, closes_objects=self._settings.disable_additional_properties if closed is None else closed
        )

    def _json(self, schema: Any, params: StructuredOutputsParams) -> str:
        source: str = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(self._schema(schema, params)),  # a text may have integers beyond 64 bits, a dict none
            overrides=self._options(params),
        )
        return source

    def _options(self, params: StructuredOutputsParams) -> dict[str, Any]:
        """The options of llguidance for a JSON schema."""
        tight = params.disable_any_whitespace
        if params.whitespace_pattern is not None:
            check_nesting(params.whitespace_pattern, "whitespace_pattern")
            return {"whitespace_pattern": params.whitespace_pattern}
        if self._settings.disable_any_whitespace if tight is None else tight:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": WHITESPACE}


def unforced(source: str) -> str:
    """The source with masks as `_UNFORCED` says, unless it says itself: Lark's form, or a list of grammars as JSON."""
    if source.startswith("{"):
        made = json.loads(source)
        first = made["grammars"][0]
        if first.get("json_schema") is not None:
            return unforced(f"start: %json {json.dumps(first['json_schema'])}")
        first["lark_grammar"] = unforced(first["lark_grammar"])
        return json.dumps(made)
    found = _DIRECTIVE.search(source)
    if found is None:
        return source if "%llguidance" in source else f"%llguidance {json.dumps(_UNFORCED)}\n{source}"
    try:
        options = _UNFORCED | json.loads(found.group(1))
    except ValueError:  # llguidance says why
        return source
    return f"{source[: found.start()]}%llguidance {json.dumps(options)}{source[found.end() :]}"


def choice_grammar(texts: list[str]) -> str:
    """One of some texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)


def lark_of(text: str) -> str:
    """A grammar in Lark's form; written as that, or as GBNF or EBNF (`name ::= ...`)."""
    check_nesting(text, "grammar")
    return gbnf_to_lark(text) if _GBNF_RULE.search(text) and not _LARK_RULE.search(text) else text


def ascii_digits(regex: str) -> str:
    r"""With `\d` as 0 to 9, as in JSON Schema: a masked model is prone to write digits of any script."""
    digits = {"\\d": "[0-9]", "\\D": "[^0-9]"}
    return re.sub(r"\\.", lambda found: digits.get(found.group(), found.group()), regex, flags=re.DOTALL)


def check_nesting(text: str, field: str) -> None:
    """Refuse brackets in more levels than any parser behind this should be asked to descend."""
    depth = deepest = 0
    for character in re.sub(r"\\.", "", text):
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > _MAX_GROUPS:
        raise RequestError(
            f"structured_outputs.{field} nests {deepest} brackets; at most {_MAX_GROUPS}", param="structured_outputs"
        )
