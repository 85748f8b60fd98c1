"""Interface of a scheduler: which requests run in the next step, and what a step's result means.

The engine core's thread alone calls it. No method may block or touch a device. A plugin brings one whole (hook
`pelton_schedulers`), or only a policy (`policy.py`) or gates (`gates.py`) of it. The built-in one is the plugin `scheduler`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pelton.config import SchedulerConfig
from pelton.errors import ErrorInfo, NotSupportedError
from pelton.kv_cache.hashing import BlockHasher
from pelton.kv_cache.interface import KVCacheManager
from pelton.messages.outputs import EngineOutput, FinishReason
from pelton.messages.request import AdapterRef, EngineRequest
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.metrics.stats import SchedulerStats

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.kv_transfer.interface import SchedulerConnector
    from pelton.scheduler.gates import Gate
    from pelton.scheduler.policy import SchedulingPolicy
    from pelton.spec_decode.interface import DraftProposer
    from pelton.structured.manager import GrammarSource


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoads:
    """Room for adapters, and how the workers get them."""

    num_slots: int
    """Adapters that one step can use."""
    num_host: int
    """Adapters in the workers' own memory."""
    load: Callable[[AdapterRef, int], Future[Any]]
    """Starts to read an adapter into that memory, where it is known by the number of the load."""


class AdapterTable(Protocol):
    """A scheduler's adapters, as the engine core asks for them between steps."""

    def request(self, ref: AdapterRef) -> bool:
        """Have it loaded. True: the workers have it. Raises what stopped the load."""
        ...

    def loaded(self) -> list[int]:
        """Ids of those that the workers have."""
        ...

    def remove(self, adapter_id: int) -> bool:
        """Forget it once no request runs with it. False: it is not there."""
        ...

    def pin(self, adapter_id: int) -> None:
        """Keep it. Raises `RequestError` where that is not possible."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """Everything that a scheduler is made from. A new feature is a new field with a default: old factories keep working."""

    config: SchedulerConfig
    kv_manager: KVCacheManager
    max_model_len: int
    """Resolved, as the next two; `config` may leave them open."""
    max_num_seqs: int
    max_num_batched_tokens: int
    block_sizes: Sequence[int]
    """Tokens a block, by KV group."""
    vocab_size: int
    context_tokens: int = 0
    """Tokens of context that make a prompt's token cost twice: chunks behind a long context are smaller. 0: all cost the same."""
    hasher: BlockHasher | None = None
    """None switches prefix caching off."""
    policy: SchedulingPolicy | None = None
    """None: first come, first served."""
    steps_are_ordered: bool = True
    """The executor promises that a later step may reuse what an open one still touches."""
    max_steps_in_flight: int = 1
    num_draft_tokens: int = 0
    """Drafts a step that the workers make on the device, which the host knows as a number only."""
    grammar_source: GrammarSource | None = None
    proposer: DraftProposer | None = None
    """Makes drafts on the host. None: no drafts, or the device's."""
    min_acceptance_rate: float = 0.0
    """Where a smaller share of the drafts is accepted, none are made for a while; 0: drafting never pauses."""
    connector: SchedulerConnector | None = None
    adapter_is_ready: Callable[[int], bool] | None = None
    """Asked for requests with an adapter, where `adapters` is None. None too: the engine serves no adapters."""
    adapters: AdapterLoads | None = None
    """Set where the engine serves adapters: the scheduler decides which the workers have, and says so with each step."""
    is_pooling: bool = False
    """Requests have `pooling_params`: each ends with its prompt's last token, and samples none."""
    gates: Sequence[Gate] = ()
    """Further admission gates, asked after the built-in ones."""
    clock: Callable[[], float] = time.monotonic
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a scheduler alone."""
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own."""


class Scheduler(ABC):
    """Life cycle of a step: `schedule` -> (executor) -> `update`, with up to `max_steps_in_flight` steps between the two.

    `finish_requests` and `add_request` are called between steps only. StepResults come back in step order.
    """

    adapters: AdapterTable | None = None
    """None: it serves no adapters, and an engine with `SchedulerContext.adapters` does not start."""

    @abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` (`QueueFullError`) when it can never or may not now be queued."""

    @abstractmethod
    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End requests from outside (abort, deadline, stop string). Unknown ids are not an error: they finished already.

        Blocks and slots are released once no open step can touch them. An output with the reason is given by the next
        `take_outputs`, except for `FinishReason.STOP` (the front end ended it and knows).
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput | None:
        """The next step's work, or None when nothing can run now (all is finished, pending or waiting)."""

    @abstractmethod
    def grammar_masks(self, output: SchedulerOutput, room: Any = None) -> GrammarMasks | None:
        """Masks for the step's grammar rows; needs every earlier step's `update`. None when it has no such row.
        room: see `Executor.mask_room`."""

    @abstractmethod
    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[EngineOutput]:
        """Take in a step's result: append tokens, check stops, free what ended."""

    @abstractmethod
    def update_failed(self, output: SchedulerOutput, error: ErrorInfo) -> list[EngineOutput]:
        """The step failed as a whole: its requests end with `error`, its blocks leave the prefix index."""

    @abstractmethod
    def take_outputs(self) -> list[EngineOutput]:
        """Outputs of requests that ended outside a step (aborts, deadlines, refusals)."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool: ...

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Monotonic time at which some request's time limit passes; None when none has one."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """End the requests whose time limit passed."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False (and nothing done) while requests hold blocks."""

    def rest(self, call: Callable[..., Any], method: str, *args: Any) -> Any:
        """`sleep`(level), `wake_up`(tags) or `is_sleeping`, while no step is open; `call` reaches the workers. Optional."""
        raise NotSupportedError(f"{type(self).__name__} does not sleep.")

    @abstractmethod
    def take_stats(self) -> SchedulerStats:
        """State now; counters since the last call."""
