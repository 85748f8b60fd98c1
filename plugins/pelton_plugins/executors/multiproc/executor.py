"""`MultiProcExecutor`: a process for each rank of a model that is spread over the devices of one host.

Jobs go to all ranks at once through a ring in shared memory (`ring.py`); every rank runs the same steps in the same order, with
collectives between them; each stage of a pipeline has another step at work. The answers of the last stage's first rank count. A rank
that ends or is stopped takes the others with it: whoever waits gets an error that names it, within a second.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import msgspec

from pelton.errors import ConfigError, EngineDeadError, error_from_info
from pelton.executor.interface import Executor, ExecutorContext, StepHandle
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.logging import get_logger
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton_plugins.executors.multiproc import messages
from pelton_plugins.executors.multiproc.processes import FULL_S, RankProcess, RanksAhead, end_ranks
from pelton_plugins.executors.multiproc.ring import RingWriter
from pelton_plugins.executors.multiproc.transfers import JoinedTransfers
from pelton_plugins.executors.shared_experts.share import check_experts

logger = get_logger(__name__)

_CHECK_S = 0.25
"""How often ranks that a signal may hold are looked at; one that is held at two looks counts as hung."""
_OTHERS_S = 1.0
"""How long others may take to say of a step what one rank has said: that it failed."""
_STOP_S = 5.0


class RankStep(StepHandle):
    """A step that all ranks run."""

    def __init__(self, future: Future[ModelOutput]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        try:
            return self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(f"The step did not end within {timeout_s} s.") from None


class _Gathered:
    """Answers of all ranks to one call."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.missing = size
        self.done: Future[list[Any]] = Future()

    def take(self, rank: int, answer: messages.CallDone) -> bool:
        """True with the last one. The first error ends the wait: other ranks may wait for the one that failed."""
        self.results[rank] = answer.result
        self.missing -= 1
        if not self.done.done():
            if answer.error is not None:
                self.done.set_exception(error_from_info(answer.error))
            elif self.missing == 0:
                self.done.set_result(self.results)
        return self.missing == 0


