"""A model source: names skeleton://PATH.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_model_sources() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.source:find", doc="skeleton:///path/of/a/model")]
