"""The blocks that all rows of a decode step share, so that a kernel may read them once for all."""

from __future__ import annotations

from pelton.kv_cache.interface import KVCacheManager
from pelton_plugins.scheduler.step import OpenStep

LEAST_ROWS = 8
"""Of a decode step: fewer are not asked for a common prefix, reading it once would gain nothing."""


class CommonPrefix:
    """Found again only when the rows change."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._slots: list[int] = []  # rows that `_num_blocks` was found for
        self._num_blocks: list[int] = []

    def note(self, step: OpenStep) -> None:
        """Enter the leading blocks that the step's rows share, per group."""
        output = step.output
        if output.new:
            self._slots = []
        elif len(output.slots) == output.total_num_scheduled_tokens >= LEAST_ROWS:
            if output.slots != self._slots:
                self._slots = output.slots
                counts = self._kv.num_common_prefix_blocks([request.request_id for request in step.requests])
                self._num_blocks = counts if any(counts) else []
            output.common_prefix_blocks = self._num_blocks
