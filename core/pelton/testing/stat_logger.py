"""Conformance of stat loggers: what any implementation has to keep, run with pytest.

Subclass `StatLoggerConformance` in a test module and set `logger_class`. Tests run in a folder of their own.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import ClassVar

import pytest

from pelton.config import EngineConfig
from pelton.messages.report import DeviceReport, EngineInfo
from pelton.metrics.interface import OffersSnapshot, ReportsStart, StatLogger
from pelton.metrics.snapshot import Counter, Gauge, Histogram
from pelton.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

_MAX_RECORD_S = 0.02
"""On average; `record` is called for every batch of outputs."""


def some_stats(step: int) -> tuple[SchedulerStats | None, IterationStats]:
    """One batch of outputs, as an engine hands it on; every third has no state of the scheduler with it."""
    scheduler = None if step % 3 == 2 else SchedulerStats(num_running_reqs=2, num_steps=1, num_scheduled_tokens=9)
    finished = [FinishedRequestStats("stop", num_prompt_tokens=7, num_generation_tokens=3)] if step % 2 else []
    iteration = IterationStats()
    iteration.num_prompt_tokens, iteration.num_generation_tokens = 7, 2
    iteration.finished_requests = finished
    iteration.time_to_first_tokens_s = [0.02]
    return scheduler, iteration


class StatLoggerConformance:
    logger_class: ClassVar[type[StatLogger]]
    settings: ClassVar[dict[str, object]] = {}
    """Flat settings, such as `plugin_config`."""

    @pytest.fixture
    def logger(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatLogger:
        monkeypatch.chdir(tmp_path)
        return self.logger_class(config=EngineConfig.from_flat(**self.settings), engine_index=0)

    def test_takes_every_batch_and_does_not_block(self, logger: StatLogger) -> None:
        began = time.perf_counter()
        for step in range(30):
            logger.record(*some_stats(step))
        logger.record(None, IterationStats())
        assert time.perf_counter() - began < 31 * _MAX_RECORD_S, "record takes too long: it holds up answers"

    def test_takes_what_an_engine_found_when_it_started(self, logger: StatLogger) -> None:
        if not isinstance(logger, ReportsStart):
            pytest.skip("has no engine_started")
        report = DeviceReport(
            device="cpu", platform="cpu", attention_backend="native", attention_reason="under test", weights_bytes=2**20
        )
        info = EngineInfo(
            report=report, num_blocks=64, block_size=16, kv_cache_bytes=2**20, max_num_seqs=8,
            max_num_batched_tokens=256, max_model_len=128,
        )  # fmt: skip
        logger.engine_started(info)
        logger.engine_started(info)  # a dead engine came back

    def test_logs_with_and_without_anything_new(self, logger: StatLogger) -> None:
        logger.log()
        logger.record(*some_stats(1))
        logger.log()
        logger.log()

    def test_leaves_the_numbers_as_they_are(self, logger: StatLogger) -> None:
        scheduler, iteration = some_stats(1)
        logger.record(scheduler, iteration)
        assert (scheduler, iteration) == some_stats(1), "record changes what other loggers read after it"

    def test_what_it_publishes_can_be_rendered(self, logger: StatLogger) -> None:
        if not isinstance(logger, OffersSnapshot):
            pytest.skip("has no snapshot")
        logger.record(*some_stats(0))
        found = logger.snapshot()
        assert found, "it publishes nothing after a step"
        for metric in found:
            assert isinstance(metric, (Counter, Gauge, Histogram)), (
                f"{metric} is neither a counter, a gauge nor a histogram"
            )
            assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric.name), (
                f"{metric.name!r} is not a name of Prometheus's"
            )
            assert all(isinstance(value, str) for value in metric.labels.values()), (
                f"labels of {metric.name}: {metric.labels}"
            )
