"""Tool parsers of `pelton_tool_parsers`, with answers as models write them; those that peers got wrong are marked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pelton.parsing.interface import Arguments, Content, ParserContext, Reasoning, ToolCall
from pelton.testing.output_parser import OutputParserConformance, Sample
from pelton_plugins.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from pelton_plugins.parsers.dsml import DSMLParser
from pelton_plugins.parsers.harmony import HarmonyParser
from pelton_plugins.parsers.json_formats import (
    GraniteParser,
    HermesParser,
    JsonCallsParser,
    Llama3JsonParser,
    MistralParser,
)
from pelton_plugins.parsers.pythonic import PythonicParser
from pelton_plugins.parsers.xml_calls import Qwen3CoderParser

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            "hours": {"type": "array", "items": {"type": "integer"}},
            "ratio": {"type": "number"},
            "unit": {"enum": ["C", "F"]},
        },
        "$defs": {"Point": {"type": "object"}},
    },
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = (WEATHER, TIME)
PARIS = [ToolCall("get_weather"), Arguments('{"city": "Paris"}')]
NOW = [ToolCall("get_time"), Arguments("{}")]


def sample(text, *events, **more):
    return Sample(text, events, tools=TOOLS, **more)


class TestHermes(OutputParserConformance):
    parser_class = HermesParser
    samples = (
        sample('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', *PARIS),
        sample(
            'I look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
            Content("I look."), *PARIS, *NOW,
        ),
        # Cut off in a tag, which is no text of the answer; not so where nothing says that it is one.
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n<tool', *PARIS),
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>So <tool', *PARIS, Content("So <tool")),
        sample("<tool", Content("<tool")),
        sample('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_c', *PARIS),
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</to us', *PARIS, Content("</to us")),
        # vLLM #47901: what follows an empty call was dropped.
        sample(
            '<tool_call>{"name": "get_time"}</tool_call><tool_call>{"arguments": {"city": "Paris"}, '
            '"name": "get_weather"}</tool_call>',
            *NOW, *PARIS,
        ),
        # A closing tag within a text; quotes and brackets too.
        sample(
            '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>\\"}{"}}</tool_call> done',
            ToolCall("f"), Arguments('{"x": "a</tool_call>\\"}{"}'), Content("done"),
        ),
        # The last bracket is missing, or there is one too many, or the closing tag is missing.
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>', *PARIS),
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}</tool_call>x', *PARIS, Content("x")),
        sample('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', *PARIS),
        # Arguments in a text, and null.
        sample('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', *PARIS),
        sample('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', *NOW),
        sample('<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>', *PARIS),
        sample(
            '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}'
            "</tool_call>", *PARIS,
        ),
        # No calls at all.
        sample("Use <tool_call> tags.\n", Content("Use <tool_call> tags.\n")),
        sample('<tool_call>{"nam": 1}</tool_call>', Content('<tool_call>{"nam": 1}</tool_call>')),
        sample("a <tool_ b", Content("a <tool_ b")),
        # Text that is not ASCII, and escapes.
        sample(
            '<tool_call>{"name": "f", "arguments": {"x": "naïve \\u00e9 \\n 🎉"}}</tool_call>',
            ToolCall("f"), Arguments('{"x": "naïve \\u00e9 \\n 🎉"}'),
        ),
        # Cut off by max_tokens in the middle of the arguments.
        sample(
            '<tool_call>{"name": "f", "arguments": {"x": [1, "tw', ToolCall("f"), Arguments('{"x": [1, "tw'),
            is_sound=False,
        ),
    )  # fmt: skip


class TestGranite(OutputParserConformance):
    parser_class = GraniteParser
    samples = (
        sample('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', *PARIS),
        sample(
            '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]',
            *PARIS, *NOW,
        ),
        sample('<tool_call>[{"name": "get_time"}]</tool_call>', *NOW),
        sample('<function_call> {"name": "get_time", "arguments": {}}\n<function_call> {"name": "f"}', *NOW,
               ToolCall("f"), Arguments("{}")),
        sample("<|tool_call|>[]", Content("<|tool_call|>[]")),
    )  # fmt: skip


class TestMistral(OutputParserConformance):
    parser_class = MistralParser
    samples = (
        sample('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', *PARIS),
        sample(
            '[TOOL_CALLS][{"id": "abcdefghi", "name": "get_weather", "arguments": {"city": "Paris"}}]',
            ToolCall("get_weather", "abcdefghi"), Arguments('{"city": "Paris"}'),
        ),
        sample('Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
               Content("Well."), *PARIS, *NOW),
        sample('[TOOL_CALLS]get_weather{"city": "Paris"}', *PARIS),
        sample(
            '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}',
            ToolCall("get_weather", "a1B2c3D4e"), Arguments('{"city": "Paris"}'),
        ),
        # vLLM #20700 and others: brackets within arguments ended the list.
        sample('[TOOL_CALLS][{"name": "f", "arguments": {"x": "[[1]] }]"}}]', ToolCall("f"), Arguments('{"x": "[[1]] }]"}')),
        sample("[TOOL_CALLS]", Content("[TOOL_CALLS]")),
        sample("A list: [1, 2]", Content("A list: [1, 2]")),
    )  # fmt: skip


class TestLlama3Json(OutputParserConformance):
    parser_class = Llama3JsonParser
    samples = (
        sample('{"name": "get_weather", "parameters": {"city": "Paris"}}', *PARIS),
        sample('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', *PARIS),
        sample(
            '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", '
            '"parameters": {}}', *PARIS, *NOW,
        ),
        sample('Sure.\n{"name": "get_weather", "arguments": {"city": "Paris"}}', Content("Sure."), *PARIS),
        # An answer in JSON is no call, whatever its fields are called.
        sample('{"name": "Bob", "age": 3}', Content('{"name": "Bob", "age": 3}')),
        sample('{"answer": {"name": "get_time"}}', Content('{"answer": {"name": "get_time"}}')),
        sample('Say {"name": "get_time"} now', Content('Say {"name": "get_time"} now')),
        sample('<|python_tag|>print("x")', Content('<|python_tag|>print("x")')),
    )  # fmt: skip


class TestPythonic(OutputParserConformance):
    parser_class = PythonicParser
    samples = (
        # Half of a pair, as JSON may escape it: no text that can be sent.
        sample('[get_weather(city="\\ud83c")]', ToolCall("get_weather"), Arguments('{"city": "\\ud83c"}')),
        sample('[get_weather(city="Paris")]', *PARIS),
        sample("<|python_start|>[get_weather(city='Paris'), get_time()]<|python_end|>", *PARIS, *NOW),
        sample(
            "[get_weather(city='a, b) ]\\'', days=3, metric=True, where={'x': [1, (2, None)]}, hours=[], ratio=-.5)]",
            ToolCall("get_weather"),
            Arguments('{"city": "a, b) ]\'", "days": 3, "metric": true, "where": {"x": [1, [2, null]]}, "hours": [], '
                      '"ratio": -0.5}'),
        ),
        sample("[get_weather('Paris', 3)]", ToolCall("get_weather"), Arguments('{"city": "Paris", "days": 3}')),
        sample("[get_weather(metric=true, where=null)]", ToolCall("get_weather"), Arguments('{"metric": true, "where": null}')),
        sample("[get_weather(city=Paris)]", *PARIS),
        sample("The list [1, 2] is short.", Content("The list [1, 2] is short.")),
        sample("[unknown(x=1)]", Content("[unknown(x=1)]")),
        sample("[1](http://x)", Content("[1](http://x)")),
        sample("I look.\n[get_time()]", Content("I look."), *NOW),
    )  # fmt: skip


class TestQwen3Coder(OutputParserConformance):
    parser_class = Qwen3CoderParser
    samples = (
        sample(
            "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
            Content("I look."), *PARIS,
        ),
        sample(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\"b\"\n\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\n{'x': 1}\n</parameter>\n"
            "<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=ratio>\n1.5\n</parameter>\n<parameter=unit>\n1\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
            ToolCall("get_weather"),
            Arguments('{"city": "a\\n\\"b\\"\\n", "days": 3, "metric": true, "where": {"x": 1}, "hours": [1, 2], '
                      '"ratio": 1.5, "unit": "1"}'),
            *NOW,
        ),
        # The opening tag is missing, or a closing one; null for what may be null; a number where a text is asked for.
        *(
            sample("<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n" + cut, *PARIS)
            for cut in ("</parameter>\n<", "</parameter>\n</func", "</parameter>\n</function>\n</tool_")
        ),
        sample("<function=get_weather><parameter=city>Paris</parameter></function></tool_call>", *PARIS,
               Content("</tool_call>")),
        sample("<tool_call><function=get_weather><parameter=city>1<parameter=where>null</function></tool_call>",
               ToolCall("get_weather"), Arguments('{"city": "1", "where": null}')),
        sample("<tool_call><function=get_weather><parameter=days>many</parameter></function></tool_call>",
               ToolCall("get_weather"), Arguments('{"days": "many"}')),
        # vLLM #51697: arguments came twice.
        sample("<tool_call><function=f><parameter=a>x</parameter><parameter=a>x</parameter></function></tool_call>",
               ToolCall("f"), Arguments('{"a": "x"}')),
        sample("<tool_call><function=f><parameter=a><b>1</b> &lt; 2</parameter></function></tool_call>",
               ToolCall("f"), Arguments('{"a": "<b>1</b> &lt; 2"}')),
        sample('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', *PARIS),
        sample("<tool_call>text", Content("<tool_call>text")),
        sample("a <function=", Content("a <function=")),
    )  # fmt: skip


class TestDeepSeekV3(OutputParserConformance):
    parser_class = DeepSeekV3Parser
    samples = (
        sample(
            "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n'
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            Content("Ok."), *PARIS, *NOW,
        ),
        sample("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time<｜tool▁call▁end｜>", *NOW),
        sample('<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather{"city": "Paris"}<｜tool▁call▁end｜>', *PARIS),
    )  # fmt: skip


class TestDeepSeekV31(OutputParserConformance):
    parser_class = DeepSeekV31Parser
    samples = (
        sample(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", *PARIS, *NOW,
        ),
        sample('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}', *PARIS),
        sample("<｜tool▁call▁begin｜>x", Content("<｜tool▁call▁begin｜>x")),
    )  # fmt: skip


def dsml(name, *parameters, block="function_calls"):
    """A block with one call, as DeepSeek's own encoding writes it."""
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for key, is_text, value in parameters
    )
    return f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n</｜DSML｜{block}>'


