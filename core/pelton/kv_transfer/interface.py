"""Interface of a KV connector: KV cache that comes from, or goes to, somewhere else.

Two halves: `SchedulerConnector` lives with the scheduler, `WorkerConnector` with each worker. What the first has to tell the
second travels in `SchedulerOutput.extensions` under the connector's name. `KVConnector` makes both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.config import EngineConfig
from pelton.errors import NotSupportedError
from pelton.kv_cache.interface import BlockIds
from pelton.kv_cache.spec import KVCachePlan
from pelton.messages.request import EngineRequest
from pelton.messages.step import ModelOutput, SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.model.resolved import ResolvedModel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """The values that both halves of a connector are made from; the same values in every process. New fields have defaults."""

    name: str
    """Of the connector's entry: its key in `SchedulerOutput.extensions`."""
    config: EngineConfig
    model: ResolvedModel
    plan: KVCachePlan
    rank: int = 0
    """Of the half's worker among the engine's: the ranks of one stage follow each other."""
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own. Of the half in the scheduler: what the half in a worker counts is shown nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnd:
    """A connector's answer when a request is over."""

    keeps_blocks: bool = False
    """Keep the blocks until the workers report `finished_sending` for this request."""
    params: dict[str, Any] | None = None
    """Sent to the client as `kv_transfer_params`: plain data."""


class KVConnector(ABC):
    """A connector as a plugin offers it. Both functions may raise `ConfigError` for what it cannot serve."""

    serves_ranks: ClassVar[bool] = False
    """It keeps the parts apart that several ranks have of a block (`rank`); else it is refused with more than one."""

    @staticmethod
    @abstractmethod
    def for_scheduler(context: ConnectorContext) -> SchedulerConnector: ...

    @staticmethod
    @abstractmethod
    def for_worker(context: ConnectorContext) -> WorkerConnector: ...


class SchedulerConnector(ABC):
    """Called on the engine core's thread; must not block."""

    name: str

    def check_request(self, request: EngineRequest) -> None:
        """Raise `RequestError` for `kv_transfer_params` that are wrong, or not understood. Called when the request comes."""
        if request.kv_transfer_params is not None:
            raise NotSupportedError(
                f"The KV connector {self.name!r} takes no kv_transfer_params; leave them out.",
                param="kv_transfer_params",
            )

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

    def request_computed(self, request_id: str) -> None:  # noqa: B027
        """The request's first token came back, and its logits were finite: so is the KV of its prompt, which other engines
        may read from now on. Called again when the request was preempted and computed anew. Its blocks stay where they are
        until it is preempted or finished; what is saved before this call may be NaN."""

    @abstractmethod
    def request_finished(self, request_id: str, block_ids: BlockIds) -> bool | TransferEnd:
        """Forget the request. True, or `TransferEnd(keeps_blocks=True)`: keep the blocks until the workers report
        `finished_sending` for this request."""

    def update(self, result: ModelOutput) -> None:  # noqa: B027
        """A step's result came back."""


class WorkerConnector(ABC):
    """Called on the worker's thread around the forward pass."""

    @abstractmethod
    def register_kv_caches(self, caches: dict[str, Tensor], layout: str) -> None:
        """Called once, before the first step. caches: layer name to its pages, uint8 [num_blocks, bytes of a block], on the
        device. layout: what these bytes are; equal texts of two engines mean that they can read each other's pages."""

    @abstractmethod
    def start_load(self, metadata: bytes) -> None:
        """Before the forward: begin to bring what this step needs, behind the work that is queued on the current stream by
        now: it may zero the very blocks that are loaded into."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the forward was queued: this step's stores are safe from being overwritten by what is queued later."""

    @abstractmethod
    def take_finished(self) -> tuple[Sequence[str], Sequence[str]]:
        """Request ids whose (sending, receiving) finished since the last call; over where every rank has said so."""

    def shutdown(self) -> None:  # noqa: B027
        """Finish what was begun: the engine ends. Called once, outside any step."""

    def take_invalid_block_ids(self) -> Sequence[int]:
        """Blocks whose load failed since the last call: their holders are computed again."""
        return ()
