"""One worker on one thread of the engine's process.

Jobs run in the order in which they come, so one queue orders all steps. A step with grammar rows holds the thread until its masks are
brought, and what is queued behind it waits; unless the worker lets its device wait, and launches the next step behind it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pelton.config import EngineConfig
from pelton.config.parallel import ParallelConfig
from pelton.errors import ConfigError, EngineDeadError, NotSupportedError, PluginError
from pelton.executor.interface import Executor, ExecutorContext, StepHandle
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.parallel.communicator import GroupContext
from pelton.plugins import FIX_IT
from pelton.utils.threads import take_short_turns
from pelton.worker.interface import Worker, WorkerContext
from pelton.worker.pending import PendingOutput
from pelton.worker.select import describe_platform, start_worker
from pelton_plugins.executors.one_rank import OneRank

if TYPE_CHECKING:
    from pelton.platform.interface import Platform
    from pelton_plugins.executors.shared_experts.lock_step import LockStep

_SHUTDOWN_WAIT_S = 5.0
_POLL_S = 20e-6  # of a device that is waited for with a time limit

T = TypeVar("T")


class FutureStep(StepHandle):
    """A step on the worker's thread: launched by it, then on the device."""

    def __init__(self, future: Future[ModelOutput | PendingOutput]) -> None:
        self._future = future
        self._result: ModelOutput | None = None

    def ready(self) -> bool:
        if self._result is not None:
            return True
        if not self._future.done():
            return False
        launched = None if self._future.cancelled() or self._future.exception() else self._future.result()
        return launched.ready() if isinstance(launched, PendingOutput) else True

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        if self._result is None:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            launched = self._launched(timeout_s)
            if isinstance(launched, PendingOutput):
                while deadline is not None and not launched.ready():
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"The step did not end within {timeout_s} s.")
                    time.sleep(_POLL_S)
                launched = launched.result()
            self._result = launched
        return self._result

    def _launched(self, timeout_s: float | None) -> ModelOutput | PendingOutput:
        try:
            return self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise  # the step itself timed out
            raise TimeoutError(f"The step did not end within {timeout_s} s.") from None
        except CancelledError:
            raise EngineDeadError("The executor was shut down before this step ran.") from None


