"""The built-in parser of tags, with other tags."""

from __future__ import annotations

from pelton_plugins.parsers.reasoning import ThinkParser


class SkeletonParser(ThinkParser):
    """Reasoning between two tags; the prompt may have opened it."""

    OPEN, CLOSE = "<skeleton>", "</skeleton>"
    reasoning_end = (CLOSE,)
