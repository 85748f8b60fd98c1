"""Conformance of this package's parser: each sample is cut at every place."""

from __future__ import annotations

from pelton.parsing.interface import Arguments, Content, ToolCall
from pelton.testing.output_parser import OutputParserConformance, Sample

from pelton_skeleton.parser import SkeletonParser


class TestSkeletonParser(OutputParserConformance):
    parser_class = SkeletonParser
    samples = (
        Sample('Ok. <call>f {"x": "</call>"}</call>', [Content("Ok."), ToolCall("f"), Arguments('{"x": "</call>"}')]),
        Sample("<call>f</call>", [ToolCall("f"), Arguments("{}")]),
        Sample("a <call", [Content("a <call")]),
    )
