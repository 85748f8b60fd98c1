"""Structured-output backends: conformance, the seeds' example, and what each constraint allows."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.errors import RequestError
from pelton.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton.testing.structured_output import StructuredOutputConformance, allowed_tokens
from pelton_plugins.structured_output import llguidance_backend
from pelton_plugins.structured_output.auto import AutoBackend, num_states
from pelton_plugins.structured_output.index_process import IndexProcess
from pelton_plugins.structured_output.llguidance_backend import LLGuidanceBackend
from pelton_plugins.structured_output.outlines_backend import OutlinesBackend

TEXTS = ["Positive", "Negative"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "server"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
SQL = """
root ::= "SELECT " column " FROM t" where?
where ::= " WHERE " column " = " [0-9]{1,2}
column ::= "a" | "b"
"""
LARK = 'start: "SELECT " column " FROM t"\ncolumn: "a" | "b"\n'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag", "begin": "<f>", "end": "</f>",
        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    },
}  # fmt: skip
REGULAR = (StructuredOutputsParams(choice=TEXTS), StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{1,4}"))
OTHERS = (
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(grammar=SQL),
    StructuredOutputsParams(grammar=LARK),
    StructuredOutputsParams(structural_tag=TAG),
)
BAD = (
    StructuredOutputsParams(regex="("),
    StructuredOutputsParams(regex="(" * 1000 + "a" + ")" * 1000),
    StructuredOutputsParams(choice=["("], regex=None),
)[:2]


class TestLLGuidance(StructuredOutputConformance):
    backend = LLGuidanceBackend
    good = REGULAR + OTHERS
    bad = (
        *BAD,
        StructuredOutputsParams(json='{"type": '),
        StructuredOutputsParams(json={"type": "strng"}),
        StructuredOutputsParams(grammar='root ::= "a'),
        StructuredOutputsParams(grammar="start: nothing"),
        StructuredOutputsParams(structural_tag='{"type": "structural_tag"}'),
    )


class TestOutlines(StructuredOutputConformance):
    backend = OutlinesBackend
    good = REGULAR
    bad = (*BAD, StructuredOutputsParams(json=SCHEMA))


class TestAuto(StructuredOutputConformance):
    backend = AutoBackend
    good = REGULAR + OTHERS
    bad = (*BAD, StructuredOutputsParams(json={"type": "strng"}))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> StructuredOutputContext:
    path = make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])


@pytest.fixture(scope="module")
def guidance(context: StructuredOutputContext) -> LLGuidanceBackend:
    return LLGuidanceBackend(context)


@pytest.fixture(scope="module", params=[LLGuidanceBackend, OutlinesBackend])
def each(request: pytest.FixtureRequest, context: StructuredOutputContext) -> StructuredOutputBackend:
    return request.param(context)


def written(guidance: LLGuidanceBackend, tokens: list[int]) -> str:
    return b"".join(guidance.vocabulary.tokens[token] for token in tokens).decode()


def takes(backend: LLGuidanceBackend, params: StructuredOutputsParams, text: str) -> bool:
    """True when the text, as the tokenizer writes it, is allowed to its end."""
    grammar = backend.compile(params)
    return grammar.accept(backend.vocabulary.encode(text)) and EOS_ID in allowed_tokens(grammar)


def test_the_seeds_example_begins_with_p_or_n_and_o_follows_p(each, guidance):
    grammar = each.compile(GuidedDecodingParams(choice=TEXTS))
    tokens = guidance.vocabulary.tokens

    def letters(grammar: Grammar) -> set[bytes]:
        return {tokens[token] for token in allowed_tokens(grammar) if len(tokens[token]) == 1}

    assert letters(grammar) == {b"P", b"N"}
    assert all(any(text.encode().startswith(tokens[token]) for text in TEXTS) for token in allowed_tokens(grammar))
    assert grammar.accept([tokens.index(b"P")])
    assert letters(grammar) == {b"o"}


@pytest.mark.parametrize(
    "params, good, bad",
    [
        pytest.param({"json_object": True}, ['{"a": 1}', "{}"], ["[1]", "1", '{"a": }'], id="json-object"),
        pytest.param({"json": json.dumps(SCHEMA)}, ['{"name": "a", "size": 5}', '{\n  "name": "a",\n  "size": 5}'],
                     ['{"name": "b", "size": 5}', '{"name": "a", "size": 5, "more": 1}'], id="json"),
        pytest.param({"json": SCHEMA, "disable_any_whitespace": True}, ['{"name":"a","size":5}'],
                     ['{"name": "a","size":5}'], id="no-whitespace"),
        pytest.param({"json": {"properties": {"a": {}}}, "disable_additional_properties": True}, ['{"a": 1}'],
                     ['{"b": 1}'], id="no-more-properties"),
        pytest.param({"json": {"type": "object", "allOf": [{"properties": {"a": {}}, "required": ["a"]},
                                                           {"properties": {"b": {}}, "required": ["b"]}]},
                      "disable_additional_properties": True}, ['{"a": 1, "b": 2}'], ['{"a": 1}'], id="parts-of-one-object"),
        pytest.param({"grammar": SQL}, ["SELECT a FROM t", "SELECT b FROM t WHERE a = 12"], ["SELECT c FROM t"], id="ebnf"),
        pytest.param({"grammar": LARK}, ["SELECT a FROM t"], ["SELECT c FROM t"], id="lark"),
        pytest.param({"regex": r"\d+"}, ["12"], ["²", "٣"], id="digits-are-ascii"),
        pytest.param({"choice": ['say "hi"', "a\nb", "\\"]}, ['say "hi"', "a\nb", "\\"], ["say", "b"], id="choice"),
        pytest.param({"structural_tag": TAG}, ["<f>1</f>"], ["<f>3</f>", "<f>1"], id="tag"),
    ],
)  # fmt: skip
def test_a_constraint_takes_what_it_says(guidance, params, good, bad):
    params = StructuredOutputsParams(**params)
    for text in good:
        assert takes(guidance, params, text), text
    for text in bad:
        assert not takes(guidance, params, text), text


def random_regex(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 3)
    if kind < 3:
        return rng.choice(["a", "b", "e", " ", "th", "er", "server", "[a-c]", "[^a]", ".", r"\d", "[é日x]", r"\."])
    parts = [random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind < 6:
        return "".join(parts)
    if kind == 6:
        return f"({'|'.join(parts)})"
    return f"(?:{parts[0]}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}'])}"


@pytest.mark.parametrize("seed", range(4))
def test_both_make_the_same_masks(context, guidance, seed):
    """Of texts that go on behind a whole match too, by tokens that end no other: `(ab)+`, or a choice between "New" and "New York"."""
    outlines, chooser = OutlinesBackend(context), random.Random(seed)
    words = ["a", "an", "the", "the server", "a b", "é", "日本"]
    choices = [[chooser.choice(words) + chooser.choice(words) for _ in range(3)] for _ in range(8)]
    regexes = ["(ab)+", "(ab)*", r"[0-9]+(\.[0-9]+)?", *(random_regex(chooser) for _ in range(25))]
    for params in (
        *REGULAR,
        *(StructuredOutputsParams(choice=texts) for texts in choices),
        *(StructuredOutputsParams(regex=regex) for regex in regexes),
    ):
        one, other = guidance.compile(params), outlines.compile(params)
        for _ in range(12):
            allowed = allowed_tokens(one)
            assert allowed == allowed_tokens(other), params
            assert one.is_terminated() == other.is_terminated(), params
            if one.is_terminated():
                break
            token = chooser.choice(sorted(allowed - {EOS_ID}))
            assert one.accept([token]) and other.accept([token])


@pytest.mark.parametrize("regex", ["a)(b", "^a", "a|^b", "("])
def test_outlines_refuses_what_is_no_regex_or_looks_at_what_is_before_the_text(context, regex):
    with pytest.raises(RequestError, match="cannot be compiled by outlines"):
        OutlinesBackend(context).compile(StructuredOutputsParams(regex=regex))


TRIGGERED = {
    "structures": [
        {"begin": "<function=f>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
         "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "object"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}  # fmt: skip


def test_structures_constrain_behind_their_trigger_alone(guidance):
    params = StructuredOutputsParams(structural_tag=json.dumps(TRIGGERED))
    assert takes(guidance, params, "Nothing to call.")
    assert takes(guidance, params, 'Let me see. <function=f>{"x": 5}</function>')
    assert takes(guidance, params, 'One <function=f>{"x": 5}</function> and <function=g>{}</function> more.')
    assert not takes(guidance, params, 'Let me see. <function=f>{"y": 5}</function>')
    assert not takes(guidance, params, 'Let me see. <function=h>{"x": 5}</function>')
    assert not takes(guidance, params, 'Let me see. <function=f>{"x": 5}')


def test_special_tokens_in_a_tag_are_tokens(guidance):
    tag = {"format": {"type": "sequence", "elements": [{"type": "const_string", "value": "<bos>a"}]}}
    grammar = guidance.compile(StructuredOutputsParams(structural_tag=tag))
    (bos,) = allowed_tokens(grammar)
    assert guidance.vocabulary.tokens[bos] == b"<bos>"


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"properties": {"a": {"type": "strng"}}}, "/properties/a/type is 'strng'"),
        ({"items": {"properties": {"a/b": {"minLength": -1}}}}, "/items/properties/a~1b/minLength is -1"),
        ({"type": "object", "required": "a"}, "/required is 'a'"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"contains": {"type": "string"}, "type": "array"}}}, "/properties/a/contains"),
        ({"properties": {"a": {"pattern": "("}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "$defs/b"),
        ('{"type": "object", }', "line 1, column 20"),
        ({"not": 5}, "/not is 5; give a schema"),
        ({"properties": {"a": {"if": "b", "then": {}}}}, "/properties/a/if is 'b'; give a schema"),
        ({"not": {"$ref": "#/x"}, "x": {"required": 5}}, "/x/required is 5; give a list of names"),
        ({"type": "object", "properties": {}, "required": [["a"]]}, "/required is [['a']]; give a list of names"),
        ('{"type": "string", "maxLength": 1e400}', "cannot be written as JSON: Out of range float"),
        ('{"enum": ["\\ud800"]}', "cannot be written as JSON: 'utf-8' codec can't encode character"),
        pytest.param(f'{{"const": {"1" * 5000}}}', "cannot be read as JSON: Exceeds the limit", id="digits"),
        ({"const": 10**5000}, "cannot be written as JSON: Exceeds the limit"),
        (
            {"enum": ["a", {"b": [2**53 + 1]}]},
            "/enum/1/b/0 is 9007199254740993; a whole number is enforced below 2**63",
        ),
        ({"const": 2**63}, "/const is 9223372036854775808; a whole number"),
        (
            {"enum": [0.5, 0.9999999999999999]},
            "/enum/1 is 0.9999999999999999; a whole number",
        ),
        ({"const": -(2**63)}, "/const is -9223372036854775808; a whole number"),
        ({"enum": [-1e308, 2], "type": "integer"}, "/enum/0 is -1e+308; a whole number"),
        ({"items": {"type": "integer", "minimum": 2**53 + 1}}, "/items/minimum is 9007199254740993; a bound is"),
        ({"minimum": 2**53 + 1}, "/minimum is 9007199254740993; a bound"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "/exclusiveMinimum is 9007199254740992; a bound"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "/exclusiveMaximum is -9007199254740992; a bound"),
        ({"type": "integer", "maximum": 2**63 - 2}, "/maximum is 9223372036854775806; a bound"),
        ({"type": "integer", "minimum": 2**63}, "/minimum is 9223372036854775808; a bound"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "/maximum is -9223372036854775808; a bound"),
        ({"type": "integer", "allOf": [{"maximum": -9.3e18}, {"minimum": -9.4e18}]}, "/allOf/0/maximum is -9.3e+18;"),
        ({"type": "number", "maximum": 1e25}, "/maximum is 1e+25; a bound"),
        ({"type": "number", "exclusiveMaximum": 2**62}, "/exclusiveMaximum is 4611686018427387904; a bound"),
        ({"type": "string", "minLength": 2**32}, "/minLength is 4294967296; give a whole number from 0 to 2**32 - 1"),
    ],
)
def test_a_bad_schema_is_refused_with_its_place(guidance, schema, place):
    with pytest.raises(RequestError) as refused:
        guidance.compile(StructuredOutputsParams(json=schema))
    assert place in str(refused.value)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize("closes", [False, True])
def test_names_that_are_no_texts_are_those_of_no_property(guidance, closes):
    schema = {"type": "object", "propertyNames": {"enum": ["a", 1, ["b"]]}}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=closes)
    assert takes(guidance, params, '{"a": 1}') and not takes(guidance, params, '{"b": 1}')


@pytest.mark.parametrize("number", [2**53, 2**62, 2**63 - 1, -(2**63) + 1024, 0.5])
def test_a_number_that_is_named_is_the_only_one(guidance, number):
    params = StructuredOutputsParams(json={"const": number})
    assert takes(guidance, params, str(number)) and not takes(guidance, params, str(number + 1))


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    "schema, taken, not_taken",
    [
        ({"type": "integer", **INT64}, [0, 2**63 - 1, -(2**63) + 1024], [2**63, -(2**63) - 1]),
        ({"type": ["integer", "null"], "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
        ({"type": "integer", "allOf": [INT64]}, [0, -(2**62)], [2**63, -(2**63) - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1, 2**64]),
        ({"type": "integer", "minimum": 2**62}, [2**62, 2**63 - 1], [2**62 - 1]),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 1, "minimum": 2**53}, [2**53 + 2], [2**53 + 1]),
        ({"type": "integer", "exclusiveMinimum": -(2**63), "minimum": 10}, [10], [9]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [1.5, 10**30], []),
        (f'{{"type": "integer", "default": 1e30, "x-most": {10**30}}}', [5], []),
    ],
)  # fmt: skip
def test_large_bounds_are_kept(guidance, schema, taken, not_taken):
    params = StructuredOutputsParams(json=schema)
    assert [number for number in taken if not takes(guidance, params, str(number))] == []
    assert [number for number in not_taken if takes(guidance, params, str(number))] == []


@pytest.mark.parametrize(
    "bounds, taken, not_taken",
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.0001"], ["0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.25"], ["1", "1.0", "1.5"]),
        ({"minimum": -0.25, "exclusiveMaximum": 0}, ["-0.25", "-0.1"], ["0", "-0", "-0.0"]),
        ({"minimum": 10, "exclusiveMinimum": 10, "maximum": 10.5}, ["10.5", "10.2"], ["10"]),
        ({"minimum": 10.25, "exclusiveMinimum": 10, "maximum": 10.5}, ["10.3"], ["10", "10.2"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0"]),
        ({"exclusiveMinimum": 1000, "maximum": 1000.5}, ["1000.25", "1000.5"], ["1000", "1000.0"]),
        ({"minimum": -(10**9) - 0.5, "exclusiveMaximum": -(10**9)}, ["-1000000000.5"], ["-1000000000"]),
        ({"minimum": 0.1, "exclusiveMaximum": 1}, ["0.1", "0.99"], ["1", "1.0"]),
    ],
)
def test_a_number_is_above_an_open_bound(guidance, bounds, taken, not_taken):
    params = StructuredOutputsParams(json={"type": "number", **bounds})
    assert [text for text in taken if not takes(guidance, params, text)] == []
    assert [text for text in not_taken if takes(guidance, params, text)] == []


@pytest.mark.parametrize(
    "schema, taken, not_taken",
    [
        ({"allOf": [{"maximum": 0.5}, {"exclusiveMinimum": 0}, {"minimum": -1}]}, ["0.5", "0.0001"], ["0", "0.0", "-0.5", "0.51"]),
        ({"exclusiveMaximum": 0, "$ref": "#/$defs/a", "$defs": {"a": {"minimum": -0.5}}}, ["-0.5"], ["0", "-0", "-0.6"]),
        ({"exclusiveMinimum": 1, "anyOf": [{"maximum": 1.5}, {"minimum": 3}]}, ["1.5", "3"], ["1", "1.0", "2"]),
        ({"minimum": 0, "maximum": 0.5, "not": {"const": 0}}, ["0.1", "0.5"], ["0", "0.0"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0"]),
        ({"minimum": 0.1, "maximum": 0.9999999999999999}, ["0.1", "0.90"], ["1", "1.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 999.9999999999999}, ["999.5"], ["999.9999999999999", "1000"]),
        ({"exclusiveMinimum": -1000000000.0000001, "maximum": -(10**9)}, ["-1000000000"], ["-1000000000.0000001"]),
        ({"minimum": 1e-300}, ["1", "0.5"], ["0", "-1"]),
        ({"maximum": 1e-300, "minimum": -0.5}, ["0", "-0.5"], ["0.1", "-0.6"]),
        ({"enum": [0.1, 0.30000000000000004]}, ["0.1", "0.30000000000000004"], ["0.3"]),
    ],
)  # fmt: skip
def test_bounds_that_meet_or_have_many_digits_are_kept(guidance, schema, taken, not_taken):
    params = StructuredOutputsParams(json={"type": "number", **schema})
    assert [text for text in taken if not takes(guidance, params, text)] == []
    assert [text for text in not_taken if takes(guidance, params, text)] == []


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def keeps_bounds(schema, number: Fraction) -> bool:
    found = [Fraction(repr(schema[name])) if name in schema else None for name in BOUNDS]
    return (
        (found[0] is None or number >= found[0]) and (found[1] is None or number > found[1])
        and (found[2] is None or number <= found[2]) and (found[3] is None or number < found[3])
        and all(keeps_bounds(part, number) for part in schema.get("allOf", ()))
        and ("anyOf" not in schema or any(keeps_bounds(part, number) for part in schema["anyOf"]))
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_no_number_beyond_a_bound_is_allowed(guidance, seed):
    """Bounds at and next to whole numbers, and numbers next to those, in one part of a schema or in several."""
    draw, num_compared = random.Random(seed), 0

    def bound() -> int | float:
        number: int | float = draw.choice([0, 1, -1, 5, -1000, 10**9])
        kind = draw.random()
        if kind < 0.4:
            return number
        if kind < 0.7 or number == 0:
            return number + draw.choice([0.5, -0.5, 0.1, -0.999])
        for _ in range(draw.randint(1, 3)):
            number = math.nextafter(number, draw.choice([-math.inf, math.inf]))
        return number

    def part() -> dict[str, int | float]:
        return {draw.choice(BOUNDS): bound() for _ in range(draw.randint(0, 2))}

    for _ in range(25):
        schema: dict[str, Any] = {"type": "number", **part(), "allOf": [part(), part()], "anyOf": [part(), part()]}
        bounds = [
            number
            for one in (schema, *schema["allOf"], *schema["anyOf"])
            for name, number in one.items()
            if name in BOUNDS
        ]
        near = {edge for number in bounds for edge in (number, number + 0.25, math.floor(number), math.ceil(number))}
        near |= {math.nextafter(number, edge) for number in bounds for edge in (-math.inf, math.inf)}
        texts = {format(Decimal(repr(number)), "f") for number in near if number == 0 or abs(number) > 1e-20} | {"-0"}
        params = StructuredOutputsParams(json=schema)
        try:
            guidance.compile(params)
        except RequestError as error:  # no number keeps all
            assert "Unsatisfiable" in str(error)
            continue
        allowed = [text for text in texts if takes(guidance, params, text)]
        assert [text for text in allowed if not keeps_bounds(schema, Fraction(text))] == [], schema
        num_compared += len(allowed)
    assert num_compared > 20


@pytest.mark.parametrize("most", [2**32, 10**28])
def test_a_length_that_no_answer_reaches_is_no_bound(guidance, most):
    assert takes(guidance, StructuredOutputsParams(json={"type": "string", "maxLength": most}), '"ab"')


@pytest.mark.parametrize(
    "params",
    [
        {"grammar": 'start: %json {"type": "integer", "minimum": -9.3e18, "maximum": -9.3e18}'},
        {"grammar": 'start: %json {"type": "integer", "allOf": [{"maximum": -9.3e18}, {"minimum": -9.4e18}]}'},
        {"json": {"$ref": "#/a", "a": {"const": -(2**63)}}},
        {"grammar": 'start: %json {"const": -9223372036854775808}'},
        {"grammar": 'start: %json {"type": "integer", "enum": [-1E308]}'},
    ],
    ids=["bounds", "conjunction", "reference", "lark", "exponent"],
)
def test_a_number_on_which_the_library_overflows_its_stack_ends_no_process(guidance, params):
    with pytest.raises(
        RequestError, match=r"structured_outputs\..* cannot be compiled: its compiler descends without end"
    ):
        guidance.compile(StructuredOutputsParams(**params))
    assert takes(guidance, StructuredOutputsParams(json={"type": "integer", "maximum": 2**63 - 1}), "12")


@pytest.mark.parametrize(
    "params",
    [
        {"json": {"type": "integer", "multipleOf": 123456789}},
        {"grammar": r'start: %json {"type": "integer", "multiple\u004ff": 123456789}'},
    ],
    ids=["schema", "lark"],
)
def test_a_multiple_that_takes_minutes_goes_on_nowhere(context, params):
    """The process that compiles it is stopped; a thread would go on."""
    backend = LLGuidanceBackend(context)
    backend._process.check("start: /a/", 60.0)  # it has started
    allow(backend, 1)
    with pytest.raises(RequestError, match=r"structured_outputs\..* cannot be compiled: it takes more than 1 s"):
        backend.compile(StructuredOutputsParams(**params))
    assert not any(thread.name == "pelton-compile" for thread in threading.enumerate())
    allow(backend, 60)
    assert takes(backend, StructuredOutputsParams(json={"type": "integer", "multipleOf": 5}), "10")


def test_negations_are_bounded(guidance):
    """A few lines stand for 6**11 schemas; and the regex of all texts but a long one would take gigabytes."""
    steps = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 6} for i in range(11)} | {"d11": {"minimum": 1}}
    for schema in ({"$defs": steps, "not": {"$ref": "#/$defs/d0"}}, {"not": {"const": "x" * 200_000}}):
        with pytest.raises(RequestError, match="/not cannot be enforced"):
            guidance.compile(StructuredOutputsParams(json=schema))
    long = StructuredOutputsParams(json={"type": "string", "not": {"const": "x" * 40}})
    assert takes(guidance, long, f'"{"x" * 41}"') and not takes(guidance, long, f'"{"x" * 40}"')


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "params, words",
    [
        ({"json": nested(65)}, "nested 65 levels deep; at most 64"),
        ({"json": nested(900)}, "nested"),
        ({"json": {"enum": ["x" * 300_000]}}, "characters; at most 262144"),
        ({"grammar": "start: " + "(" * 500 + '"a"' + ")" * 500}, "nests 500 brackets"),
        ({"grammar": "root ::= " + "(" * 500 + '"a"' + ")" * 500}, "nests 500 brackets"),
        ({"grammar": "start: " + " | ".join(f"r{i}" for i in range(2000))}, "r0"),
        ({"structural_tag": {"format": {"type": "xml"}}}, "format.type is 'xml'"),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "\\ud800"}}'}, "structural_tag cannot be written as JSON"),
        ({"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}}, "none of the triggers"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_makes_no_sense_is_refused(guidance, params, words):
    with pytest.raises(RequestError, match="structured_outputs") as refused:
        guidance.compile(StructuredOutputsParams(**params))
    assert words in str(refused.value)


def chained(count: int) -> dict:
    """A schema whose definitions lead to each other, one by one."""
    return {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"const": 1}},
        "$ref": "#/$defs/d0",
    }


@pytest.mark.parametrize(
    "params, text",
    [
        ({"json": chained(7000)}, "1"),
        ({"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(15_000)) + 'r15000: "ab"\n'}, "ab"),
    ],
    ids=["references", "rules"],
)
def test_rules_that_lead_to_each_other_without_end_end_no_process(guidance, params, text):
    """The library descends a level for each: on an ordinary stack 3,000 end the process, that is, the engine."""
    grammar = guidance.compile(StructuredOutputsParams(**params))
    bitmask = np.zeros((2, -(-VOCAB_SIZE // 32)), dtype="<i4")
    other = guidance.compile(StructuredOutputsParams(**params))
    grammar.filler.fill([(grammar, 0, []), (other, 1, [])], bitmask)
    assert bitmask[0].any() and (bitmask[0] == bitmask[1]).all()
    assert takes(guidance, StructuredOutputsParams(**params), text)


def test_the_states_of_a_regex_with_very_many_counts_are_bounded(context):
    assert 2**24 < num_states("a{1,9}" * 40_000) < 2**40
    assert 2**24 < num_states("a{" + "9" * 5000 + "}") < 2**80
    regex = r"[a-c\d]{1,9}" * 8000
    assert AutoBackend(context).compile(StructuredOutputsParams(regex=regex)).name == "llguidance"


def test_a_constraint_is_compiled_once(guidance):
    params = StructuredOutputsParams(json={**SCHEMA, "title": "once"})
    before = guidance.num_compiled
    one, other = guidance.compile(params), guidance.compile(StructuredOutputsParams(json={**SCHEMA, "title": "once"}))
    assert guidance.num_compiled == before + 1
    one.accept(guidance.vocabulary.encode('{"name"'))
    assert guidance.vocabulary.tokens.index(b"{") in allowed_tokens(other), "states are not shared"


def allow(backend: OutlinesBackend | LLGuidanceBackend, seconds: float) -> None:
    backend.settings = msgspec.structs.replace(backend.settings, grammar_compile_timeout_s=seconds)


def test_a_regex_that_takes_too_long_is_stopped(context):
    from pelton_plugins.structured_output.index_process import IndexError_

    outlines = OutlinesBackend(context)
    allow(outlines, 90)
    outlines.compile(StructuredOutputsParams(regex="a"))  # its process runs
    allow(outlines, 0.2)
    endless = StructuredOutputsParams(regex="(a|b)*a(a|b){22}")
    with pytest.raises(RequestError, match=r"more than 0\.2 s|memory"):
        outlines.compile(endless)
    with pytest.raises(IndexError_):
        outlines.build(endless, 0.1)
    allow(outlines, 90)
    assert outlines.compile(StructuredOutputsParams(regex="ab?")), "it goes on with the next"


def test_auto_says_which_it_chose(context, caplog, monkeypatch):
    monkeypatch.setattr("pelton_plugins.structured_output.auto._BUDGET_S", 90.0)
    auto = AutoBackend(context)
    allow(auto._outlines, 90)
    with caplog.at_level("DEBUG", logger="pelton_plugins.structured_output.auto"):
        auto.compile(StructuredOutputsParams(choice=TEXTS))
        auto.compile(StructuredOutputsParams(regex=".{0,5000}b{0,5000}"))
        auto.compile(StructuredOutputsParams(json=SCHEMA))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1].split()[0] for line in said] == ["outlines", "llguidance", "llguidance"]
    assert "states times tokens; at most" in said[1]
    assert [auto.compile(StructuredOutputsParams(**{kind: value})).name for kind, value in
            (("choice", TEXTS), ("json", SCHEMA))] == ["outlines", "llguidance"]  # fmt: skip


def test_the_tree_of_a_step_is_filled_in_one_call(guidance, monkeypatch):
    """Masks of many rows, drafts among them, are those that each row would get alone."""
    grammars = [guidance.compile(params) for params in (*REGULAR, *OTHERS)]
    alone = [guidance.compile(params) for params in (*REGULAR, *OTHERS)]
    for _ in range(3):
        drafts = [_walk(grammar, 2) for grammar in alone]
        bitmask = np.full((3 * len(grammars), -(-VOCAB_SIZE // 32)), -1, dtype="<i4")
        grammars[0].filler.fill([(grammar, 3 * i, drafts[i]) for i, grammar in enumerate(grammars)], bitmask)
        for i, grammar in enumerate(alone):
            for position in range(len(drafts[i]) + 1):
                row = bytearray(4 * bitmask.shape[1])
                grammar.fill_bitmask(row, drafts[i][:position])
                assert row == bitmask[3 * i + position].tobytes()
        for i, grammar in enumerate(grammars):
            wrong = next(token for token in range(VOCAB_SIZE) if token not in allowed_tokens(alone[i]))
            assert grammar.validate([wrong]) == 0
            assert grammar.accept(drafts[i][:1]) and alone[i].accept(drafts[i][:1])


@pytest.mark.parametrize("params", [*REGULAR, *OTHERS], ids=lambda params: params.kind)
def test_masks_are_made_without_the_tokenizer(guidance, monkeypatch, params):
    """It is Python: native threads would wait for the interpreter in the middle of a step."""
    asked = []
    monkeypatch.setattr(llguidance_backend._Wrapper, "__call__", lambda *arguments: asked.append(arguments) or [])
    grammar = guidance.compile(params)
    while (token := _walk(grammar, 1)[0]) != EOS_ID:
        assert grammar.accept([token])
    assert not asked


def _walk(grammar: Grammar, count: int) -> list[int]:
    path: list[int] = []
    for _ in range(count):
        row = bytearray(4 * -(-VOCAB_SIZE // 32))
        grammar.fill_bitmask(row, path)
        path.append(next(token for token in range(VOCAB_SIZE) if row[token // 8] >> token % 8 & 1))
    return path


@pytest.mark.parametrize("name", ["index_process", "compile_process"])
def test_a_helper_process_imports_nothing_of_the_engine(name):
    """So it starts quickly."""
    from pelton_plugins.structured_output import helper_process

    code = (
        f"import sys, runpy; runpy.run_path({str(Path(helper_process.__file__).with_name(name + '.py'))!r}); "
        "print(*(name for name in ('numpy', 'msgspec', 'pelton', 'torch') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()


FAKE = """
class Vocabulary:
    def __init__(self, eos, tokens):
        pass
