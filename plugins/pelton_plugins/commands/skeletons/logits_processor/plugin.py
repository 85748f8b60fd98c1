"""A logits processor: tokens that a request may not begin with.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.2,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_logits_processors() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.processor:SkeletonProcessor", doc="logits_processor_args")]