class MultiProcExecutor(Executor):
    steps_are_ordered = True
    max_concurrent_steps = 2

    def __init__(self, context: ExecutorContext) -> None:
        parallel = context.config.parallel
        check_sizes(context)
        self.size = parallel.num_ranks
        self._tp_size, self._num_parts = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
        self._stage_specs: list[dict[str, KVCacheSpec]] = []
        self._error: EngineDeadError | None = None
        self._telling_rank = parallel.telling_rank
        self.launches_past_masks = parallel.pipeline_parallel_size > 1  # the last stage alone waits with them
        self._steps: dict[int, Future[ModelOutput]] = {}
        self._transfers: JoinedTransfers | None = None
        if context.config.kv_transfer.kv_connector is not None:
            self._transfers = JoinedTransfers(self.size, self._telling_rank)
        self._failed: dict[int, set[int]] = {}  # by step, ranks of several stages that say so
        self._calls: dict[int, _Gathered] = {}
        self._call_ids = itertools.count()
        self._lock = threading.Lock()  # of the two tables, and of the error
        self._write_lock = threading.Lock()
        self._is_closing = False
        self._ranks: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, end_ranks, self._ranks)
        try:
            self.start_ranks(context, self._ranks)
        except BaseException:
            self._finalizer()
            raise
        # Before anybody listens: a rank that cannot prepare itself says so before it is told more.
        gathered = self._expect(next(self._call_ids))
        self._watcher = threading.Thread(target=self._watch, name="pelton-ranks", daemon=True)
        self._watcher.start()
        try:
            self._write(messages.Start(context.config, context.model))
            self.max_concurrent_steps = min(self._wait_for(gathered))
        except BaseException:
            self.shutdown()
            raise

    # -- for a subclass that has its ranks elsewhere --

    def start_ranks(self, context: ExecutorContext, ranks: list[RankProcess]) -> None:
        """Take processes for all ranks, which have been told to prepare themselves."""
        ahead = context.ahead
        if not isinstance(ahead, RanksAhead) or not ahead.fits(context.config):
            if ahead is not None:
                ahead.close()
            ahead = RanksAhead(context.config, context.plugins)
        ranks += ahead.hand_over()
        self._ring: RingWriter | None = ahead.ring

    def send(self, data: bytes) -> None:
        """Hand a job to all ranks."""
        assert self._ring is not None
        self._ring.write(data, self._wake, self._wait_for_room)

    # -- what the engine calls --

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return those of all stages, each from its first rank: the others hold as many heads."""
        found = self._all("kv_cache_specs")[:: self._tp_size]
        self._stage_specs = [{name: messages.spec_from_data(spec) for name, spec in stage.items()} for stage in found]
        specs = {name: spec for stage in self._stage_specs for name, spec in stage.items()}
        check_spread(specs, self._num_parts)
        return specs

    def available_kv_cache_bytes(self) -> int:
        """Return what all stages have together, for the plan that is over all their layers."""
        found: list[int] = self._all("available_kv_cache_bytes")
        stages = [min(found[first : first + self._tp_size]) for first in range(0, self.size, self._tp_size)]
        if not self._stage_specs:
            self.kv_cache_specs()
        return usable_bytes(stages, self._stage_specs)

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self._all("initialize_kv_cache", messages.plan_to_data(plan))

    def execute(self, output: SchedulerOutput) -> StepHandle:
        future: Future[ModelOutput] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._steps[output.step_id] = future
        self._write(messages.Execute(output))
        return RankStep(future)

    def sample(self, masks: GrammarMasks) -> None:
        self._write(messages.Sample(masks))

    def call(self, method: str, *args: Any) -> Any:
        return self._all("call", method, *args)[0]

    def call_beside(self, method: str, *args: Any) -> Future[Any]:
        """Over when every rank has done it."""
        first: Future[Any] = Future()
        gathered = self._begin("call_beside", method, *args)
        gathered.done.add_done_callback(lambda done: _first_of(done, first))
        return first

    def fit_step(self) -> StepFit | None:
        """Return the smallest of the ranks': they wait for each other."""
        found = [msgspec.convert(fit, StepFit) for fit in self._all("fit_step") if fit is not None]
        return min(found, key=lambda fit: fit.num_tokens) if len(found) == self.size else None

    def prepare_ahead(self) -> bool:
        return any(self._all("prepare_ahead"))

    def report(self) -> DeviceReport:
        reports = [msgspec.convert(found, DeviceReport) for found in self._all("report")]
        first: DeviceReport = reports[0]
        if self.size > 1:
            first.device = f"{self.size} ranks, each {first.device}"
            first.weights_bytes = sum(report.weights_bytes for report in reports)
        return first

    def check_health(self) -> None:
        if self._error is not None:
            raise self._error

    def check_device(self) -> None:
        self._all("check_device")

    def shutdown(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self._error is None:
            with contextlib.suppress(EngineDeadError, OSError):
                self._write(messages.Stop())
                deadline = time.monotonic() + _STOP_S
                while not all(rank.has_ended() for rank in self._ranks) and time.monotonic() < deadline:
                    time.sleep(0.01)
        self._fail("The executor was shut down.")
        if self._watcher is not threading.current_thread():
            self._watcher.join(2.0)
        self._finalizer()
        if self._ring is not None:
            self._ring.close()

    # -- to the ranks --

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Results of every rank, in order. Raises the first error that comes."""
        return self._wait_for(self._begin(method, *args))

    def _begin(self, method: str, *args: Any) -> _Gathered:
        call_id = next(self._call_ids)
        gathered = self._expect(call_id)
        self._write(messages.Call(call_id, method, list(args)))
        return gathered

    def _expect(self, call_id: int) -> _Gathered:
        gathered = _Gathered(self.size)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._calls[call_id] = gathered
        return gathered

    def _wait_for(self, gathered: _Gathered) -> list[Any]:
        return gathered.done.result()

    def _write(self, job: messages.Job) -> None:
        data = messages.encode(job)
        with self._write_lock:
            self.send(data)

    def _wake(self) -> None:
        for rank in self._ranks:
            rank.wake()

    def _wait_for_room(self) -> None:
        if self._error is not None:
            raise self._error
        time.sleep(FULL_S)

    # -- from the ranks, on the watcher's thread --

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for rank in self._ranks:
            selector.register(rank.socket, selectors.EVENT_READ, rank)
        held: set[int] = set()
        next_look = time.monotonic() + _CHECK_S
        with selector:
            while self._error is None:
                for key, _ in selector.select(_CHECK_S):
                    self._hear(key.data)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _CHECK_S
                    held = self._look_for_held(held)

    def _hear(self, rank: RankProcess) -> None:
        answers = rank.answers()
        if answers is None:
            if not self._is_closing:
                self._fail(rank.describe_end())
            elif self._error is None:
                time.sleep(FULL_S)  # `shutdown` is about to set it
            return
        for data in answers:
            answer = messages.decode_answer(data)
            if isinstance(answer, messages.CallDone):
                gathered = self._calls.get(answer.call_id)
                if gathered is not None and gathered.take(rank.rank, answer):
                    self._calls.pop(answer.call_id, None)
            else:
                self._finish_step(rank, answer)

    def _finish_step(self, rank: RankProcess, answer: messages.StepDone) -> None:
        tells = rank.rank == self._telling_rank
        if answer.error is not None and answer.is_fatal:
            self._fail(f"{rank.name}: {answer.error.message}")
        elif answer.error is not None and not answer.others_go_on and (not tells or self._telling_rank):
            # All fail alike where the step was at fault. Some alone leave the others in the middle.
            failed = self._failed.setdefault(answer.step_id, set())
            if not failed:
                threading.Timer(_OTHERS_S, self._fail_unless_done, (rank, answer)).start()
            failed.add(rank.rank)
            if len(failed) == self.size:
                self._settle(answer)
        elif answer.error is not None or self._transfers is None:
            self._settle(answer)
        else:
            assert answer.output is not None
            output = self._transfers.take(rank.rank, answer.output, is_open=answer.step_id in self._steps)
            if output is not None:
                self._settle(messages.StepDone(answer.step_id, output))

    def _settle(self, answer: messages.StepDone) -> None:
        self._failed.pop(answer.step_id, None)
        if (future := self._steps.pop(answer.step_id, None)) is None:
            pass  # it was told meanwhile that a rank is gone
        elif answer.error is not None:
            if self._transfers is not None:
                self._transfers.forget(answer.step_id)
            future.set_exception(error_from_info(answer.error))
        else:
            assert answer.output is not None
            future.set_result(answer.output)

    def _fail_unless_done(self, rank: RankProcess, answer: messages.StepDone) -> None:
        self._failed.pop(answer.step_id, None)
        if answer.step_id in self._steps and answer.error is not None:
            self._fail(f"{rank.name} failed in step {answer.step_id}: {answer.error.message}")

    def _look_for_held(self, before: set[int]) -> set[int]:
        held = {rank.rank for rank in self._ranks if rank.is_stopped()}
        for rank in self._ranks:
            if rank.rank in held & before:
                self._fail(f"{rank.name} is held by a signal and answers nothing.")
        return held

    def _fail(self, reason: str) -> None:
        """Everything that waits gets the reason, and so does all that comes; no rank is left."""
        with self._lock:
            if self._error is not None:
                return
            self._error = EngineDeadError(reason)
            futures: list[Future[Any]] = [*self._steps.values(), *(call.done for call in self._calls.values())]
            self._steps, self._calls = {}, {}
        if not self._is_closing:
            logger.error("%s The other ranks are ended.", reason)
        for rank in self._ranks:
            rank.kill()
        for future in futures:
            if not future.done():
                future.set_exception(self._error)


def check_sizes(context: ExecutorContext) -> None:
    parallel = context.config.parallel
    sizes = ("decode_context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    shared = next((name for name in sizes if getattr(parallel, name) > 1), None)
    connector = context.config.kv_transfer.kv_connector
    if shared is not None and connector is not None:
        entry = context.plugins.find("pelton_kv_connectors", connector, setting="kv_transfer_config.kv_connector")
        if not getattr(entry.resolve(), "serves_ranks", False):
            raise ConfigError(
                f"{shared} is {getattr(parallel, shared)}, which does not go with the KV connector {connector!r}: it takes one rank's part "
                "of a block for all of it (KVConnector.serves_ranks). Set it to 1; data_parallel_size goes with it."
            )
    check_experts(context)


def check_spread(specs: Mapping[str, KVCacheSpec], num_ranks: int) -> None:
    """Refuse layers whose tokens are not spread over the ranks of decode context parallelism."""
    for name, spec in specs.items():
        if spec.num_ranks != num_ranks:
            raise ConfigError(
                f"decode_context_parallel_size is {num_ranks}, and {name} keeps a {type(spec).__name__}, which has no parts for ranks. "
                "Set it to 1."
            )


def usable_bytes(stages: Sequence[int], specs: Sequence[Mapping[str, KVCacheSpec]]) -> int:
    """Return the bytes of a plan over all layers whose part in each stage fits there. stages: bytes of each; specs: of its layers.

    Where layers share buffers, a stage may need all of them: then the plan may be as large as the smallest stage.
    """
    kinds = {spec for stage in specs for spec in stage.values()}
    if len(kinds) != 1:
        return min(stages)
    total = sum(map(len, specs))
    return min(size * total // len(own) for size, own in zip(stages, specs, strict=True))


def _first_of(done: Future[list[Any]], first: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        first.set_exception(error)
    else:
        first.set_result(done.result()[0])
