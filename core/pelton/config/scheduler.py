"""Settings of `pelton.scheduler` and of the step loop."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

_MOST_SIDE_SLOTS = 256


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of one step, policy, admission limits, overlap."""

    max_num_batched_tokens: int | None = None
    """Most tokens in one step. When unset the platform's default; on CPUs as many as the measured speed computes in 0.7 s, if
    these are fewer."""
    max_num_seqs: int | None = None
    """Most requests that run at once; the platform's default when unset."""
    performance_mode: str | None = None
    """balanced, or throughput: steps of more tokens where `max_num_batched_tokens` is unset and the platform gains by it. When unset
    throughput for `LLM` and `pelton run-batch`, whose callers wait for all outputs, and balanced for servers."""
    scheduling_policy: str = "fcfs"
    """fcfs, priority (lower value first), fair (who got fewest tokens), or a policy plugin's name."""
    scheduler: str = "default"
    """Name of the scheduler; a plugin may replace it."""
    enable_chunked_prefill: bool = True
    """Compute a prompt that exceeds a step's budget in several steps."""
    max_mixed_prefill_tokens: int | None = None
    """Most prompt tokens in a step that also gives running requests a token, which bounds the time between two tokens; 0 for no
    bound but the budget. A waiting request with half as many tokens to compute, or fewer, comes beyond it, within the budget: it
    gets its first token at once; so does every one of a burst that finds the engine idle. When unset
    none; on CPUs, where `max_num_batched_tokens` is unset too, an eighth of it, at least 64."""
    long_prefill_token_threshold: int = 0
    """Most new tokens of one request in one step; 0 for no bound but the budget."""
    async_scheduling: bool = True
    """Overlap: schedule the next step while this one runs."""
    max_steps_in_flight: int = 2
    """Open steps with overlap on (1 with it off); with pipeline stages one more for each behind the first."""
    max_num_queued_reqs: int | None = None
    """Most requests that wait; one more is refused with status 503."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens that wait; a request over it is refused with status 503. One longer prompt is taken when nothing waits."""
    max_side_table_seqs: int | None = None
    """Requests at once that sample with penalties, bias, token sets or bad words; others wait for a place. When unset as many
    as run at once, 256 at most: each takes 11 bytes a token of the vocabulary."""
    max_step_s: float = 300.0
    """Seconds after which a step counts as hung: the engine is started again, and its requests end with an error. 0 for never."""
    stream_interval: int = 1
    """Tokens between two streamed outputs of one request."""

    def __post_init__(self) -> None:
        sizes = "max_num_batched_tokens", "max_num_seqs", "max_num_queued_reqs", "max_num_queued_tokens"
        for name in (*sizes, "max_side_table_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; use at least 1, or leave it unset.")
        if self.performance_mode not in (None, "balanced", "throughput"):
            raise ConfigError(f"performance_mode is {self.performance_mode!r}; use 'balanced' or 'throughput'.")
        for name in ("max_steps_in_flight", "stream_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use at least 1.")
        if not self.max_step_s >= 0:
            raise ConfigError(f"max_step_s is {self.max_step_s}; use seconds above 0, or 0 to wait for ever.")
        for name in ("long_prefill_token_threshold", "max_mixed_prefill_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 0 (off) or a number of tokens.")

    def num_side_slots(self, max_num_seqs: int) -> int:
        """Places in the side tables of an engine that runs `max_num_seqs` requests at once."""
        return self.max_side_table_seqs or min(max_num_seqs, _MOST_SIDE_SLOTS)
