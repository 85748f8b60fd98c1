"""Offers the built-in structured-output backends."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_structured_output_backends() -> Sequence[Entry]:
    package = "pelton_plugins.structured_output"
    return [
        Entry(name="auto", load=f"{package}.auto:AutoBackend", priority=60,
              doc="outlines for small regexes and choices, llguidance for the rest"),
        Entry(name="llguidance", load=f"{package}.llguidance_backend:LLGuidanceBackend", priority=50,
              doc="every constraint; masks are computed from the grammar as the text grows"),
        Entry(name="guidance", load=f"{package}.llguidance_backend:LLGuidanceBackend", priority=1,
              doc="vLLM's name of llguidance"),
        Entry(name="outlines", load=f"{package}.outlines_backend:OutlinesBackend", priority=40,
              doc="regex and choice; masks of all states are computed before the first token"),
    ]  # fmt: skip
