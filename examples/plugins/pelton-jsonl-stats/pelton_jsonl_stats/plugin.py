"""Offers the stat logger. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from pelton import hookimpl
from pelton.entries import SettingsEntry, StatLoggerEntry

PELTON_API = ">=1,<2"


@hookimpl
def pelton_settings() -> Sequence[SettingsEntry]:
    return [SettingsEntry(name="jsonl_stats", load="pelton_jsonl_stats.logger:JsonlStatsConfig")]


@hookimpl
def pelton_stat_loggers() -> Sequence[StatLoggerEntry]:
    return [
        StatLoggerEntry(
            name="jsonl_stats",
            load="pelton_jsonl_stats.logger:JsonlStatLogger",
            doc="one JSON line an interval, into the file plugin_config.jsonl_stats.path",
        )
    ]
