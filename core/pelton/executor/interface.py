"""Interface of an executor: runs steps on workers, wherever they are.

The built-in one, of the plugin `executors`, runs one worker on a thread of this process; others spread workers over processes or
hosts. The engine core's thread alone calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pelton.config import EngineConfig
from pelton.errors import NotSupportedError
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorContext:
    """Everything that an executor is made from. A new feature is a new field with a default: old executors keep working."""

    config: EngineConfig
    model: ResolvedModel
    plugins: Plugins
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own."""
    ahead: Any = None
    """What `ExecutorEntry.ahead` has started, now the executor's; None where nothing was."""


class StepHandle(ABC):
    """A step that runs."""

    @abstractmethod
    def ready(self) -> bool:
        """True when `result` returns at once."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> ModelOutput:
        """Wait for the step. Raises what the step raised (the step failed as a whole), or `TimeoutError`."""


class Executor(ABC):
    """Life cycle: construct -> `kv_cache_specs`, `available_kv_cache_bytes` -> `initialize_kv_cache` -> steps -> `shutdown`."""

    steps_are_ordered: bool = True
    """One stream orders all steps: blocks of a finished request may be reused by the next step at once."""
    max_concurrent_steps: int = 2
    """Steps that may be open."""
    launches_past_masks: bool = False
    """`execute` may be called while two steps before it still wait for their masks: the device, not a thread, waits with them."""

    @abstractmethod
    def __init__(self, context: ExecutorContext) -> None:
        """Start the worker(s) and load the weights. Raises `ConfigError` and friends, with the cause."""

    @abstractmethod
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Need of each layer by its name; layers that share another layer's cache are left out."""

    @abstractmethod
    def available_kv_cache_bytes(self) -> int:
        """Measured, after weights and the largest step."""

    @abstractmethod
    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        """Allocate the pool and everything sized by it, then warm up."""

    @abstractmethod
    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Launch a step and return at once. Without grammar rows sampling is part of the launch; with them `sample` must follow."""

    @abstractmethod
    def sample(self, masks: GrammarMasks) -> None:
        """Bring the masks that an executed step with grammar rows waits for, or the error for which there are none."""

    def mask_room(self, output: SchedulerOutput) -> Any:
        """Return the host memory [slots, words] int32 that the device will read the masks of an executed step from, one at each row's
        slot: who writes them there brings none. None where there is no such memory, or not yet."""
        return None

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker's own between steps; arguments and result are plain data. Raises `NotSupportedError` for a
        method that this worker does not have."""

    def call_beside(self, method: str, *args: Any) -> Future[Any]:
        """The same while steps go on, on a thread of its own: for methods that the worker has for that (`load_adapter`)."""
        raise NotSupportedError(f"{type(self).__name__} calls no worker beside its steps.")

    @abstractmethod
    def report(self) -> DeviceReport: ...

    def fit_step(self) -> StepFit | None:
        """How large a step may be for the device's platform, as measured; None: it has no opinion.
        Asked once, after `initialize_kv_cache`, where no setting says `max_num_batched_tokens`."""
        return None

    def prepare_ahead(self) -> bool:
        """Do one piece of work that later steps would otherwise wait for (a graph's capture); False when none is left.
        Called when no step is open and nobody waits."""
        return False

    def check_health(self) -> None:  # noqa: B027
        """Raise when a worker is gone."""

    def check_device(self) -> None:  # noqa: B027
        """Raise when the device can do no more work at all. Called after a step failed: some errors (an illegal address) leave
        every later one to fail too, and only a new process helps."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop workers and free memory. Idempotent; safe while steps are open."""
