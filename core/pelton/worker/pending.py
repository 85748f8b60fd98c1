"""A step that is launched and not yet done."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pelton.messages.step import ModelOutput


class PendingOutput(ABC):
    """A worker's return value in place of a `ModelOutput`: the step is launched, its result not there yet."""

    @abstractmethod
    def ready(self) -> bool:
        """True when `result` returns at once."""

    @abstractmethod
    def result(self) -> ModelOutput:
        """Wait for the device. Called once, from any thread."""
