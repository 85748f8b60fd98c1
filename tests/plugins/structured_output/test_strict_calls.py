"""Calls that a model chooses to make, of functions that are strict: whatever tokens it takes of those that the masks allow, each call
that the format's parser reads has arguments that keep to its schema, and text without a call is as free as without any constraint."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass, field

import jsonschema_rs
import pytest

from pelton.errors import RequestError
from pelton.parsing.interface import Arguments, ParserContext, ToolCall
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
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 15}, "maxItems": 2},
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
    '{"', '": "', '"}', '}}', ', "', "<tool", "_call>", "ok<tool_call>\n", "</tool_call>hey<tool", "tool_calls", "\n\n",
    "\n[", "\n{", "=f", "(city=", "get_", "weather", "loose", "</", "parameter>", "></", "arguments", "[TOOL_", "CALLS]",
    "<｜", "｜>", "DSML", "to=", "é", "name",
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
        spells = (
            self.form.parser is not HarmonyParser
        )  # which would take what is spelled out for the tokens: it is refused
        for token in cut(self.tokens, before, rng, spells=spells):
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


def cut(tokens: Tokens, text: str, rng: random.Random, *, spells: bool = False) -> list[int]:
    """A text in tokens, cut anywhere. spells: special ones are spelled out now and then."""
    found: list[int] = []
    left = text.encode()
    pieces = [(token, one) for one, token in enumerate(tokens.tokens) if len(token) > 1 and one < 256 + len(PIECES)]
    special = [(text.encode(), one) for text, one in tokens.ids.items()]
    while left:
        places = [left.find(token) for token, _ in special if token in left]
        if spells and rng.random() < 0.3:
            places = []
        token, one = next(((token, one) for token, one in special if places and left.startswith(token)), (b"", 0))
        if not token:
            size = min(places, default=len(left))
            fitting = [(token, one) for token, one in pieces if len(token) <= size and left.startswith(token)]
            token, one = rng.choice([*fitting, (left[:1], left[0])])
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
    for seed in range(16):
        rng = random.Random(seed)
        before = rng.choice(["", "I look. ", "a < b <tool [x] {}\n", "\u00e9 "]) if not name.startswith("gpt") else ""
        ids, has_ended = case.walk(rng, before + case.form.opening)
        found = check(case, case.tokens.text(ids), is_whole=has_ended)
        num_ended += has_ended
        num_calls += found if has_ended else 0
        assert found or not has_ended, case.tokens.text(ids)
    assert num_ended > 6 and num_calls >= num_ended


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_at_most_where_the_request_says_so(cases, name):
    case = case_of(cases, name, is_parallel=False)
    found = [case.walk(random.Random(seed), case.form.opening) for seed in range(12)]
    counts = [check(case, case.tokens.text(ids), is_whole=has_ended) for ids, has_ended in found]
    assert max(counts) == 1


TRIGGERS = {
    HermesParser: r"<tool_call>", GraniteParser: r"<\|tool_call\|>|<tool_call>|<function_call>", MistralParser: r"\[TOOL_CALLS\]",
    Llama3JsonParser: r"<\|python_tag\|>|(^|\n)[ \t;,]*\{\s*(,|\"(name|\w+)\"|\"[^\"\n]*\\)",
    PythonicParser: r"<\|python_start\|>|(^|\n)\s*\[\s*(get_weather|get_time|loose)\s*\(",
    Qwen3CoderParser: r"<tool_call>|<function=", DeepSeekV3Parser: r"<｜tool▁calls?▁begin｜>",
    DeepSeekV31Parser: r"<｜tool▁calls?▁begin｜>", DSMLParser: r"<｜DSML｜", HarmonyParser: r"to=",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("gpt")])
def test_text_without_a_call_is_free(cases, name):
    """Bytes that are no UTF-8, tokens without a text and special ones too: all may come, but for what would begin a call as none goes on.
    So a request samples the tokens that it would without strict functions."""
    case = case_of(cases, name)
    tokens, trigger = case.tokens, re.compile(TRIGGERS[case.form.parser])
    everything = set(range(len(tokens.tokens)))
    num_free = 0
    for seed in range(6):
        rng, grammar, ids = random.Random(seed), case.grammar(), []
        while len(ids) < 60:
            missing = everything - allowed_tokens(grammar)
            num_free += not missing
            text = tokens.text(ids)
            for one in missing:
                is_special = one in tokens.special_token_ids or not tokens.tokens[one] or one == 0xFF
                written = text + tokens.tokens[one].decode(errors="replace")
                assert is_special or trigger.search(written), (text, tokens.tokens[one])
                assert not is_special or trigger.search(written) or ends_in_a_beginning(case, text), (
                    text,
                    tokens.tokens[one],
                )
            token = rng.choice(sorted(everything))
            if token == tokens.eos_id or trigger.search(tokens.text([*ids, token])):
                continue
            if token in missing:  # a special one within what may become a trigger
                continue
            assert grammar.accept([token])
            ids.append(token)
        assert not any(isinstance(event, ToolCall) for event in case.events(tokens.text(ids)))
    assert num_free > 150


def ends_in_a_beginning(case: Case, text: str) -> bool:
    """Between the parts of a trigger no special token may come: it may be one that the parser never sees."""
    starts = ("<tool_call>", "<|tool_call|>", "<function_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>", "<function=",
              "<｜tool▁calls▁begin｜>", "<｜DSML｜")  # fmt: skip
    line = text.rpartition("\n")[2]
    is_literal = any(text.endswith(start[:size]) for start in starts for size in range(1, len(start)))
    return is_literal or line.lstrip(" \t;,\r\x0b\x0c").startswith(("{", "["))


RIGHT = '{"city": "Oslo", "metric": true, "where": null}'
WRONG = '{"city": "Oslo", "metric": "yes", "where": null}'
TEXTS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "hermes-special": 'I look.<tool_call>{"name": "get_weather", "arguments": %s}</tool_call><tool_call>{"name": "get_time", '
    '"arguments": {}}</tool_call> so',
    "granite": 'I.<|tool_call|>[{"name": "get_weather", "arguments": %s}, {"name": "get_time", "arguments": {}}]',
    "mistral": 'I.[TOOL_CALLS]get_weather[ARGS]%s[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}',
    "mistral-spelled": '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}, {"name": "get_time", "arguments": {}}]',
    "llama3_json": 'Hm:\n{"name": "get_weather", "parameters": %s}; {"name": "get_time", "parameters": {}}',
    "llama3_json-tag": 'Hm <|python_tag|>{"name": "get_weather", "parameters": %s}',
    "deepseek_v3": "Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n%s\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>analysis<|message|>to=functions.x{<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    "<|constrain|>json<|message|>%s<|call|><|start|>assistant<|channel|>final<|message|>So.",
}  # fmt: skip
TAGS = {
    "qwen3_coder": (
        "Hm\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=metric>\n", "\n</parameter>\n"
        "<parameter=where>\nnull\n</parameter>\n<parameter=notes>\n[\"</parameter>\"]\n</parameter>\n</function>\n</tool_call>",
        "true", "yes",
    ),
    "pythonic": ('[get_weather(city="Oslo", metric=', ", where=None), get_time(), loose(a=[1, 'b'], c={\"d\": None})]", "True", '"yes"'),
    "pythonic-tag": ('So <|python_start|>[get_weather(city="a]", metric=', ', where={"x": 5})]<|python_end|>', "False", "0"),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="metric" string="false">',
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="where" string="false">{"x": 5}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", "true", "yes",
    ),
}  # fmt: skip
TAGS["deepseek_v32-special"] = TAGS["deepseek_v32"]
PAIRS = {name: (text % RIGHT, text % WRONG) for name, text in TEXTS.items()}
PAIRS |= {name: (a + good + b, a + bad + b) for name, (a, b, good, bad) in TAGS.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_what_models_write_is_taken_however_it_is_cut(cases, name):
    """And read as that; arguments that break the schema are not."""
    case, (right, wrong) = case_of(cases, name), PAIRS[name]
    for seed in range(25):
        rng = random.Random(seed)
        grammar = case.grammar()
        ids = cut(case.tokens, right, rng)
        assert grammar.validate(ids) == len(ids), case.tokens.text(ids[: grammar.validate(ids)])
        assert grammar.accept(ids)
        assert case.tokens.eos_id in allowed_tokens(grammar)
        assert check(case, right, is_whole=True) >= 1
        ids = cut(case.tokens, wrong, rng)
        assert case.grammar().validate(ids) < len(ids)


THOUGHT = {"begins": ["<think>"], "ends": ["</think>"]}


@pytest.mark.parametrize(
    "specials", [(), ("<think>", "</think>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")]
)
def test_calls_that_reasoning_names_are_none(specials):
    case = Case(Format(HermesParser, "<tool_call>", specials), more={"thought": THOUGHT})
    for text, is_right in (
        (f"\n<think>\nMaybe <tool_call>{{5}} ok\n</think>\nSo <tool_call>{CALL % RIGHT}</tool_call>", True),
        ("<think>\nMaybe <tool_call>{5} ok\n</think>\nSo <tool_call>{5}", False),
        (f"<think>\nMaybe</think><tool_call>{CALL % WRONG}</tool_call>", False),
        (f"So <tool_call>{CALL % RIGHT}</tool_call>", True),
        ("So <tool_call>{5}", False),
        ("<tool_call>{5}", False),
        ("<think>never closed <tool_call>{5}", True),
        ("<thin <think", True),
    ):
        for seed in range(10):
            ids, grammar = cut(case.tokens, text, random.Random(seed)), case.grammar()
            assert (grammar.validate(ids) == len(ids)) is is_right, text
            if is_right:
                assert grammar.accept(ids) and case.tokens.eos_id in allowed_tokens(grammar)


CALL = '{"name": "get_weather", "arguments": %s}'


def test_hidden_tokens_do_not_hide_a_trigger(cases):
    """The reader drops special tokens that are no markers: a trigger with one in its middle would be whole again."""
    case = case_of(cases, "hermes")
    ids = [*b"a <tool", case.tokens.hidden_id]
    assert case.grammar().validate(ids) == len(ids) - 1
    assert case.grammar().validate([*b"a b", case.tokens.hidden_id, *b"<tool_call>"]) == 15


LINES = r'start: ("+" /[^\n]*/ "\n")+'
OF_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
PATCHES = ({"name": "get_weather", "parameters": OF_TEXT, "strict": True, "grammar": LINES}, TOOLS[1])


@pytest.mark.parametrize("name", TEXTS)
def test_an_input_keeps_to_its_grammar_in_every_format_whose_arguments_are_json(name):
    case = Case(FORMATS[name], tools=PATCHES)
    right, wrong = '{"input": "+a\\\\ \\"b\\"\\n+\\n"}', '{"input": "+a\\\\ \\"b\\"\\n-\\n"}'
    for seed in range(10):
        ids, grammar = cut(case.tokens, TEXTS[name] % right, random.Random(seed)), case.grammar()
        assert grammar.accept(ids) and case.tokens.eos_id in allowed_tokens(grammar)
        ids = cut(case.tokens, TEXTS[name] % wrong, random.Random(seed))
        assert case.grammar().validate(ids) < len(ids)
    events = case.events(TEXTS[name] % right)
    called = next(
        place for place, event in enumerate(events) if isinstance(event, ToolCall) and event.name == "get_weather"
    )
    assert json.loads(events[called + 1].text) == {"input": '+a\\ "b"\n+\n'}


WORD = {
    "type": "object",
    "properties": {"word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
MARKED = [name for name in TEXTS if name not in ("gpt_oss", "llama3_json")]
"""Formats whose calls begin with a text."""


@pytest.mark.parametrize("name", MARKED)
def test_an_answer_is_the_json_that_is_wanted_or_calls(name):
    """And nothing beside it; behind reasoning too, where the answer begins with that."""
    form = FORMATS[name]
    instead = {"instead": {"type": "json_schema", "json_schema": WORD}}
    trigger = next(trigger["text"] for trigger in Case(form).params.structural_tag["format"]["triggers"] if "text" in trigger
                   and trigger["text"] in TEXTS[name])  # fmt: skip
    calls = trigger + (TEXTS[name] % RIGHT).partition(trigger)[2].removesuffix(" so")
    plain, thinking = Case(form, more=instead), Case(form, more={**instead, "thought": THOUGHT})
    for text, is_right in (
        ('{"word": "a <tool [TOOL"}', True), (calls, True), (f"\n\n{calls}\n", True), ("So", False),
        (f'{{"word": "a"}} {calls}', False), (f"I look. {calls}", False), (calls.replace("Oslo", "O" * 13), False),
            ('{"name": "a"}', False),
    ):  # fmt: skip
        for case, before in ((plain, ""), (thinking, ""), (thinking, f"<think>It may be {trigger}</think>\n\n")):
            for seed in range(5):
                ids, grammar = cut(case.tokens, before + text, random.Random(seed)), case.grammar()
                taken = grammar.validate(ids) == len(ids) and grammar.accept(ids)
                assert (taken and case.tokens.eos_id in allowed_tokens(grammar)) is is_right, before + text
    one = Case(form, is_parallel=False, more=instead)
    ids = cut(one.tokens, calls + calls, random.Random(0))
    assert one.grammar().validate(ids) < len(ids)


AN_ARRAY = {"type": "array", "contains": {"type": "string"}}
TEXT_OR_NUMBER = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}
REFUSED = [
    (HermesParser, "tags", AN_ARRAY, "The schema of f at /properties/tags/contains cannot be enforced: Unimpl"),
    (HermesParser, "a", {"type": "strng"}, "The schema of f at /properties/a/type is 'strng'"),
    (
        Qwen3CoderParser,
        "a",
        {"type": "string", "pattern": "x+"},
        "/properties/a cannot be enforced in the form of tags: pattern",
    ),
    (Qwen3CoderParser, "a", {"enum": ["1", 2]}, "the value '1', which would be read as another"),
    (Qwen3CoderParser, "a", TEXT_OR_NUMBER, "a text, or a value with a schema of its own"),
    (DSMLParser, "a", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, "oneOf without a type"),
    (
        Qwen3CoderParser,
        None,
        'start: "(" start ")" | "a"',
        "The grammar of f cannot be held within a call because of 'the rule start",
    ),
    (HermesParser, None, "start: foo", 'The grammar of f cannot be compiled: at 1(8): unknown name: "foo"'),
    (
        HermesParser,
        "a",
        {"type": "string", "pattern": "("},
        "The schema of f at /properties/a/pattern cannot be compiled: regex",
    ),
    (HermesParser, None, "start: <x>", "The grammar of f cannot be held within a call because of '<x>'"),
    (PythonicParser, "a b", {"type": "string"}, "/properties/a b cannot be enforced in the form of Python: its name"),
]


@pytest.mark.parametrize("parser, key, schema, why", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(parser, key, schema, why):
    """key: None where the schema is a grammar."""
    if key is None:
        tool = {"name": "f", "strict": True, "parameters": OF_TEXT, "grammar": schema}
    else:
        tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {key: schema}}}
    with pytest.raises(RequestError, match=re.escape(why)):
        Case(Format(parser, ""), (tool,)).grammar()


@pytest.mark.parametrize("parser", [Qwen3CoderParser, DSMLParser, PythonicParser])
def test_what_an_object_asks_for_as_a_whole_is_refused_where_arguments_stand_apart(parser):
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}, "minProperties": 1}}
    with pytest.raises(RequestError, match=r"The schema of f cannot be enforced in the form of .*: minProperties"):
        Case(Format(parser, ""), (tool,)).grammar()


@pytest.mark.parametrize("parser", [Qwen3CoderParser, DSMLParser, PythonicParser])
@pytest.mark.parametrize(
    "parameters, why",
    [
        ({"properties": "a"}, "at /properties cannot be enforced in the form of .*: it is not an object of schemas"),
        ({"properties": {}, "required": 5}, "at /required cannot be enforced in the form of .*: it is not a list of names"),
        ({"properties": {}, "required": [{}]}, "at /required cannot be enforced in the form of .*: it is not a list of names"),
        ({"properties": {"a": {"anyOf": 5}}}, "anyOf"),
        ({"properties": {"a": {"enum": 5}}}, "enum"),
        ({"properties": {"a": {"enum": [1], "type": [["integer"]]}}}, "enum with another type|/type is"),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused(parser, parameters, why):
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", **parameters}}
    with pytest.raises(RequestError, match=f"The schema of f.*({why})"):
        Case(Format(parser, ""), (tool,)).grammar()


@pytest.mark.parametrize("parser", [Qwen3CoderParser, DSMLParser, PythonicParser])
def test_a_definition_is_read_once_however_many_ways_lead_to_it(parser):
    """60**3 ways: four kilobytes of a tool held the server up for longer than anybody waits."""
    steps = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 60} for i in range(3)}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**steps, "d3": {"type": "integer"}},
    }
    tool = {"name": "f", "strict": True, "parameters": schema}
    started = time.thread_time()
    case = Case(Format(parser, ""), (tool,))
    assert time.thread_time() - started < 2
    text = {
        Qwen3CoderParser: "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
        DSMLParser: '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">5</｜DSML｜parameter></｜DSML｜invoke>',
        PythonicParser: "[f(a=5)]",
    }[parser]
    assert case.grammar() is not None
    assert case.events(text)[1] == Arguments('{"a": 5}')


@pytest.mark.parametrize("parser", [Qwen3CoderParser, DSMLParser, PythonicParser])
def test_definitions_that_would_be_written_too_often_are_refused(parser):
    items = [{"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": i} for i in range(200)]
    schema = {"type": "object", "properties": {"a": {"anyOf": items}}, "$defs": {"d": {"enum": ["x" * 50_000]}}}
    with pytest.raises(
        RequestError, match=r"The schema of f cannot be enforced .* its definitions would be written with"
    ):
        parser.call_format(ParserContext(tools=[{"name": "f", "strict": True, "parameters": schema}]), is_parallel=True)