class TestDSML(OutputParserConformance):
    parser_class = DSMLParser
    samples = (
        sample("I look.\n\n" + dsml("get_weather", ("city", "true", "Paris")), Content("I look."), *PARIS),
        sample(dsml("get_weather", ("city", "true", "Paris"), block="tool_calls"), *PARIS),
        sample(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
            'Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>", *PARIS, *NOW,
        ),
        # What is marked as text stays as it is, line breaks at its ends and what looks like JSON or a tag too.
        sample(
            dsml("f", ("a", "true", '\n"1"\n'), ("b", "true", "3"), ("c", "true", "</parameter> <｜DSML｜ </invoke>")),
            ToolCall("f"), Arguments('{"a": "\\n\\"1\\"\\n", "b": "3", "c": "</parameter> <｜DSML｜ </invoke>"}'),
        ),
        sample(
            dsml("f", ("a", "false", "3"), ("b", "false", '{"x": [1, null]}'), ("c", "false", "true"), ("d", "false", "many")),
            ToolCall("f"), Arguments('{"a": 3, "b": {"x": [1, null]}, "c": true, "d": "many"}'),
        ),
        # The attribute is missing: the schema says it. The same parameter twice; tags that do not close.
        sample(
            '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city">1</｜DSML｜parameter><｜DSML｜parameter name="days">3'
            '<｜DSML｜parameter name="city">2</｜DSML｜invoke>', ToolCall("get_weather"), Arguments('{"city": "1", "days": 3}'),
        ),
        sample('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris',
               *PARIS),
        # No calls at all.
        sample("<｜DSML｜function_calls> are tags", Content("<｜DSML｜function_calls> are tags")),
        sample("</｜DSML｜function_calls>", Content("</｜DSML｜function_calls>")),
        sample('<｜DSML｜invoke name="x\ny', Content('<｜DSML｜invoke name="x\ny')),
    )  # fmt: skip


