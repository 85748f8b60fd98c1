"""The numbers that the engine core and the front end hand to stat loggers. New fields are added with defaults, never renamed."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pelton.metrics.plugin_metrics import PluginSample

HOST_STAGES = ("schedule", "execute", "update", "output")
"""Where the step loop spends the host's time."""
WAIT, STEP = "wait", "step"
"""For the device's result, which is not work of the host; and the sum of the stages, without the wait."""

KV_FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
"""The connector does not know yet, it brings the KV, it has brought it and the request waits for its step."""


class SchedulerStats(msgspec.Struct, omit_defaults=True):
    """State of one engine core after a step; counters are since the last record."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_deferred_reqs: int = 0
    """Part of the waiting ones: those that wait for a grammar, an adapter or remote KV."""
    kv_cache_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    prefix_cache_requests: int = 0
    """Requests that looked up (the log line's hit rate is over the last 1,000 of these)."""
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_steps: int = 0
    spec_num_drafts: int = 0
    """Rows that came back with drafts verified."""
    spec_num_draft_tokens: int = 0
    spec_num_accepted_tokens: int = 0
    spec_num_accepted_by_position: list[int] = []
    """Accepted drafts by their place in a row, the first one first."""
    spec_num_pauses: int = 0
    """Pauses of drafting, of a request or of all together, because too few drafts were accepted."""
    running_adapters: dict[str, int] = {}
    """Running requests by the name of their adapter; those without one are left out."""
    waiting_adapters: dict[str, int] = {}
    kv_block_lifetimes_s: list[float] = []
    kv_block_idle_s: list[float] = []
    kv_block_reuse_gaps_s: list[float] = []
    host_time_s: dict[str, float] = {}
    """Seconds of the step loop by stage: `HOST_STAGES` with any time in them, `STEP` which is their sum, and `WAIT`."""
    grammar_compile_s: list[float] = []
    """Seconds that each grammar took which was compiled since the last record."""
    plugin_metrics: list[PluginSample] = []
    """What plugins in the engine's process counted since the last record."""
    num_failed_steps: int = 0
    """Steps in a row that failed, up to now."""
    step_failure: str = ""  # why the last of them did
    external_prefix_cache_queries: int = 0  # tokens that a KV connector was asked for
    external_prefix_cache_hits: int = 0  # tokens that it brings
    kv_fetch_reqs: dict[str, int] = {}  # requests whose KV a connector brings later, by `KV_FETCH_STAGES`
    sleep_level: int = 0  # 0: awake
    num_corrupted_reqs: int = 0  # requests that ended because their row's values were not finite

    def count_drafts(self, num_draft: int, num_accepted: int, num_rows: int = 1) -> None:
        """Count rows whose drafts were verified: of `num_draft` in all `num_accepted` a row were right."""
        self.spec_num_drafts += num_rows
        self.spec_num_draft_tokens += num_draft
        self.spec_num_accepted_tokens += num_accepted * num_rows
        by_position = self.spec_num_accepted_by_position
        by_position.extend([0] * (num_accepted - len(by_position)))
        for position in range(num_accepted):
            by_position[position] += num_rows


@dataclass(slots=True)
class FinishedRequestStats:
    """One finished sample of a request; intervals in seconds, None where never reached."""

    finish_reason: str
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens: int | None = None
    n: int = 1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    e2e_latency_s: float = 0.0
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    inference_time_s: float | None = None
    mean_time_per_output_token_s: float | None = None
    max_num_generation_tokens: int | None = None
    """Of the request's longest sample. Set with the sample that ends last, None with the others."""


@dataclass(slots=True)
class IterationStats:
    """Statistics of one batch of engine outputs, by request, computed in the front end."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_external_prompt_tokens: int = 0  # of the cached ones, those that a KV connector brought
    num_generation_tokens: int = 0
    num_preempted_reqs: int = 0
    time_to_first_tokens_s: list[float] = field(default_factory=list)
    inter_token_latencies_s: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    num_rejected_reqs: dict[str, int] = field(default_factory=dict)
    """Refused by admission limits, by reason."""
