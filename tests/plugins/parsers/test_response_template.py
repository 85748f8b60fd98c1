"""Answers read as the checkpoint's `response_template` describes them; transformers reads the same."""

from __future__ import annotations

import json
import random
import re

import pytest

from pelton.errors import ConfigError
from pelton.parsing.interface import Arguments, Content, ParserContext, Reasoning, ToolCall
from pelton.testing.output_parser import OutputParserConformance, Sample, merged
from pelton_plugins.parsers.partial_match import first_partial
from pelton_plugins.parsers.response_template import ResponseTemplateParser

TAGS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
JSON = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
LIST = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]", "close": "</s>", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"close": "</s>"},
    },
}  # fmt: skip
TOOL = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
}
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class TestResponseTemplate(OutputParserConformance):
    parser_class = ResponseTemplateParser
    context = ParserContext(response_template=JSON)
    samples = (
        Sample(
            "Hm.\n</think>\n\nI look.\n<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            [Reasoning("Hm."), Content("I look."), ToolCall("f"), Arguments('{"n": 7, "s": "7"}')],
            prompt=PROMPT + "<think>\n", tools=(TOOL,), response_template=TAGS,
        ),
        Sample(
            "<think>Hm</think> Yes. <|im_end|>\n<|endoftext|>", [Reasoning("Hm"), Content("Yes.")],
            prompt=PROMPT, response_template=TAGS,
        ),
        Sample("1 < 2 <tool", [Content("1 < 2 <tool")], prompt=PROMPT, response_template=TAGS),
        Sample(
            '<|channel>thought\nHm<channel|><|tool_call>call:f{n:1,s:<|"|>a"b<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>',
            [Reasoning("Hm"), ToolCall("f"), Arguments('{"n": 1, "s": "a\\"b"}'), ToolCall("g"), Arguments("{}")],
            prompt="<|turn>model\n", response_template=JSON,
        ),
        Sample("<|tool_call>call:f{n:<tool_call|>x", [Content("<|tool_call>call:f{n:x")], response_template=JSON),
        Sample(
            'Ok[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]</s>',
            [Content("Ok"), ToolCall("f"), Arguments('{"n": 1}'), ToolCall("g"), Arguments("{}")],
            prompt="[INST]x[/INST]", response_template=LIST,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("sample", TestResponseTemplate.samples, ids=range(len(TestResponseTemplate.samples)))
def test_transformers_finds_the_same(sample):
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = {"defaults": {}, **sample.response_template}
    try:
        message = parsing.parse_response(
            sample.text, template, prefix=sample.prompt, tools=[dict(one) for one in sample.tools]
        )
    except ValueError:
        pytest.skip("transformers raises where the text is given as content")
    found = merged(_events(sample))
    reasoning = next((message[name] for name in ("reasoning_content", "thinking") if name in message), None)
    calls = [
        call for calls in message.get("tool_calls", ()) for call in (calls if isinstance(calls, list) else [calls])
    ]
    assert [event.text for event in found if isinstance(event, Reasoning)] == ([reasoning] if reasoning else [])
    assert "".join(event.text for event in found if isinstance(event, Content)) == message.get("content", "")
    assert [event.name for event in found if isinstance(event, ToolCall)] == [
        call["function"]["name"] for call in calls
    ]
    assert [json.loads(event.text) for event in found if isinstance(event, Arguments)] == [
        call["function"]["arguments"] for call in calls
    ]


def _events(sample):
    parser = ResponseTemplateParser(
        ParserContext(prompt=sample.prompt, tools=sample.tools, response_template=sample.response_template)
    )
    return [*parser.feed(sample.text), *parser.finish()]


@pytest.mark.parametrize(
    "template, what",
    [
        ({"fields": {"content": {"content": "yaml"}}}, "yaml"),
        ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "anchor"),
        ({"fields": {"content": {}, "reasoning_content": {}}}, "no opening"),
        ({"fields": {"content": {"open_pattern": "("}}}, "not valid"),
        ({"fields": {"content": {"opens": "x"}}}, "opens"),
        ({}, "fields"),
    ],
)
def test_a_template_that_is_not_sound_is_refused(template, what):
    with pytest.raises(ConfigError, match=what):
        ResponseTemplateParser(ParserContext(response_template=template))


PATTERNS = (r"\s*<call>", r"ab|abc", r"a+b{2,3}c?", r"[^x]y", r"(?P<n>\w+)=\d", r"<a>.*?</a>", r"(ab)*c", r"\bend\b")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_partial_match_is_never_missed(pattern):
    """Whatever text comes next: a match that begins before the place that is given was there already."""
    compiled, chooser = re.compile(pattern, re.DOTALL), random.Random(pattern)
    letters = "abcxy<>/=1 \n" + pattern[:6]
    for _ in range(400):
        text = "".join(chooser.choices(letters, k=chooser.randrange(1, 9)))
        more = "".join(chooser.choices(letters, k=4))
        held = first_partial(compiled, text, 0)
        later = compiled.search(text + more)
        now = compiled.search(text)
        if later is not None and later.start() < held:
            assert now is not None and now.span() == later.span(), (text, more, held)
