"""A model format: a folder whose config is called skeleton.json.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_model_formats() -> Sequence[Entry]:
    # Asked before the built-in format of folders, which has priority 10 and takes any folder.
    return [Entry(name="skeleton", load="pelton_skeleton.format:SkeletonFormat", doc="a folder with skeleton.json")]