class TestHarmony(OutputParserConformance):
    parser_class = HarmonyParser
    samples = (
        sample(
            "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
            Reasoning("Need the weather."), *PARIS,
        ),
        sample(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
            Reasoning("Hm."), Content("It rains."),
        ),
        sample(
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
            'commentary json<|message|>{"city": "Paris"}<|call|><|start|>assistant to=functions.get_time<|channel|>'
            "commentary<|message|><|call|>",
            Content("I look."), *PARIS, *NOW,
        ),
        sample("more.<|end|><|start|>assistant<|channel|>final<|message|>Yes", Reasoning("more."), Content("Yes"),
               prompt="<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>"),
        # The message before ends without a marker.
        sample("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", Reasoning("a"), Content("b")),
    )  # fmt: skip


class TestJsonCalls(OutputParserConformance):
    parser_class = JsonCallsParser
    samples = (
        sample('[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]', *PARIS, *NOW),
        sample(' {"name": "get_weather", "parameters": {"city": "Paris"}}', *PARIS),
        # Cut off in a further call: its beginning is no text, not so what is not the beginning of a call.
        *(
            sample('[{"name": "get_weather", "parameters": {"city": "Paris"}}' + cut, *PARIS)
            for cut in (",", ", {", ', {"na', ', {"name": "get_t', ', {"name": "get_time"', ', {"name": "get_time", "par')
        ),
        sample('[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"x" 1', *PARIS, Content('{"x" 1')),
        sample('[{"na', Content('[{"na')),
        sample("[]", Content("[]")),
    )  # fmt: skip


