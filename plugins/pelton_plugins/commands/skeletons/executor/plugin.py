"""An executor: one worker in the engine's process, with a counter of steps.

Offered here; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import Entry

PELTON_API = ">=1,<2"
PELTON_CONFORMANCE = "pelton_skeleton.conformance"


@hookimpl
def pelton_executors() -> Sequence[Entry]:
    # Priority 5: below the built-in one, and named by `--distributed-executor-backend skeleton`.
    return [Entry(name="skeleton", load="pelton_skeleton.executor:SkeletonExecutor", priority=5)]
