"""Offers the built-in KV connectors."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import Entry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_kv_connectors() -> Sequence[Entry]:
    return [
        Entry(
            name="shared_storage",
            aliases=("SharedStorageConnector",),
            load="pelton_plugins.kv_connectors.shared_storage:SharedStorage",
            doc="saves the blocks of prompts as files in a folder, and loads those that are there",
        )
    ]
