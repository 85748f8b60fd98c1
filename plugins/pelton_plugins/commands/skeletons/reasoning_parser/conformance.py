"""Conformance of this package's parser: each sample is cut at every place."""

from __future__ import annotations

from pelton.parsing.interface import Content, Reasoning
from pelton.testing.output_parser import OutputParserConformance, Sample

from pelton_skeleton.parser import SkeletonParser


class TestSkeletonParser(OutputParserConformance):
    parser_class = SkeletonParser
    samples = (
        Sample("<skeleton>Hm.</skeleton>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        Sample("Hm.</skeleton>Yes.", [Reasoning("Hm."), Content("Yes.")], prompt="assistant: <skeleton>\n"),
        Sample("Yes.", [Content("Yes.")]),
    )
