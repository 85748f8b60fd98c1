"""A whole-step kernel: a decode step of Llama on the CPU, in torch.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1.2,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_step_kernels(device_type: str) -> Sequence[Entry]:
    if device_type != "cpu":
        return []
    return [
        Entry(name="skeleton", load="pelton_skeleton.kernel:SkeletonStep", priority=50, doc="--step-kernel skeleton")
    ]
