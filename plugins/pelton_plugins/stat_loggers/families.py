"""Every metric family that the prometheus logger exports, as one table.

A family that is to go is first said to be deprecated in its HELP text (`deprecated_in`, a version), is hidden one
minor version later unless `show_hidden_metrics_for_version` names the version that deprecated it, then is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from pelton.errors import ConfigError
from pelton.metrics.stats import KV_FETCH_STAGES

# The boundaries of vLLM's dashboards stay; what is below and between them is ours, for models and devices whose times
# all fall into its first bucket.
TTFT_SECONDS = (
    0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HOST_SECONDS = (
    1e-05, 2e-05, 5e-05, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.5, 1.0,
)  # fmt: skip
COMPILE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RESIDENCY_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_COUNTS = (0, 1, 2, 3, 5, 10, 20)
SAMPLES = (1, 2, 5, 10, 20)
UP_TO_MODEL_LEN: tuple[float, ...] = ()  # replaced by 1-2-5 steps to max_model_len once that is known

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level of the sleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    kind: str  # counter, gauge or histogram
    help: str
    label: str | None = None  # beside model_name and engine
    label_values: tuple[str, ...] = ()  # exported from the start, as 0
    buckets: tuple[float, ...] | None = None
    when: str | None = None  # exported only with this kv_cache setting on
    deprecated_in: tuple[int, int] | None = None


def _counter(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Family:
    return Family(name=name, kind="counter", help=help, label=label, label_values=values)


def _gauge(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Family:
    return Family(name=name, kind="gauge", help=help, label=label, label_values=values)


def _histogram(
    name: str, help: str, buckets: tuple[float, ...], label: str | None = None, when: str | None = None
) -> Family:
    return Family(name=name, kind="histogram", help=help, buckets=buckets, label=label, when=when)


FAMILIES: tuple[Family, ...] = (
    _gauge("num_requests_running", "Requests in the running batch."),
    _gauge("num_requests_waiting", "Requests that wait to be scheduled."),
    _gauge(
        "num_requests_waiting_by_reason",
        "Waiting requests by what they wait for: capacity, or something outside the scheduler (deferred).",
        "reason",
        ("capacity", "deferred"),
    ),
    _gauge(
        "num_requests_kv_fetch_by_stage",
        "Waiting requests whose KV a connector brings: it does not know yet, it brings it, it has brought it.",
        "stage",
        KV_FETCH_STAGES,
    ),
    _gauge(
        "engine_sleep_state",
        "1 for the state that the engine is in: awake, asleep with its weights on the host, or asleep without them.",
        "sleep_state",
        SLEEP_STATES,
    ),
    _gauge("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1."),
    _gauge("startup_phase_seconds", "Seconds that each phase of the engine's start took.", "phase"),
    _counter("engine_restarts", "Times that an engine was started again because it was dead, or stood still."),
    _counter("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Tokens found in the prefix cache."),
    _counter("external_prefix_cache_queries", "Tokens that a KV connector was asked for."),
    _counter("external_prefix_cache_hits", "Tokens that a KV connector brought."),
    _counter("corrupted_requests", "Requests that ended because their values were not finite."),
    _counter("num_preemptions", "Times that a running request gave up its blocks."),
    _counter("prompt_tokens", "Prompt tokens processed."),
    _counter(
        "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    _counter("prompt_tokens_cached", "Prompt tokens whose KV came from the prefix cache, or was brought by a KV connector."),
    _counter(
        "prompt_tokens_cached_by_source",
        "The same, by where it lay: on the device, or where a KV connector brought it from.",
        "source", ("device", "external_unspecified"),
    ),
    _counter("generation_tokens", "Tokens generated."),
    _counter(
        "request_success",
        "Finished sequences by finish reason; a request has n of them.",
        "finished_reason",
        ("stop", "length", "abort", "error"),
    ),
    _counter(
        "admission_rejections",
        "Requests refused because too much waits already, by the limit they met.",
        "reason",
        ("max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    _counter("estimated_flops_per_gpu", "Floating-point operations of finished sequences, from the model's shapes, on one device."),
    _counter(
        "estimated_read_bytes_per_gpu",
        "Bytes read on one device: the weights once a step, and what finished sequences read of the KV cache while they decoded.",
    ),
    _counter("estimated_write_bytes_per_gpu", "Bytes that finished sequences wrote to the KV cache of one device."),
    _counter("spec_decode_num_drafts", "Rows of steps whose draft tokens were verified."),
    _counter("spec_decode_num_draft_tokens", "Draft tokens proposed, with speculation."),
    _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their place in the row from 0.",
        "position",
    ),
    _counter("spec_decode_num_pauses", "Pauses of drafting, of a request or of all together, since too few drafts were accepted."),
    _histogram("request_prompt_tokens", "Prompt tokens of a finished sequence.", UP_TO_MODEL_LEN),
    _histogram("request_generation_tokens", "Generated tokens of a finished sequence.", UP_TO_MODEL_LEN),
    _histogram(
        "request_max_num_generation_tokens", "Generated tokens of a finished request's longest sequence.",
        UP_TO_MODEL_LEN,
    ),
    _histogram("request_params_max_tokens", "max_tokens of a finished sequence.", UP_TO_MODEL_LEN),
    _histogram("request_params_n", "n of a finished request, once for all its sequences.", SAMPLES),
    _histogram(
        "request_prefill_kv_computed_tokens", "Prompt tokens of a finished sequence that were computed.",
        UP_TO_MODEL_LEN,
    ),
    _histogram("request_num_preemptions", "Preemptions of a finished sequence.", SMALL_COUNTS),
    _histogram("iteration_tokens_total", "Tokens in one engine step.", ITERATION_TOKENS),
    _histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_SECONDS),
    _histogram("inter_token_latency_seconds", "Between successive tokens of a request.", ITL_SECONDS),
    _histogram(
        "request_time_per_output_token_seconds", "Mean time per token after the first of a finished sequence.",
        ITL_SECONDS,
    ),
    _histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_SECONDS),
    _histogram("request_queue_time_seconds", "From queued to scheduled.", LATENCY_SECONDS),
    _histogram("request_prefill_time_seconds", "From scheduled to the first token.", LATENCY_SECONDS),
    _histogram("request_decode_time_seconds", "From the first to the last token.", LATENCY_SECONDS),
    _histogram("request_inference_time_seconds", "From scheduled to the last token.", LATENCY_SECONDS),
    _histogram(
        "step_host_seconds",
        "Host time of an engine step by stage: schedule, execute, update, output; stage step is the whole of it, their sum.",
        HOST_SECONDS, "stage",
    ),
    _histogram(
        "step_device_wait_seconds",
        "Of an engine step: how long the host had nothing to do but wait for the device; no part of the host time.",
        HOST_SECONDS,
    ),
    _histogram("grammar_compile_seconds", "Time to compile a grammar, with a structured-output plugin.", COMPILE_SECONDS),
    _histogram(
        "kv_block_lifetime_seconds", "Sampled blocks: from allocation to eviction.", RESIDENCY_SECONDS,
        when="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_idle_before_evict_seconds", "Sampled blocks: from last touch to eviction.", RESIDENCY_SECONDS,
        when="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_reuse_gap_seconds", "Sampled blocks: between two touches.", RESIDENCY_SECONDS,
        when="kv_cache_metrics",
    ),
)  # fmt: skip


NOT_EXPORTED = {
    "watermark_requests": "answers carry no watermark",
    "mm_cache_queries, mm_cache_hits": "the server takes text and token ids",
    "request_success{finished_reason=repetition}": "no answer is ended because it repeats itself",
    "nixl_*, mooncake_*, hf3fs_*, umbp_*, hisparse_*": "there are no such KV connectors",
    "kv_offload_*, simple_kv_offload_*": "blocks are not moved to the host; a KV connector's own counters stand beside these families",
    "rl_weight_update_*": "weights do not change while the engine runs",
    "websocket_*": "no route speaks WebSocket",
    "diffusion_*": "no model here diffuses",
}
"""Families of vLLM's, and why they are not here."""


def minor_version(text: str, setting: str = "version") -> tuple[int, int]:
    """ "0.2.1" to (0, 2)."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ConfigError(f"{setting} is {text!r}; give a version such as 0.1.")
    return int(parts[0]), int(parts[1])


def is_shown(family: Family, version: tuple[int, int], show_hidden_for: tuple[int, int] | None) -> bool:
    """Return whether `version` of Pelton exports a family."""
    if family.deprecated_in is None or version <= family.deprecated_in:
        return True
    major, minor = family.deprecated_in
    return version == (major, minor + 1) and show_hidden_for == family.deprecated_in


def help_text(family: Family) -> str:
    if family.deprecated_in is None:
        return family.help
    major, minor = family.deprecated_in
    return f"{family.help} DEPRECATED in {major}.{minor}, hidden from {major}.{minor + 1}, then removed."
