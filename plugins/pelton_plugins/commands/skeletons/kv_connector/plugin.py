"""A KV connector: blocks of finished prompts in files, which other engines find.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_kv_connectors() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.connector:SkeletonConnector", doc="kv_connector skeleton")]
