"""HTTP middleware: refuses requests of tenants that a header names and nobody knows.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_http_middleware() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.middleware:wrap", doc="checks the header x-tenant")]
