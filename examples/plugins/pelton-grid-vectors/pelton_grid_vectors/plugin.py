"""Offers the IO processor. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"


@hookimpl
def pelton_io_processors() -> Sequence[Entry]:
    return [
        Entry(name="grid", load="pelton_grid_vectors.processor:GridProcessor", doc="a vector for each patch of a grid")
    ]
