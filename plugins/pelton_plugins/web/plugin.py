"""Offers the page for people, at `/`."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_http_routes() -> Sequence[Entry]:
    return [
        Entry(
            name="page",
            load="pelton_plugins.web.routes:routes",
            doc="/, a page to chat with the model and to watch the engine",
        )
    ]
