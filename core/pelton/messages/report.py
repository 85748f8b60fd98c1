"""Facts of a started device and engine, from the worker through the engine core to front ends."""

from __future__ import annotations

import msgspec


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """How large a step may be so that it does not last too long."""

    num_tokens: int
    """Most tokens without context."""
    context_tokens: int = 0
    """Tokens of context at which a token's attention takes as long as its products; 0: attention costs nothing beside them."""


class DeviceReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts that start-up found on the device; one row each of the start table."""

    device: str = ""
    """For people: "cpu: AMD EPYC, 2 threads"."""
    platform: str = ""
    attention_backend: str = ""
    attention_reason: str = ""
    """Why this backend: "priority 10, the only one that fits"."""
    choices: dict[str, str] = {}
    """What plugins chose by their settings, or without: name to value."""
    weights_bytes: int = 0
    phase_s: dict[str, float] = {}
    """Seconds by start phase: device, load, profile, ..."""
    notes: list[str] = []
    """What was lowered or shrunk, and why."""
    adapter_modules: list[str] = []
    """Layers that take adapters, as adapter_config.json calls them; empty where the engine serves none."""
    logits_processors: list[str] = []
    """Names of those that the workers made."""
    num_draft_tokens: int = 0
    """Most drafts of a row that the workers make themselves; 0: none, or the host makes them."""
    work: dict[str, float] = {}
    """Of one rank: token_flops, output_flops a sampled token; "context_flops W", "context_bytes W" a token of context, W a window or 0."""


class EngineInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts of a started engine: the start table and `cache_config_info` are made from it."""

    report: DeviceReport
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    phase_s: dict[str, float] = {}
    plugin_digest: str = ""
    cache_config: dict[str, str] = {}
    """Every cache setting as text, resolved values included."""
