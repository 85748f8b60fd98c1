"""Offers the logits processor. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.2,<2"
PELTON_CONFORMANCE = "pelton_no_repeat.conformance"


@hookimpl
def pelton_logits_processors() -> Sequence[Entry]:
    return [
        Entry(name="no_repeat", load="pelton_no_repeat.processor:NoRepeat", doc="no n tokens occur twice in a text")
    ]
