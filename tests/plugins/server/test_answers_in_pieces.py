"""Answers as the server reads them, with every reasoning parser before every tool parser: however they come in pieces, and wherever
they end, the events are those of the whole text."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from pelton_fake_server import RoutesOnly

from pelton.entries import Entry
from pelton.errors import EngineError, PluginError
from pelton.parsing.interface import Arguments, Content, OutputParser, ParserContext, Reasoning, ToolCall
from pelton.testing.output_parser import merged
from pelton_plugins.parsers.plugin import pelton_reasoning_parsers, pelton_tool_parsers
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.parsing import AnswerPlan, AnswerReader, NamedReader, Parsers

TOOLS = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "get_time", "parameters": {"type": "object"}},
]
CALLED = [ToolCall("get_weather"), Arguments('{"city": "Paris"}'), ToolCall("get_time"), Arguments("{}")]
REASONED = {
    "think": "<think>\nHm, 2 < 3.\n</think>\n\n",
    "qwen3": "<think>Hm, 2 < 3.</think>",
    "deepseek_r1": "Hm, 2 < 3.\n</think>\n",
    "mistral": "[THINK]Hm, 2 < 3.[/THINK]",
    "granite": "Here is my thought process: Hm, 2 < 3. Here is my response: ",
}
WEATHER_CALL, TIME_CALL = (
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    '{"name": "get_time", "arguments": {}}',
)
HERMES = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>\n{TIME_CALL}\n</tool_call>"
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
)
PYTHONIC = "[get_weather(city='Paris'), get_time()]"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
CALLS = {
    "hermes": HERMES, "qwen": HERMES, "qwen3_coder": CODER, "qwen3_xml": CODER,
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}',
    "llama4_pythonic": PYTHONIC, "pythonic": PYTHONIC,
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                   '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n'
                   "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
                    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": DSML, "deepseek_v4": DSML,
    "granite": f"<|tool_call|>[{WEATHER_CALL}, {TIME_CALL}]",
    "json_calls": '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]',
}  # fmt: skip
READ_BOTH = {"openai", "gpt_oss", "openai_gptoss", "response_template"}
"""Parsers that read reasoning and calls themselves: their own tests cut their samples."""
CHANNELS = (
    "<|channel|>analysis<|message|>Hm, 2 < 3.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|><|start|>assistant'
    "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>"
)


def events_of(reader: AnswerReader | NamedReader, *parts: str) -> list[object]:
    return merged([*(event for part in parts for event in reader.feed(part)), *reader.finish()])


def check(make_reader, text: str, expected: list[object]) -> None:
    assert events_of(make_reader(), text) == expected
    assert events_of(make_reader(), *text) == expected
    for cut in range(1, len(text)):
        assert events_of(make_reader(), text[:cut], text[cut:]) == expected, f"cut at {cut}: {text[:cut]!r}"
        if cut % 5:
            continue
        cut_off = text[:cut]
        assert events_of(make_reader(), cut_off) == events_of(make_reader(), *cut_off), f"ended at {cut}: {cut_off!r}"


def plan(tools: str = "auto", **names: str):
    return Parsers(ServerConfig(**names), RoutesOnly()).plan(ParserContext(tools=TOOLS), tools=tools)


def once(texts: dict[str, str], entries) -> list[str]:
    """Names with a parser of their own; the others are second names."""
    loads = {entry.load: entry.name for entry in reversed(entries)}
    return [name for name in texts if name in loads.values()]


def test_every_parser_is_here():
    assert {entry.name for entry in pelton_tool_parsers()} == CALLS.keys() | READ_BOTH - {"openai_gptoss"}
    assert {entry.name for entry in pelton_reasoning_parsers()} == REASONED.keys() | READ_BOTH - {"openai"}


@pytest.mark.parametrize("reasoning", once(REASONED, pelton_reasoning_parsers()))
@pytest.mark.parametrize("tool", once(CALLS, pelton_tool_parsers()))
def test_reasoning_before_calls(reasoning, tool):
    made = plan(reasoning_parser=reasoning, tool_call_parser=tool)
    between = "" if tool == "json_calls" else "I look.\n"
    said = [Content("I look.")] if between else []
    check(
        lambda: AnswerReader(made),
        REASONED[reasoning] + between + CALLS[tool],
        [Reasoning("Hm, 2 < 3."), *said, *CALLED],
    )


@pytest.mark.parametrize("reasoning", REASONED)
def test_an_answer_that_calls_nothing(reasoning):
    made = plan(reasoning_parser=reasoning, tool_call_parser="hermes")
    check(
        lambda: AnswerReader(made),
        REASONED[reasoning] + "Yes, <tool.",
        [Reasoning("Hm, 2 < 3."), Content("Yes, <tool.")],
    )


@pytest.mark.parametrize("reasoning", REASONED)
def test_calls_that_are_forced(reasoning):
    required = plan("required", reasoning_parser=reasoning)
    check(lambda: AnswerReader(required), REASONED[reasoning] + CALLS["json_calls"], [Reasoning("Hm, 2 < 3."), *CALLED])
    named = plan("named", reasoning_parser=reasoning)
    text = REASONED[reasoning] + '{"city": "Paris"}'
    check(
        lambda: NamedReader("get_weather", AnswerReader(named)), text, [Reasoning("Hm, 2 < 3."), *CALLED[:2]],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["openai", "gpt_oss"])
def test_channels(name):
    made = plan(reasoning_parser=name if name != "openai" else "openai_gptoss", tool_call_parser=name)
    check(lambda: AnswerReader(made), CHANNELS, [Reasoning("Hm, 2 < 3."), Content("I look."), *CALLED])


class Broken(OutputParser):
    """A parser of a plugin, with one method that fails."""

    fails: ClassVar[str] = ""

    def __init__(self, context):
        self.fail("__init__")

    @classmethod
    def fail(cls, method):
        if method == cls.fails:
            raise KeyError("what the model said")

    @classmethod
    def markers(cls, context):
        cls.fail("markers")
        return ("[[",)

    def feed(self, text):
        self.fail("feed")
        return [Content(text)] if self.fails != "none" else None

    def finish(self):
        self.fail("finish")
        return []


@pytest.mark.parametrize("fails", ["__init__", "feed", "none", "finish"])
def test_a_parser_that_fails_is_named_and_what_it_says_is_for_the_log(fails, caplog, monkeypatch):
    monkeypatch.setattr(Broken, "fails", fails)
    with pytest.raises(EngineError) as caught:
        reader = AnswerReader(AnswerPlan([Broken], ParserContext()))
        reader.feed("a")
        reader.finish()
    assert str(caught.value).startswith(f"A parser of the answer failed ({__name__}:Broken).")
    assert "what the model said" not in str(caught.value)
    assert fails == "none" or "what the model said" in caplog.text


class Half(OutputParser):
    def feed(self, text):
        return []


class OneMarker(Broken):
    @classmethod
    def markers(cls, context):
        return "[["


@pytest.mark.parametrize(
    "found, words",
    [
        (Half, "it lacks __init__, finish, markers"),
        (json, "not a class made from pelton.parsing.interface.OutputParser"),
        (OneMarker, r"its markers are '\[\[', not a list of texts"),
        (type("Failing", (Broken,), {"fails": "markers"}), "KeyError: 'what the model said'"),
    ],
)
@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_a_parser_that_could_read_no_answer_stops_the_start(found, words, setting, monkeypatch):
    entry = Entry(name="mine", load="acme.parsers:Mine")
    monkeypatch.setattr(Entry, "resolve", lambda self: found)
    offered = RoutesOnly()
    monkeypatch.setattr(offered, "find", lambda hook, name, **kwargs: entry)
    with pytest.raises(PluginError, match=words) as caught:
        Parsers(ServerConfig(**{setting: "mine"}), offered)
    assert "'mine' (acme.parsers:Mine)" in str(caught.value)
