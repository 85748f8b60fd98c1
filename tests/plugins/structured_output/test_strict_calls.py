"""Calls that a model chooses to make, of functions that are strict: whatever tokens it takes of those that the masks allow, each call
that the format's parser reads has arguments that keep to its schema, and text without a call is as free as without any constraint."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field

import jsonschema_rs
import pytest

from pelton.errors import RequestError
from pelton.parsing.interface import Arguments, Content, ParserContext, Reasoning, ToolCall
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.output_parser import merged
from pelton.testing.structured_output import allowed_tokens
from pelton_plugins.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from pelton_plugins.parsers.dsml import DSMLParser
from pelton_plugins.parsers.harmony import HarmonyParser
from pelton_plugins.parsers.json_formats import GraniteParser, HermesParser, Llama3JsonParser, MistralParser
from pelton_plugins.parsers.pythonic import PythonicParser
from pelton_plugins.parsers.xml_calls import Qwen3CoderParser
from pelton_plugins.structured_output.llguidance_backend import LLGuidanceBackend

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
        "unit": {"type": "string", "enum": ["C", "F", "of old"]},
        "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["city", "metric", "where"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["a", "b"]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    {"name": "get_weather", "parameters": WEATHER, "strict": True},
    {"name": "get_time", "parameters": TIME, "strict": True},
    {"name": "loose", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
)
STRICT = {tool["name"]: tool["parameters"] for tool in TOOLS if tool.get("strict")}


@dataclass(frozen=True)
class Format:
    """A parser, a text up to where its call may begin, and special tokens that models of it have."""

    parser: type
    opening: str
    specials: tuple[str, ...] = ()
    has_lists: bool = False  # of calls behind one opening


FORMATS = {
    "hermes": Format(HermesParser, "<tool_call>"),
    "hermes-special": Format(HermesParser, "<tool_call>", ("<tool_call>", "</tool_call>")),
    "granite": Format(GraniteParser, "<|tool_call|>", ("<|tool_call|>",)),
    "mistral": Format(MistralParser, "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "mistral-spelled": Format(MistralParser, "[TOOL_CALLS]"),
    "llama3_json": Format(Llama3JsonParser, '\n{"name"', ("<|python_tag|>",)),
    "llama3_json-tag": Format(Llama3JsonParser, "<|python_tag|>", ("<|python_tag|>",)),
    "pythonic": Format(PythonicParser, "\n[get_weather(", ("<|python_start|>", "<|python_end|>")),
    "pythonic-tag": Format(PythonicParser, "<|python_start|>", ("<|python_start|>", "<|python_end|>")),
    "qwen3_coder": Format(Qwen3CoderParser, "<tool_call>"),
    "qwen3_coder-bare": Format(Qwen3CoderParser, "<function="),
    "deepseek_v3": Format(DeepSeekV3Parser, "<｜tool▁calls▁begin｜>"),
    "deepseek_v3-special": Format(
        DeepSeekV3Parser, "<｜tool▁calls▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "deepseek_v31": Format(DeepSeekV31Parser, "<｜tool▁call▁begin｜>"),
    "deepseek_v32": Format(DSMLParser, "<｜DSML｜function_calls>"),
    "deepseek_v32-special": Format(DSMLParser, "<｜DSML｜function_calls>", ("｜DSML｜",)),
    "deepseek_v32-bare": Format(DSMLParser, '<｜DSML｜invoke name="', ("｜DSML｜",)),
    "gpt_oss": Format(
        HarmonyParser, "<|channel|>analysis<|message|>Call to=functions.f?<|end|><|start|>assistant to=",
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
}  # fmt: skip

PIECES = (
    '{"', '": "', '"}', '}}', ', "', "<tool", "_call>", "ok<tool_call>\n", "</tool_call>hey<tool", "tool_calls", "\n\n", "\n[", "\n{",
    "=f", "(city=", "get_", "weather", "loose", "</", "parameter>", "></", "arguments", "[TOOL_", "CALLS]", "<｜", "｜>", "DSML", "to=", "é", "name",
)  # fmt: skip
EOS, HIDDEN = "<eos>", "<hidden>"


class Tokens:
    """A tokenizer of bytes, of pieces that lie across the parts of calls, and of special tokens."""

    def __init__(self, specials: tuple[str, ...] = ()) -> None:
        pieces = [piece.encode() for piece in PIECES]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *pieces, b"", EOS.encode(), HIDDEN.encode()]
        self.eos_id, self.hidden_id = len(self.tokens) - 2, len(self.tokens) - 1
        self.ids = {text: len(self.tokens) + index for index, text in enumerate(specials)}
        self.tokens += [text.encode() for text in specials]
        self.special_token_ids = {self.eos_id, self.hidden_id, *self.ids.values()}

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = []
        parts = re.split("(" + "|".join(map(re.escape, self.ids)) + ")", text) if self.ids else [text]
        for part in parts:
            found += [self.ids[part]] if part in self.ids else part.encode()
        return found

    def backend(self) -> LLGuidanceBackend:
        context = StructuredOutputContext(
            tokenizer_path="",
            vocab_size=len(self.tokens),
            eos_token_ids=[self.eos_id],
            load_tokenizer=lambda: self,
        )
        return LLGuidanceBackend(context)

    def text(self, ids: list[int]) -> str:
        """As parsers see it."""
        shown = [self.tokens[one] for one in ids if one not in (self.eos_id, self.hidden_id)]
        return b"".join(shown).decode(errors="replace")


@dataclass
class Case:
    """A format with its masks."""

    form: Format
    tools: tuple = TOOLS
    is_parallel: bool = True
    more: dict = field(default_factory=dict)
    prompt: str = ""

    def __post_init__(self) -> None:
        self.tokens = Tokens(self.form.specials)
        self.context = ParserContext(tools=self.tools, prompt=self.prompt)
        made = self.form.parser.call_format(self.context, is_parallel=self.is_parallel)
        self.params = StructuredOutputsParams(structural_tag={"format": {**made, **self.more}})
        self.backend = self.tokens.backend()

    def grammar(self):
        return self.backend.compile(self.params)

    def events(self, text: str) -> list:
        parser = self.form.parser(self.context)
        return merged([*parser.feed(text), *parser.finish()])

    def walk(self, rng: random.Random, before: str, most: int = 400) -> tuple[list[int], bool]:
        """Some text, then what chance takes of what masks allow; whether it came to an end."""
        grammar, found = self.grammar(), []
        for token in cut(self.tokens, before, rng):
            assert token in allowed_tokens(grammar), (before, self.tokens.text(found), self.tokens.tokens[token])
            assert grammar.accept([token])
            found.append(token)
        for count in range(most):
            allowed = sorted(allowed_tokens(grammar))
            assert allowed, self.tokens.text(found)
            if self.tokens.eos_id in allowed and rng.random() < 0.2:
                return found, True
            closing = [one for one in allowed if self.tokens.tokens[one] in CLOSING or one in self.tokens.ids.values()]
            wants_end = rng.random() < 0.3 + 0.7 * (count > 60)
            token = rng.choice(closing if closing and wants_end else allowed)
            if token == self.tokens.eos_id:
                return found, True
            assert grammar.accept([token])
            found.append(token)
        return found, False


CLOSING = {one.encode() for one in ('"', "}", "]", ")", "<", "/", ">", "\n", '"}', "}}", "</", "parameter>")}


def cut(tokens: Tokens, text: str, rng: random.Random) -> list[int]:
    """A text in tokens, cut anywhere: special ones and pieces now and then."""
    found: list[int] = []
    left = text.encode()
    known = [
        (token, one)
        for one, token in enumerate(tokens.tokens)
        if len(token) > 1 and one not in (tokens.eos_id, tokens.hidden_id)
    ]
    while left:
        fitting = [(token, one) for token, one in known if left.startswith(token)]
        special = [(token, one) for token, one in fitting if one in tokens.special_token_ids]
        token, one = rng.choice([*(special * 9), *fitting, (left[:1], left[0])])
        found.append(one)
        left = left[len(token) :]
    return found


def check(case: Case, text: str, *, is_whole: bool) -> int:
    """The number of calls, each of which keeps to its schema; the last of a text that is cut off may be anything."""
    calls = []
    for event in case.events(text):
        if isinstance(event, ToolCall):
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            calls[-1][1] += event.text
    for name, written in calls if is_whole else calls[:-1]:
        arguments = json.loads(written)
        assert isinstance(arguments, dict), text
        if name in STRICT:
            jsonschema_rs.validate(STRICT[name], arguments)
        else:
            assert name == "loose", text
    return len(calls)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {}


def case_of(cases: dict, name: str, *, is_parallel: bool = True) -> Case:
    key = f"{name} {is_parallel}"
    if key not in cases:
        cases[key] = Case(FORMATS[name], is_parallel=is_parallel)
    return cases[key]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_begins_keeps_to_its_schema(cases, name):
    """Whatever is sampled, and however the beginning is cut into tokens."""
    case, num_ended, num_calls = case_of(cases, name), 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        before = rng.choice(["", "I look. ", "a < b <tool [x] {}\n", "\u00e9 "]) if not name.startswith("gpt") else ""
        ids, has_ended = case.walk(rng, before + case.form.opening)
        found = check(case, case.tokens.text(ids), is_whole=has_ended)
        num_ended += has_ended
        num_calls += found if has_ended else 0
        assert found or not has_ended, case.tokens.text(ids)
    assert num_ended > 20 and num_calls >= num_ended
