"""What is counted, logged and traced."""

from __future__ import annotations

import msgspec


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    disable_log_stats: bool = False
    log_stats_interval_s: float = 5.0
    metrics_prefix: str = "pelton_"
    """Put before every metric name; `vllm:` gives vLLM's names."""
    show_hidden_metrics_for_version: str | None = None
    log_level: str = "info"