class WorkerThread:
    """A daemon thread with a queue of jobs: it never keeps the interpreter from ending."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Condition()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._masks: dict[int, GrammarMasks] = {}
        self._takers: dict[int, Callable[[GrammarMasks], None]] = {}  # of steps whose masks the device waits for
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue `job`; its result, or what it raises, is in the future."""
        future: Future[Any] = Future()
        with self._ready:
            if self._is_closed:
                raise EngineDeadError("The executor was shut down.")
            self._jobs.append((job, future))
            self._ready.notify_all()
        return future

    def bring(self, masks: GrammarMasks) -> None:
        with self._ready:
            take = self._takers.pop(masks.step_id, None)
            if take is None:
                self._masks[masks.step_id] = masks
                self._ready.notify_all()
        if take is not None:
            take(masks)

    def pass_masks(self, step_id: int, take: Callable[[GrammarMasks], None]) -> None:
        """On the worker's thread: `take` gets the masks of a launched step, on the thread that brings them; an error, when the executor
        is shut down."""
        with self._ready:
            masks = self._masks.pop(step_id, None)
            self._forget_masks_before(step_id)
            if masks is None and not self._is_closed:
                self._takers[step_id] = take
                return
        take(masks or _closed_masks(step_id))

    def wait_for_masks(self, step_id: int) -> GrammarMasks:
        """On the worker's thread: the masks of a step that is executed. Raises when the executor is shut down meanwhile."""
        with self._ready:
            self._ready.wait_for(lambda: step_id in self._masks or self._is_closed)
            if self._is_closed:
                raise EngineDeadError("The executor was shut down before this step had its masks.")
            masks = self._masks.pop(step_id)
            self._forget_masks_before(step_id)
            return masks

    def _forget_masks_before(self, step_id: int) -> None:
        """Those of a step that failed before it waited came all the same: nobody asks for them any more."""
        if self._masks:
            self._masks = {known: others for known, others in self._masks.items() if known > step_id}

    def close(self, timeout_s: float) -> None:
        """Drop what is queued, let the running job end. Idempotent."""
        with self._ready:
            self._is_closed = True
            dropped, self._jobs = list(self._jobs), deque()
            takers, self._takers = self._takers, {}
            self._ready.notify_all()
        for step_id, take in takers.items():
            take(_closed_masks(step_id))
        for _, future in dropped:
            future.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while (taken := self._take()) is not None:
                job, future = taken
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = job()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
                del taken, job, future  # an idle thread must not keep a step's tensors

    def _take(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._ready:
            self._ready.wait_for(lambda: self._jobs or self._is_closed)
            return None if self._is_closed else self._jobs.popleft()


def _closed_masks(step_id: int) -> GrammarMasks:
    why = "The executor was shut down before this step had its masks."
    return GrammarMasks(step_id=step_id, bitmask=b"", num_masks=[], error=why)


class InProcessExecutor(Executor):
    """Made by the engine core; the worker's class is the platform's."""

    steps_are_ordered = True
    max_concurrent_steps = 2
    rank = 0

    def __init__(self, context: ExecutorContext) -> None:
        self.check_sizes(context)
        platform = self.find_platform(context)
        self.prepare(context, platform)
        self._platform = platform
        self.max_concurrent_steps = context.config.max_steps_in_flight
        self.launches_past_masks = platform.stream_wait() is not None
        self._thread = WorkerThread("pelton-worker")
        self._worker: Worker | None = None
        self._lock_step: LockStep | None = None
        self._after_step: Callable[[], None] | None = None
        self._calls: dict[str, Callable[..., Any]] = {}  # that are not the worker's
        _live.add(self)
        try:
            self._worker = self._run(lambda: self._start_worker(context, platform))
        except BaseException:
            self.shutdown()
            raise

    # What an executor of one rank of several does otherwise.

    def check_sizes(self, context: ExecutorContext) -> None:
        """Raise `ConfigError` for settings that ask for more than one device."""
        check_one_device(context.config)
        if context.config.parallel.shares_experts:
            from pelton_plugins.executors.shared_experts.share import check_experts

            check_experts(context)

    def find_platform(self, context: ExecutorContext) -> Platform:
        from pelton.platform.select import select_platform

        return select_platform(context.config, context.plugins)

    def prepare(self, context: ExecutorContext, platform: Platform) -> None:
        """Prepare the process for its platform, before anything is made on the device. Engines of one host share its cores."""
        place, count = place_on_host(context.config.parallel, self.rank)
        if count > 1:
            platform.share_host(place, count)
        platform.prepare(context.config)

    def place(self, context: ExecutorContext, platform: Platform) -> tuple[int, GroupContext]:
        """Return the number of the device on this host, and the worker's place among the ranks. On the worker's thread.
        Layers leave sums over one rank out when they are made: nothing calls it in a step."""
        return place_on_host(context.config.parallel)[0], GroupContext(OneRank())

    def _start_worker(self, context: ExecutorContext, platform: Platform) -> Worker:
        rank, parallel = self.place(context, platform)
        if context.config.parallel.shares_experts:
            from pelton_plugins.executors.shared_experts.share import share_experts

            self._lock_step = share_experts(context, platform, parallel, platform.device(rank), self._thread.submit)
            self._calls["lock_step_counts"] = self._lock_step.counts
        worker = start_worker(
            WorkerContext(
                config=context.config, model=context.model, platform=platform, plugins=context.plugins, rank=rank,
                parallel=parallel,
            )
        )  # fmt: skip
        if context.config.eplb.enable_eplb:
            self._balance(context, worker, parallel)
        return worker

    def _balance(self, context: ExecutorContext, worker: Worker, parallel: GroupContext) -> None:
        from pelton_plugins.executors.shared_experts.balancer import ExpertBalancer

        ranks = parallel.communicator if self._lock_step is None else self._lock_step.everyone
        balancer = ExpertBalancer(context, worker, ranks)
        self._calls["expert_balance"] = balancer.told
        if self._lock_step is not None:
            self._lock_step.after_round = balancer.after_step
        else:
            self._after_step = balancer.after_step

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self._run(self._alive().kv_cache_specs)

    def available_kv_cache_bytes(self) -> int:
        num_bytes = self._run(self._alive().available_kv_cache_bytes)
        if not isinstance(num_bytes, int) or num_bytes < 0:
            what, where = describe_platform(self._platform)
            raise PluginError(
                f"{what} ({where}) leaves the KV cache {num_bytes!r}; it has to be a number of bytes. {FIX_IT}"
            )
        return num_bytes

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        worker = self._alive()
        self._run(lambda: worker.initialize_kv_cache(plan))
        self._run(worker.warm_up)
        # Not before: threads that load kernels would change places in the middle of it more often.
        take_short_turns()

    def execute(self, output: SchedulerOutput) -> StepHandle:
        worker, thread, lock_step, after_step = self._alive(), self._thread, self._lock_step, self._after_step
        if lock_step is not None:
            lock_step.add()

        def step() -> ModelOutput | PendingOutput:
            if lock_step is None:
                result = worker.execute(output)
            else:
                num_tokens = output.total_num_scheduled_tokens
                result = lock_step.run(output.step_id, num_tokens, lambda: worker.execute(output))
            if after_step is not None:
                after_step()
            if result is None:
                return worker.sample(thread.wait_for_masks(output.step_id))
            if output.grammar_rows:
                thread.pass_masks(output.step_id, worker.bring_masks)
            return result

        return FutureStep(thread.submit(step))

    def sample(self, masks: GrammarMasks) -> None:
        self._thread.bring(masks)

    def mask_room(self, output: SchedulerOutput) -> Any:
        return None if self._worker is None else self._worker.mask_room(output.step_id)

    def call(self, method: str, *args: Any) -> Any:
        target = self._method(method)
        return self._run(lambda: target(*args))

    def call_beside(self, method: str, *args: Any) -> Future[Any]:
        target, future = self._method(method), Future[Any]()

        def run() -> None:
            try:
                result = target(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=f"pelton-{method}", daemon=True).start()
        return future

    def _method(self, name: str) -> Callable[..., Any]:
        if name in self._calls:
            return self._calls[name]
        target = None if name.startswith("_") else getattr(self._alive(), name, None)
        if not callable(target):
            raise NotSupportedError(
                f"{type(self._worker).__name__} has no method {name!r}; this platform's worker does not offer that."
            )
        found: Callable[..., Any] = target
        return found

    def fit_step(self) -> StepFit | None:
        return self._run(self._alive().fit_step)

    def prepare_ahead(self) -> bool:
        return self._run(self._alive().prepare_ahead)

    def report(self) -> DeviceReport:
        return self._run(self._alive().report)

    def check_device(self) -> None:
        self._alive().check_device()  # on the caller's thread: the worker's may wait for masks

    def check_health(self) -> None:
        if not self._thread.is_alive:
            raise EngineDeadError("The worker's thread has ended.")

    def shutdown(self) -> None:
        _live.discard(self)
        if self._lock_step is not None:
            self._lock_step.close()
        worker, self._worker = self._worker, None
        if worker is not None and self._thread.is_alive:
            self._thread.close(_SHUTDOWN_WAIT_S)
            worker.shutdown()
        else:
            self._thread.close(_SHUTDOWN_WAIT_S)

    def _alive(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("The executor was shut down.")
        return self._worker

    def _run(self, job: Callable[[], T]) -> T:
        try:
            return cast("T", self._thread.submit(job).result())
        except CancelledError:
            raise EngineDeadError("The executor was shut down.") from None


def place_on_host(parallel: ParallelConfig, rank: int = 0) -> tuple[int, int]:
    """Return the number on this host of the device of an engine's rank `rank`, and how many devices this node's engines have."""
    engine = parallel.data_parallel_rank - parallel.data_parallel_start_rank
    return engine * parallel.num_ranks + rank, len(parallel.engine_indexes) * parallel.num_ranks


def check_one_device(config: EngineConfig) -> None:
    parallel = config.parallel
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}; the in_process executor runs one device. "
                "Set it to 1, or name an executor that runs several with --distributed-executor-backend."
            )


_live: weakref.WeakSet[InProcessExecutor] = weakref.WeakSet()


@atexit.register
def _shutdown_all() -> None:
    """Before the interpreter takes modules apart: a daemon thread inside torch at that time may crash the process."""
    for executor in list(_live):
        executor.shutdown()
