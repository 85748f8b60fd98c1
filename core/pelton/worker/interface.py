"""Interface of a worker: one device's share of the model.

A platform names its worker; else the best one that plugins offer for its type of device is taken (`select.py`). All calls come
from one thread. A worker subclasses this, or the built-in one, which the plugin `device_worker` offers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.parallel.context import ParallelContext
from pelton.plugins import Plugins

if TYPE_CHECKING:
    from pelton.platform.interface import Platform
    from pelton.worker.pending import PendingOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Everything that a worker is made from. A new feature is a new field with a default: old workers keep working."""

    config: EngineConfig
    model: ResolvedModel
    platform: Platform
    plugins: Plugins
    rank: int = 0
    """Of its device on this host."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """Its place among the ranks that share the model, and the collectives between them."""


class Worker(ABC):
    """Order: `init_device` -> `load_model` -> `kv_cache_specs` -> `available_kv_cache_bytes` -> `initialize_kv_cache`
    -> `warm_up` -> steps. What else a worker can do is reached by `Executor.call`, which refuses what it has not."""

    def __init__(self, context: WorkerContext) -> None:
        self.config = context.config
        self.model_info = context.model
        self.platform = context.platform
        self.plugins = context.plugins
        self.rank = context.rank
        self.parallel = context.parallel

    @abstractmethod
    def init_device(self) -> None: ...

    @abstractmethod
    def load_model(self) -> None: ...

    @abstractmethod
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]: ...

    @abstractmethod
    def available_kv_cache_bytes(self) -> int: ...

    @abstractmethod
    def initialize_kv_cache(self, plan: KVCachePlan) -> None: ...

    @abstractmethod
    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        """Run or launch a step. Returns its result or, where the device runs on behind the host, what waits for it; or None
        when it has grammar rows: then `sample` gives it. A result that waits on the device for its masks gets them by `bring_masks`."""

    @abstractmethod
    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        """Finish a step that waited for its masks. With `masks.error` forget it, and raise `EngineError` with that."""

    @abstractmethod
    def report(self) -> DeviceReport: ...

    # Optional.

    def bring_masks(self, masks: GrammarMasks) -> None:  # noqa: B027
        """Take the masks that a launched step's device waits for, or an error. From any thread, once results of older steps are read."""

    def mask_room(self, step_id: int) -> Any:
        """See `Executor.mask_room`. From any thread."""
        return None

    def warm_up(self) -> None:  # noqa: B027
        """Compile, tune or capture what the first requests would otherwise wait for."""

    def fit_step(self) -> StepFit | None:
        """See `Executor.fit_step`."""
        return None

    def prepare_ahead(self) -> bool:
        """See `Executor.prepare_ahead`."""
        return False

    def check_device(self) -> None:  # noqa: B027
        """See `Executor.check_device`. From any thread."""

    def shutdown(self) -> None:  # noqa: B027
        """Free the device."""
