"""Messages of the engine core to its front end, step by step. Plain structs: they cross processes as msgpack."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import Any

import msgspec

from pelton.errors import ErrorInfo
from pelton.messages.request import TensorData
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


class LogprobColumns(msgspec.Struct, array_like=True, tag=True):
    """Logprobs of P positions. Row p: `token_ids[p]` and `logprobs[p]` hold the chosen token first, then the likeliest ones."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]
    """Rank of the chosen token, from 1."""

    def packed(self) -> PackedLogprobs:
        """Raises `ValueError` where positions differ in length."""
        width = len(self.token_ids[0]) if self.token_ids else 1
        lengths = {*map(len, self.token_ids), *map(len, self.logprobs), width}
        if lengths != {width} or not len(self.token_ids) == len(self.logprobs) == len(self.ranks):
            raise ValueError(f"Logprob columns of {len(self.ranks)} positions have rows of {sorted(lengths)} tokens.")
        return PackedLogprobs(
            width,
            array("i", chain.from_iterable(self.token_ids)).tobytes(),
            array("f", chain.from_iterable(self.logprobs)).tobytes(),
            array("i", self.ranks).tobytes(),
        )


class PackedLogprobs(msgspec.Struct, array_like=True, gc=False, tag=True):
    """`LogprobColumns` as bytes: no object a token, until somebody looks. Numbers as the machine has them, row by row."""

    width: int
    """Tokens a position."""
    token_ids: bytes
    """int32"""
    logprobs: bytes
    """float32"""
    ranks: bytes
    """int32"""

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def head(self, count: int) -> PackedLogprobs:
        """The first `count` positions."""
        size = 4 * count
        if len(self.ranks) <= size:
            return self
        wide = size * self.width
        return PackedLogprobs(self.width, self.token_ids[:wide], self.logprobs[:wide], self.ranks[:size])

    def columns(self) -> LogprobColumns:
        ids: list[int] = memoryview(self.token_ids).cast("i").tolist()
        values: list[float] = memoryview(self.logprobs).cast("f").tolist()  # type: ignore[assignment]
        width, starts = self.width, range(0, len(self) * self.width, self.width)
        return LogprobColumns(
            [ids[start : start + width] for start in starts],
            [values[start : start + width] for start in starts],
            memoryview(self.ranks).cast("i").tolist(),
        )

    def chosen(self) -> list[float]:
        """The chosen tokens' logprobs."""
        values: list[float] = memoryview(self.logprobs).cast("f")[:: self.width].tolist()  # type: ignore[assignment]
        return values

    @staticmethod
    def join(parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """One behind the other; all of one width."""
        if len(parts) == 1:
            return parts[0]
        return PackedLogprobs(
            parts[0].width if parts else 1,
            b"".join([part.token_ids for part in parts]),
            b"".join([part.logprobs for part in parts]),
            b"".join([part.ranks for part in parts]),
        )


class EngineOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The effect of one step on one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id that ended it, None for EOS."""
    logprobs: PackedLogprobs | None = None
    prompt_logprobs: PackedLogprobs | None = None
    """Rows for prompt positions 1 .. P-1, complete, sent once with or before the first token."""
    events: list[EngineEvent] = []
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed (at the first scheduling): found in the prefix cache, or brought by a KV connector."""
    error: ErrorInfo | None = None
    """Set with `FinishReason.ERROR`."""
    pooled: TensorData | None = None
    """Of a request that pools: its result, sent once, at its end."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector says of the request, sent once, at its end."""
    num_external_tokens: int = 0  # of the cached ones, those that a KV connector brought


class EngineOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """All that came out of one step."""

    outputs: list[EngineOutput] = []
    timestamp: float = 0.0
    """Engine's monotonic clock: the NEW_TOKENS stamp of every output here that has tokens."""
    stats: SchedulerStats | None = None
    engine_index: int = 0
    """Which engine's they are: set by a client of several."""
