"""One log line per interval: what runs, what waits, how full the cache is, how fast tokens come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pelton.config import EngineConfig
from pelton.metrics.stats import IterationStats, SchedulerStats
from pelton_plugins.stat_loggers.hit_rate import HitRateWindow

logger = logging.getLogger("pelton.stats")


class LogLineLogger:
    """Quiet when idle: the first line after the last activity is written, later ones only at debug level."""

    def __init__(
        self, config: EngineConfig, engine_index: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine_index = engine_index
        self._clock = clock
        self._last = clock()
        self._was_active = False
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0
        self._scheduler = SchedulerStats()
        self._hits = HitRateWindow()

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        self._num_prompt_tokens += iteration_stats.num_prompt_tokens
        self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._scheduler = scheduler_stats
            self._num_preemptions += scheduler_stats.num_preemptions
            self._hits.observe(
                scheduler_stats.prefix_cache_requests,
                scheduler_stats.prefix_cache_queries,
                scheduler_stats.prefix_cache_hits,
            )

    def log(self) -> None:
        now = self._clock()
        elapsed = max(now - self._last, 1e-9)
        stats = self._scheduler
        is_active = bool(
            self._num_prompt_tokens or self._num_generation_tokens or stats.num_running_reqs or stats.num_waiting_reqs
        )
        level = logging.INFO if is_active or self._was_active else logging.DEBUG
        preempted = f", preempted: {self._num_preemptions}" if self._num_preemptions else ""
        logger.log(
            level,
            "Engine %03d: running: %d, waiting: %d, KV cache: %.1f%%, prompt: %.1f tokens/s, "
            "generated: %.1f tokens/s, prefix cache hits: %.1f%%%s",
            self._engine_index,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            self._num_prompt_tokens / elapsed,
            self._num_generation_tokens / elapsed,
            100 * self._hits.hit_rate,
            preempted,
        )
        self._was_active = is_active
        self._last = now
        self._num_prompt_tokens = self._num_generation_tokens = self._num_preemptions = 0