class Index:
    def __init__(self, regex, vocabulary):
        self.regex = regex
    def __reduce__(self):
        return None, (self.regex.encode() + b" from here",)
"""


def test_the_process_of_indexes_finds_its_package_where_this_process_does(tmp_path, monkeypatch):
    """In a folder of PYTHONPATH too, which an isolated interpreter does not read."""
    (tmp_path / "outlines_core.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = IndexProcess([b"a"], [], 1)
    try:
        assert process.build("a+", 30.0).endswith(b" from here")
    finally:
        process.close()


def test_a_large_schema_that_takes_too_long_is_refused_in_time_while_others_compile(context):
    """It takes 20 s and more, so it is stopped after one."""
    backend = LLGuidanceBackend(context)
    allow(backend, 90)
    wide = {"type": "object", "properties": {f"{index:x}": {} for index in range(18_000)}}
    large = {"type": "object", "properties": {f"property {index}": {"type": "integer"} for index in range(300)}}
    assert backend.compile(StructuredOutputsParams(json=large))  # its process runs
    asked, others_are_done, check, limits = threading.Event(), threading.Event(), backend._process.check, []

    def stopped_soon(source: str, timeout_s: float) -> str:
        limits.append(timeout_s)
        asked.set()
        try:
            return check(source, 1.0)
        finally:
            assert others_are_done.wait(90), "they wait for it"

    backend._process.check = stopped_soon
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(backend.compile, StructuredOutputsParams(json=wide))
        assert asked.wait(90)
        for size in range(5):
            assert backend.compile(StructuredOutputsParams(json={"maxLength": 3 + size, "type": "string"}))
        others_are_done.set()
        with pytest.raises(RequestError, match=r"structured_outputs\.json cannot be compiled: it takes more than 1 s"):
            job.result()
    assert limits == [90], "as the settings say"
    backend._process.check = check
    assert backend.compile(StructuredOutputsParams(json={**large, "title": "again"})), "it goes on with the next"


def test_a_small_constraint_is_not_waited_for_either(context, monkeypatch):
    from pelton.config import EngineConfig

    config = EngineConfig.from_flat(grammar_compile_timeout_s=0.2)
    backend = LLGuidanceBackend(StructuredOutputContext(**{
        name: getattr(context, name) for name in ("tokenizer_path", "vocab_size", "eos_token_ids")
    }, engine_config=config))  # fmt: skip
    is_told = threading.Event()
    monkeypatch.setattr(LLGuidanceBackend, "_matcher", lambda self, source: is_told.wait(90))
    with pytest.raises(RequestError, match=r"more than 0\.2 s"):
        backend.compile(StructuredOutputsParams(regex="a"))
    is_told.set()
