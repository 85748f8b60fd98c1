"""Reasoning parsers of `pelton_reasoning_parsers`."""

from __future__ import annotations

from pelton.parsing.interface import Content, Reasoning
from pelton.testing.output_parser import OutputParserConformance, Sample
from pelton_plugins.parsers.reasoning import (
    DeepSeekR1Parser,
    GraniteReasoningParser,
    MistralReasoningParser,
    ThinkParser,
)

OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TestThink(OutputParserConformance):
    parser_class = ThinkParser
    samples = (
        Sample("<think>\nHm, 2 < 3.\n\nSo.\n</think>\n\nYes.\n", [Reasoning("Hm, 2 < 3.\n\nSo."), Content("Yes.\n")]),
        Sample("Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")], prompt=OPEN),
        Sample("<think>Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")], prompt=OPEN),
        # Thinking is off: the answer is no reasoning, whatever is in it.
        Sample("Yes, <think> is a tag.", [Content("Yes, <think> is a tag.")], prompt=CLOSED),
        Sample("Yes.</thin", [Content("Yes.</thin")], prompt=CLOSED),
        Sample("<think></think>Yes.", [Content("Yes.")]),
        Sample("<think>\n\n</think>", []),
        Sample("<think>never done", [Reasoning("never done")]),
        Sample("\n Yes.", [Content("\n Yes.")]),
    )


class TestDeepSeekR1(OutputParserConformance):
    parser_class = DeepSeekR1Parser
    samples = (
        Sample("Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        Sample("<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        Sample("Yes.", [Content("Yes.")], prompt=CLOSED),
    )


class TestMistral(OutputParserConformance):
    parser_class = MistralReasoningParser
    samples = (Sample("[THINK]Hm [1].[/THINK]Yes.", [Reasoning("Hm [1]."), Content("Yes.")]),)


class TestGranite(OutputParserConformance):
    parser_class = GraniteReasoningParser
    samples = (
        Sample("Here is my thought process: Hm. Here is my response: Yes.", [Reasoning("Hm."), Content("Yes.")]),
        Sample("Here's my thought process:\nHm.\n\nHere's my response:\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        Sample("Here is my answer.", [Content("Here is my answer.")]),
    )
