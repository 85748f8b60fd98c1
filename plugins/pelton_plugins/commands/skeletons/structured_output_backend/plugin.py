"""A structured-output backend: one of several texts, token by token.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_structured_output_backends() -> Sequence[Entry]:
    # Priority 5: below any other.
    return [Entry(name="skeleton", load="pelton_skeleton.grammar:SkeletonBackend", priority=5, doc="choice alone")]
