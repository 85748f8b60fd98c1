"""A quantization method: weights rounded to q8_0 blocks while they load.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_quantization_methods() -> Sequence[Entry]:
    return [Entry(name="skeleton", load="pelton_skeleton.method:SkeletonWeights", doc="int8 in blocks of 32")]
