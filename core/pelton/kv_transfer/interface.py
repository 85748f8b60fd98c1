"""The promise of a KV connector: KV cache that comes from, or goes to, somewhere else.

Two halves: `SchedulerConnector` lives with the scheduler, `WorkerConnector` with each worker. What the first has
to tell the second travels in `SchedulerOutput.extensions` under the connector's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pelton.kv_cache.interface import BlockIds
from pelton.request import EngineRequest
from pelton.scheduler.output import ModelOutput, SchedulerOutput

if TYPE_CHECKING:
    from torch import Tensor


class SchedulerConnector(ABC):
    """Called on the engine core's thread; must not block."""

    name: str

    @abstractmethod
    def num_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """After the local lookup: (tokens that can be brought beyond num_computed_tokens, True when they arrive later).

        None: not known yet, ask again in the next step (the request is skipped, the queue behind it goes on).
        """

    @abstractmethod
    def after_allocation(self, request: EngineRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        """Blocks for the external tokens are there."""

    @abstractmethod
    def build_metadata(self, output: SchedulerOutput) -> bytes:
        """At the end of schedule: what the workers need to know about this step."""

    @abstractmethod
    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool:
        """True: keep the blocks until the workers report `finished_sending` for this request."""

    def update(self, result: ModelOutput) -> None:  # noqa: B027
        """A step's result came back."""


class WorkerConnector(ABC):
    """Called on the worker's thread around the forward pass."""

    @abstractmethod
    def register_kv_caches(self, caches: dict[str, Tensor]) -> None: ...

    @abstractmethod
    def start_load(self, metadata: bytes) -> None:
        """Before the forward: begin to bring what this step needs, behind the work that is queued on the current stream by
        now: it may zero the very blocks that are loaded into."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the forward: all of this step's stores are safe from being overwritten."""

    @abstractmethod
    def take_finished(self) -> tuple[Sequence[str], Sequence[str]]:
        """Request ids whose (sending, receiving) finished since the last call."""

    def take_invalid_block_ids(self) -> Sequence[int]:
        """Blocks whose load failed since the last call: their holders are computed again."""
        return ()
