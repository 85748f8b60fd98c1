"""Interface of an executor: runs steps on workers, wherever they are.

`in_process.py` runs one worker on a thread of this process; plugins spread workers over processes or
hosts. The engine core's thread alone calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.scheduler.output import GrammarMasks, ModelOutput, SchedulerOutput


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """How large a step may be so that it does not last too long."""

    num_tokens: int
    """Most tokens without context."""
    context_tokens: int = 0
    """Tokens of context at which a token's attention takes as long as its products; 0: attention costs nothing beside them."""


class DeviceReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts that start-up found on the device; one row each of the start table."""

    device: str = ""
    """For people: "cpu: AMD EPYC, 2 threads"."""
    platform: str = ""
    attention_backend: str = ""
    attention_reason: str = ""
    """Why this backend: "priority 10, the only one that fits"."""
    choices: dict[str, str] = {}
    """What plugins chose by their settings, or without: name to value."""
    weights_bytes: int = 0
    phase_s: dict[str, float] = {}
    """Seconds by start phase: device, load, profile, ..."""
    notes: list[str] = []
    """What was lowered or shrunk, and why."""
    num_draft_tokens: int = 0
    """Most drafts of a row that the workers make themselves; 0: none, or the host makes them."""


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

    @abstractmethod
    def __init__(self, config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> None:
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

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker's own between steps; arguments and result are plain data. Raises `NotSupportedError` for a
        method that this worker does not have."""

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
