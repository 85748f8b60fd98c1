"""Settings of metrics, logs and traces."""

from __future__ import annotations

import re

import msgspec

from pelton import env
from pelton.errors import ConfigError


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of metrics, logs and traces."""

    disable_log_stats: bool = False
    """Collect no figures of the engine: no log line, and /metrics keeps only those of the HTTP server and its process."""
    log_stats_interval_s: float = 5.0
    """Seconds between two log lines."""
    metrics_prefix: str = "pelton_"
    """Put before every metric name; `vllm:` gives vLLM's names."""
    show_hidden_metrics_for_version: str | None = None
    """Show metrics that this version, such as 0.1, hid because they will go."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.log_level.lower() not in env.LOG_LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; use one of {', '.join(env.LOG_LEVELS)}.")
        if not self.log_stats_interval_s > 0.0:
            raise ConfigError(
                f"log_stats_interval_s is {self.log_stats_interval_s}; use a number above 0, such as 5.0."
            )
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix is {self.metrics_prefix!r}; use letters, digits and _, such as 'pelton_'."
            )
        version = self.show_hidden_metrics_for_version
        if version is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
            raise ConfigError(f"show_hidden_metrics_for_version is {version!r}; use a version, such as '0.1'.")
