"""Interface of an admission gate: says whether a waiting request has one thing that it needs before it may start.

A scheduler asks its gates in their order, for the head of the queue, and those of `SchedulerContext.gates` last. A feature with a
resource of its own (adapter slots, an encoder budget) adds a gate and changes no other file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from pelton import moved
from pelton.scheduler.request import ScheduledRequest

if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__)


class Verdict(Enum):
    OPEN = auto()
    """The request has what this gate looks after."""
    DEFER = auto()
    """Set the request aside until `Gate.may_open`; those behind it pass."""
    WAIT = auto()
    """The request keeps its place, and nobody is admitted behind it in this step."""


class Gate(ABC):
    """One resource that a request needs to start. Called on the step loop: no method may block."""

    @abstractmethod
    def check(self, request: ScheduledRequest, running: Sequence[ScheduledRequest]) -> Verdict:
        """Say whether the head of the queue may start. An exception ends the request, and only it."""

    def may_open(self, request: ScheduledRequest) -> bool:
        """Say whether a deferred request is worth another `check`. Asked once a step for each of them; must be cheap."""
        return True
