"""A weight loader: a checkpoint in one .npz file of NumPy.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import LoaderEntry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_model_loaders() -> Sequence[LoaderEntry]:
    return [LoaderEntry(name="skeleton", load="pelton_skeleton.loader:SkeletonLoader", doc="weights.npz")]
