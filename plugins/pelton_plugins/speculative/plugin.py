"""Offers the built-in draft proposers."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_draft_proposers() -> Sequence[Entry]:
    return [
        Entry(
            name="ngram",
            load="pelton_plugins.speculative.ngram:NgramProposer",
            doc="looks up the end of the text earlier in it, and proposes what followed there",
        )
    ]
