"""What the engine core tells its front end, step by step. Plain structs: they cross processes as msgpack."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from pelton.errors import ErrorInfo
from pelton.metrics.stats import SchedulerStats


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EventType(IntEnum):
    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2


class EngineEvent(msgspec.Struct, array_like=True):
    """Something that happened to a request, with the engine's monotonic clock (never compare with another process's)."""

    type: EventType
    timestamp: float


class LogprobColumns(msgspec.Struct, array_like=True):
    """Logprobs of P positions. Row p: `token_ids[p]` and `logprobs[p]` hold the chosen token first, then the likeliest ones."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]
    """Rank of the chosen token, from 1."""


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step did to one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id that ended it, None for EOS."""
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    """Rows for prompt positions 1 .. P-1, complete, sent once with or before the first token."""
    events: list[EngineEvent] = []
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (at the first scheduling)."""
    error: ErrorInfo | None = None
    """Set with `FinishReason.ERROR`."""


class EngineOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """All that came out of one step."""

    outputs: list[EngineOutput] = []
    timestamp: float = 0.0
    """Engine's monotonic clock: the NEW_TOKENS stamp of every output here that has tokens."""
    stats: SchedulerStats | None = None
    engine_index: int = 0
