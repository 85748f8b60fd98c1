"""A request as the parts of a scheduler that plugins bring may read it: policies, gates and adapter slots."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from pelton.messages.request import EngineRequest


class RequestStatus(IntEnum):
    WAITING = 0
    """In the queue, never scheduled."""
    PREEMPTED = 1
    """In the queue again: its blocks and slot were given up, its tokens kept."""
    RECEIVING = 2
    """Holds blocks that a KV connector fills."""
    RUNNING = 3
    """Holds blocks and a slot."""
    FINISHED = 4


class ScheduledRequest(Protocol):
    """One request from arrival to its last token; policies and gates read it, and must not change it.

    Known tokens have their value on the host; pending ones are sampled by open steps (an upper bound: a step with drafts may
    bring fewer). `num_computed_tokens` is an upper bound too.
    """

    @property
    def request(self) -> EngineRequest: ...

    @property
    def request_id(self) -> str: ...

    @property
    def arrival(self) -> int:
        """Number of the request in the order in which they came."""
        ...

    @property
    def status(self) -> RequestStatus: ...

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which its limit passes."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Known on the host: prompt and output."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_tokens_with_pending(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int:
        """Found in the prefix cache, or brought by a connector, when it was first scheduled; -1 before that."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that it may have, prompt and output."""
        ...
