"""Guarded stat loggers."""

from __future__ import annotations

import logging

import pytest

from pelton.config import EngineConfig
from pelton.entries import StatLoggerEntry
from pelton.errors import ConfigError, PluginError
from pelton.metrics.manager import StatLoggers
from pelton.metrics.snapshot import Gauge
from pelton.metrics.stats import IterationStats, SchedulerStats


class Recorder:
    def __init__(self, config, engine_index=0):
        self.calls = []

    def record(self, scheduler_stats, iteration_stats):
        self.calls.append("record")

    def log(self):
        self.calls.append("log")


class Broken(Recorder):
    def record(self, scheduler_stats, iteration_stats):
        raise RuntimeError("no disk")

    def snapshot(self):
        raise RuntimeError("nothing to see")


class Publisher(Recorder):
    def engine_started(self, info):
        self.calls.append("started")

    def snapshot(self):
        return [Gauge(name="g", value=1.0)]


CLASSES = {"recorder": Recorder, "broken": Broken, "publisher": Publisher}


class Offers:
    def __init__(self, *entries):
        self._entries = entries

    def entries(self, hook):
        assert hook == "pelton_stat_loggers"
        return list(self._entries)


class Offered(StatLoggerEntry):
    __slots__ = ()

    def resolve(self):
        return CLASSES[self.name]


def offer(name, **more):
    return Offered(name=name, load="x:y", **more)


def test_a_failing_logger_is_reported_once_and_harms_nobody(caplog):
    loggers = StatLoggers(EngineConfig(), Offers(offer("broken"), offer("recorder"), offer("publisher")))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            loggers.record(SchedulerStats(), IterationStats())
        loggers.engine_started(None)
        loggers.log()
        metrics = loggers.snapshot()
    assert [metric.name for metric in metrics] == ["g"]
    assert loggers.loggers["recorder"].calls == ["record"] * 3 + ["log"]
    assert loggers.loggers["publisher"].calls == ["record"] * 3 + ["started", "log"]
    messages = [record.getMessage() for record in caplog.records]
    assert sum("'broken' failed in record" in message for message in messages) == 1
    assert sum("'broken' failed in snapshot" in message for message in messages) == 1


def test_a_custom_logger_joins_the_defaults_unless_it_replaces_them():
    default = offer("recorder", is_default=True)
    assert set(StatLoggers(EngineConfig(), Offers(default, offer("publisher"))).loggers) == {"recorder", "publisher"}
    replacing = offer("publisher", replaces_defaults=True)
    assert set(StatLoggers(EngineConfig(), Offers(default, replacing)).loggers) == {"publisher"}


def test_quiet_default_loggers_count_and_write_nothing():
    entries = Offers(offer("recorder", is_default=True), offer("publisher"))
    loggers = StatLoggers(EngineConfig(), entries, quiet=True)
    loggers.record(SchedulerStats(), IterationStats())
    loggers.log()
    assert loggers.loggers["recorder"].calls == ["record"]
    assert loggers.loggers["publisher"].calls == ["record", "log"]


def test_no_loggers_with_stats_off():
    config = EngineConfig.from_flat(disable_log_stats=True)
    assert not StatLoggers(config, Offers(offer("recorder")))


class Unmakable(Recorder):
    def __init__(self, config, engine_index=0):
        raise CLASSES["error"]


@pytest.mark.parametrize(
    "error, told",
    [
        (
            OSError("no disk"),
            (PluginError, r"'unmakable' \(x:y\) fails: OSError: no disk\. Fix the plugin"),
        ),
        (ConfigError("path is 3"), (ConfigError, "^path is 3$")),
        (MemoryError("full"), (MemoryError, "^full$")),
    ],
    ids=["plugin", "operator", "memory"],
)
def test_a_logger_that_cannot_be_made_is_named(monkeypatch, error, told):
    monkeypatch.setitem(CLASSES, "unmakable", Unmakable)
    monkeypatch.setitem(CLASSES, "error", error)
    with pytest.raises(told[0], match=told[1]):
        StatLoggers(EngineConfig(), Offers(offer("unmakable")))
