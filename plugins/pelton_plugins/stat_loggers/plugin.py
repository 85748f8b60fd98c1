"""Offers the built-in stat loggers."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import StatLoggerEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"


@hookimpl
def pelton_stat_loggers() -> Sequence[StatLoggerEntry]:
    return [
        StatLoggerEntry(
            name="logging",
            load="pelton_plugins.stat_loggers.log_line:LogLineLogger",
            doc="one log line per interval while the engine is in use",
            is_default=True,
        ),
        StatLoggerEntry(
            name="prometheus",
            load="pelton_plugins.stat_loggers.prometheus:PrometheusLogger",
            doc="counters, gauges and histograms for GET /metrics and LLM.get_metrics()",
            is_default=True,
        ),
    ]
