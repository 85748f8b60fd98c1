"""Counts requests that finished."""

from __future__ import annotations

import logging

from pelton.config import EngineConfig
from pelton.metrics.snapshot import Counter, Metric
from pelton.metrics.stats import IterationStats, SchedulerStats


class SkeletonLogger:
    """One instance per engine, in the front-end process."""

    def __init__(self, config: EngineConfig, engine_index: int = 0) -> None:
        self._labels = {"engine": str(engine_index)}
        self._num_finished = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Add up, and no more: this is called for every batch of outputs."""
        self._num_finished += len(iteration_stats.finished_requests)

    def log(self) -> None:
        logging.getLogger(__name__).info("skeleton: %d requests finished", self._num_finished)

    def snapshot(self) -> list[Metric]:
        return [
            Counter(
                name="skeleton_finished",
                documentation="Requests that finished.",
                labels=self._labels,
                value=self._num_finished,
            )
        ]