def test_a_parser_says_which_of_its_texts_may_be_special_tokens():
    context = ParserContext()
    assert "[TOOL_CALLS]" in MistralParser.markers(context)
    assert set(GraniteParser.markers(context)) >= {"<|tool_call|>", "</tool_call>"}


def test_the_suite_finds_a_parser_that_reads_everything_with_each_token(monkeypatch):
    """By a clock that says how many characters have been read."""
    spent = [0.0]
    monkeypatch.setattr("pelton.testing.output_parser.time", SimpleNamespace(thread_time=lambda: spent[0]))

    class Reads(HermesParser):
        reads_again = False

        def feed(self, text):
            self.seen = getattr(self, "seen", 0) + len(text)
            spent[0] += (self.seen if self.reads_again else len(text)) * 1e-8
            return super().feed(text)

    class Suite(OutputParserConformance):
        parser_class = Reads
        samples = (sample("text", Content("text")),)

    Suite().test_a_long_answer_takes_no_more_than_seconds()
    Reads.reads_again = True
    with pytest.raises(AssertionError):
        Suite().test_a_long_answer_takes_no_more_than_seconds()


@pytest.mark.parametrize(
    "own", [{"anyOf": 5}, {"oneOf": {"a": 1}}, {"enum": 5}, {"type": 5}, {"$ref": 5}, {"const": [1]}]
)
@pytest.mark.parametrize(
    "parser_class, text",
    [
        (Qwen3CoderParser, "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"),
        (DSMLParser, '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">x</｜DSML｜parameter></｜DSML｜invoke>'),
        (PythonicParser, "[f(a='x')]"),
    ],
)
def test_a_schema_that_is_none_leaves_an_argument_as_it_is_written(parser_class, text, own):
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": own}}}]
    parser = parser_class(ParserContext(tools=tools))
    events = [*parser.feed(text), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == '{"a": "x"}'


@pytest.mark.parametrize("number", [f"0x{'f' * 5000}", f"[0b{'1' * 20_000}]", "1" * 5000])
def test_a_number_that_python_cannot_write_is_a_text(number):
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": ["integer", "array"]}}}}]
    parser = PythonicParser(ParserContext(tools=tools))
    events = [*parser.feed(f"[f(a={number})]"), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, Arguments)) == f'{{"a": "{number}"}}'
