"""A parser of reasoning: `<skeleton>...</skeleton>` before the answer.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.2,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_reasoning_parsers() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.parser:SkeletonParser", doc="--reasoning-parser skeleton")]
