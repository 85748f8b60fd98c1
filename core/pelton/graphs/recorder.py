"""Interface of a platform's graph recorder: work is captured once and launched again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Graph(Protocol):
    """Captured device work on fixed addresses."""

    def replay(self) -> None:
        """Queue all of it, in order, behind what the current stream holds."""
        ...


class GraphRecorder(ABC):
    """One per worker, used from its thread. Captures share one memory pool: they are replayed one after the other, and what
    a graph leaves in memory is read before the next one runs."""

    runs_calls: ClassVar[bool] = False
    """Whether what is recorded runs as well. `end` may then refuse what it could not record, by raising."""

    @abstractmethod
    def begin(self) -> None:
        """Record what the thread launches from now on, without running it unless `runs_calls` says so."""

    @abstractmethod
    def end(self) -> Graph:
        """Stop recording."""

    @abstractmethod
    def abort(self) -> None:
        """Leave recording after `begin`, `end` or what was recorded raised; never raises. The next `begin` must work."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory, of a tensor that was made while recording, without keeping it from later captures: what a replay
        leaves there holds until another graph is replayed. Called between `end` and `begin`. The default keeps it."""
        return tensor
