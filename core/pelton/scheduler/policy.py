"""Interface of a scheduling policy: the order of requests, admission, the victims of preemption, and how much a request gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pelton import moved
from pelton.scheduler.request import RequestStatus, ScheduledRequest

if TYPE_CHECKING:
    from pelton.config import EngineConfig


if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__)


class SchedulingPolicy(ABC):
    """Made once per scheduler, without arguments. Called on the step loop: no method may block."""

    def configure(self, config: EngineConfig) -> None:  # noqa: B027
        """Take settings (`pelton.config.plugin_settings.read_settings`). Called once, before the first request."""

    @abstractmethod
    def rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        """Order among running requests, lowest first; must not change while a request lives, and tell any two apart."""

    def queue_rank(self, request: ScheduledRequest) -> tuple[Any, ...]:
        """Order in the waiting queue, lowest first. A preempted request comes before all that have not run yet."""
        return (request.status is not RequestStatus.PREEMPTED, *self.rank(request))

    shares: ClassVar[bool] = False
    """Requests wait by tenant (`EngineRequest.tenant`): the methods below say whose turn it is, and are not called without it but
    `ended`, which every policy may have."""

    def arrived(self, tenant: str, waiting: Collection[str]) -> None:  # noqa: B027
        """A tenant waits that did not; waiting: the others that do."""

    def next_tenant(self, waiting: Collection[str], running: Sequence[ScheduledRequest]) -> str:
        """Choose the tenant whose first request is admitted next. Preempted requests come before all."""
        raise NotImplementedError

    def started(self, request: ScheduledRequest) -> None:  # noqa: B027
        """A request runs for the first time; `num_cached_tokens` is known."""

    def ended(self, request: ScheduledRequest) -> None:  # noqa: B027
        """A request has ended, whether it ran or not: its counts say what it got. Called once; an exception is logged."""

    def admits(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> bool:
        """False leaves the head of the queue, and all behind it, for a later step."""
        return True

    def holds_back(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> bool:
        """True sets the head of the queue aside until the next step, and those behind it pass: one tenant is capped, and no other
        waits for it."""
        return False

    def victim(self, candidates: Sequence[ScheduledRequest]) -> ScheduledRequest:
        """Choose the request that gives up its blocks: one of `candidates`, the running requests that this step has not served yet, in rank
        order. The first of them is the one that needs a block."""
        return candidates[-1]

    def max_new_tokens(self, request: ScheduledRequest, num_tokens: int) -> int:
        """Most of `num_tokens` that this request may get in this step, at least 1."""
        return num_tokens
