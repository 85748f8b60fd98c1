"""An IO processor: a list of token ids in, the length of its vector out.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_io_processors() -> Sequence[Entry]:
    return [
        Entry(name="skeleton", load="pelton_skeleton.processor:SkeletonProcessor", doc="--io-processor-plugin skeleton")
    ]
