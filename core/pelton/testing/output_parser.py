"""Conformance of parsers of tool calls and of reasoning: what any implementation has to keep, run with pytest.

Subclass `OutputParserConformance` in a test module; say what is made, and what it has to find in answers of the model:

    class TestMine(OutputParserConformance):
        parser_class = MyParser
        samples = (Sample("<call>f{}</call>", [ToolCall("f"), Arguments("{}")]),)
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from pelton.parsing.interface import Arguments, Content, Event, OutputParser, ParserContext, Reasoning, ToolCall

PLAIN = "Hello, world: 2 < 3."


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer, and what is in it."""

    text: str
    events: Sequence[Event]
    """Texts that follow each other joined."""
    prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    response_template: Mapping[str, Any] | None = None
    is_sound: bool = True
    """The arguments of its calls are JSON objects."""


def merged(events: Iterable[Event]) -> list[Event]:
    """Join texts of one kind that follow each other."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, (Content, Reasoning, Arguments)) and type(last) is type(event):
            assert isinstance(last, (Content, Reasoning, Arguments))
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


class OutputParserConformance:
    parser_class: ClassVar[type[OutputParser]]
    samples: ClassVar[Sequence[Sample]]
    context: ClassVar[ParserContext] = ParserContext()
    """Of the answers that are made up beside the samples."""

    def events(self, sample: Sample, *parts: str) -> list[Event]:
        """Return what a new parser makes of these parts, joined."""
        context = ParserContext(prompt=sample.prompt, tools=sample.tools, response_template=sample.response_template)
        parser = self.parser_class(context)
        found: list[Event] = []
        for part in parts:
            found += parser.feed(part)
        return merged([*found, *parser.finish()])

    def test_finds_what_is_in_the_samples(self) -> None:
        assert self.samples, "give some samples"
        for sample in self.samples:
            assert self.events(sample, sample.text) == list(sample.events), sample.text

    def test_a_stream_differs_in_nothing(self) -> None:
        """Each sample in two parts, cut at every place; in single characters; and in random parts."""
        chooser = random.Random(0)
        for sample in self.samples:
            text, whole = sample.text, self.events(sample, sample.text)
            assert self.events(sample, *text) == whole, f"character by character: {text!r}"
            for cut in range(len(text) + 1):
                assert self.events(sample, text[:cut], text[cut:]) == whole, f"cut at {cut}: {text!r}"
            for _ in range(20):
                cuts = sorted(chooser.choices(range(len(text) + 1), k=5))
                parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
                assert self.events(sample, *parts) == whole, parts

    def test_an_answer_may_end_anywhere(self) -> None:
        for sample in self.samples:
            for cut in range(len(sample.text)):
                text = sample.text[:cut]
                assert self.events(sample, text) == self.events(sample, *text), f"ended at {cut}: {sample.text!r}"

    def test_arguments_of_whole_calls_are_json_objects(self) -> None:
        for sample in self.samples:
            events = self.events(sample, sample.text)
            for event, after in pairwise([*events, None]):
                if isinstance(event, ToolCall):
                    assert event.name and isinstance(after, Arguments), f"a call without arguments: {sample.text!r}"
                    assert not sample.is_sound or isinstance(json.loads(after.text), dict), after.text

    def test_plain_text_stays_as_it_is(self) -> None:
        for parts in ([PLAIN], list(PLAIN)):
            parser = self.parser_class(self.context)
            events = [event for part in parts for event in parser.feed(part)]
            found = merged([*events, *parser.finish()])
            assert found in ([Content(PLAIN)], [Reasoning(PLAIN)]), found

    def test_an_answer_may_be_empty(self) -> None:
        assert not self.parser_class(self.context).finish()

    def test_markers_are_texts(self) -> None:
        markers = self.parser_class.markers(self.context)
        assert not isinstance(markers, str), f"markers is {markers!r}, one text; return a tuple of texts"
        assert markers is None or all(isinstance(marker, str) and marker for marker in markers)
        assert all(isinstance(text, str) and text for text in self.parser_class.reasoning_end)

    def test_a_long_answer_takes_no_more_than_seconds(self) -> None:
        """A parser that reads everything again with each token would stop the server."""
        began = time.thread_time()  # of the processor: the machine may have other work
        for sample in self.samples:
            self.events(sample, sample.text[: len(sample.text) // 2], *["word "] * 10_000)
        assert time.thread_time() - began < 2 * len(self.samples)
