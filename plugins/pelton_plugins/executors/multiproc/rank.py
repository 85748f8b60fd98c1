"""The process of one rank: `python -m pelton_plugins.executors.multiproc.rank`, started by the executor and by nobody else.

Inside is the executor of one worker, which knows its place among the ranks. Three threads: the main one takes jobs from the ring
and notices the end of the engine; the worker's runs them in order; one answers. For steps one rank alone answers, the first of the last
stage, unless another's fails; with a KV connector all do.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pelton.engine.process import end_process
from pelton.engine.protocol import error_info
from pelton.errors import EngineDeadError, PeltonError, PluginError
from pelton.executor.interface import ExecutorContext, StepHandle
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheSpec
from pelton.logging import get_logger, setup
from pelton.parallel.communicator import Communicator, CommunicatorContext, GroupContext, make_communicator
from pelton.plugins import load_plugins
from pelton.utils import garbage
from pelton.utils.own_process import read_arguments
from pelton_plugins.executors.in_process import InProcessExecutor, place_on_host
from pelton_plugins.executors.multiproc import messages
from pelton_plugins.executors.multiproc.ring import RingReader
from pelton_plugins.executors.multiproc.transfers import transfers_alone
from pelton_plugins.executors.one_rank import OneRank

if TYPE_CHECKING:
    from pelton.config.parallel import ParallelConfig
    from pelton.platform.interface import Platform

logger = get_logger(__name__)

FRAME = struct.Struct("<Q")
"""Length of an answer, before it."""


class Jobs(Protocol):
    """A source of a rank's jobs, each as bytes."""

    def read(self, wait: Callable[[], None]) -> bytes: ...


class Rank:
    executor_class: ClassVar[type[RankExecutor]]

    def __init__(self, rank: int, size: int, ring: Jobs, parent: socket.socket) -> None:
        self.rank, self.size = rank, size
        self._ring, self._parent = ring, parent
        self._send_lock = threading.Lock()
        self._steps: queue.SimpleQueue[tuple[int, StepHandle]] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[messages.Call | None] = queue.SimpleQueue()
        self._executor: InProcessExecutor | None = None
        self._tells_results = self._tells_transfers = False

    def run(self) -> None:
        """Take jobs until told to stop. Ends the process when the engine is gone."""
        start = self._next_job()
        if not isinstance(start, messages.Start):
            return
        setup(start.config.observability.log_level if self.rank == 0 else "warning")
        try:
            with garbage.paused():
                self._executor = executor = self._make_executor(start)
        except Exception as error:
            if not isinstance(error, PeltonError):
                logger.exception("Rank %d did not start", self.rank)
            self._answer(messages.CallDone(0, None, error_info(error)))
            return
        self._answer(messages.CallDone(0, executor.max_concurrent_steps))
        self._tells_results = self.rank == start.config.parallel.telling_rank
        self._tells_transfers = start.config.kv_transfer.kv_connector is not None
        threading.Thread(target=self._answer_steps, name="pelton-steps", daemon=True).start()
        threading.Thread(target=self._answer_calls, name="pelton-calls", daemon=True).start()
        while not isinstance(job := self._next_job(), messages.Stop):
            if isinstance(job, messages.Execute):
                self._steps.put((job.output.step_id, executor.execute(job.output)))
            elif isinstance(job, messages.Sample):
                executor.sample(job.masks)
            elif isinstance(job, messages.Call):
                self._begin(executor, job)
        executor.shutdown()

    def _begin(self, executor: InProcessExecutor, call: messages.Call) -> None:
        """Calls take their place between the steps, one after another; some go on beside them."""
        if call.method in ("check_device", "call_beside"):
            threading.Thread(target=self._answer_call, args=(executor, call), daemon=True).start()
        else:
            self._calls.put(call)

    def _make_executor(self, start: messages.Start) -> InProcessExecutor:
        plugins = load_plugins(only=start.plugin_names)
        if plugins.digest() != start.plugin_digest:
            raise PluginError(
                f"Rank {self.rank} found other plugins than the engine: {', '.join(map(str, plugins.loaded))}. "
                "Did an installation change while Pelton was starting?"
            )
        context = ExecutorContext(config=start.config, model=start.model, plugins=plugins)
        return self.executor_class(context, self.rank, self.size, start.store)

    def _answer_steps(self) -> None:
        while True:
            step_id, handle = self._steps.get()
            try:
                output = handle.result()
            except BaseException as error:
                is_fatal = isinstance(error, EngineDeadError)
                others_go_on = getattr(error, "others_go_on", False)
                self._answer(messages.StepDone(step_id, None, error_info(error), is_fatal, others_go_on))
            else:
                if self._tells_results:
                    self._answer(messages.StepDone(step_id, output))
                elif self._tells_transfers:
                    self._answer(messages.StepDone(step_id, transfers_alone(output)))

    def _answer_calls(self) -> None:
        assert self._executor is not None
        while (call := self._calls.get()) is not None:
            self._answer_call(self._executor, call)

    def _answer_call(self, executor: InProcessExecutor, call: messages.Call) -> None:
        try:
            result = self._call(executor, call.method, call.args)
            messages.encode(messages.CallDone(call.call_id, result))
        except BaseException as error:
            self._answer(messages.CallDone(call.call_id, None, error_info(error)))
        else:
            self._answer(messages.CallDone(call.call_id, result))

    def _call(self, executor: InProcessExecutor, method: str, args: list[Any]) -> Any:
        if method == "kv_cache_specs":
            return {name: messages.spec_to_data(spec) for name, spec in executor.kv_cache_specs().items()}
        if method == "initialize_kv_cache":
            return executor.initialize_kv_cache(own_plan(messages.plan_from_data(args[0]), executor.kv_cache_specs()))
        if method == "call_beside":
            return executor.call_beside(*args).result()
        return getattr(executor, method)(*args)

    def _next_job(self) -> messages.Job:
        job: messages.Job = messages.decode_job(self._ring.read(self._wait))
        return job

    def _wait(self) -> None:
        """Wait for the next piece of a job; the end of the engine is the end of this process."""
        with contextlib.suppress(ConnectionError):
            if self._parent.recv(4096):
                return
        end_process(1)

    def _answer(self, answer: messages.Answer) -> None:
        data = messages.encode(answer)
        with self._send_lock, contextlib.suppress(OSError):
            self._parent.sendall(FRAME.pack(len(data)) + data)


class RankExecutor(InProcessExecutor):
    """The worker of one of several ranks."""

    def __init__(self, context: ExecutorContext, rank: int, size: int, store: str) -> None:
        self.rank, self._size, self._store = rank, size, store
        super().__init__(context)

    def check_sizes(self, context: ExecutorContext) -> None: ...

    def place(self, context: ExecutorContext, platform: Platform) -> tuple[int, GroupContext]:
        """Ranks of one stage follow each other."""
        parallel = context.config.parallel
        local_rank = self.local_rank(parallel)
        stage, rank = divmod(self.rank, parallel.tensor_parallel_size)
        stages = None
        if parallel.pipeline_parallel_size > 1:
            stages = self._communicator(context, platform, stage, parallel.pipeline_parallel_size, f"pp{rank}")
        size, num_parts = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
        if size == 1:
            return local_rank, GroupContext(OneRank(), stages)
        group = self._communicator(context, platform, rank, size, f"tp{stage}")
        found = GroupContext(group, stages)
        if num_parts > 1:  # ranks with the same KV heads follow each other
            number, part = divmod(rank, num_parts)
            found.context = group
            if num_parts < size:
                found.context = self._communicator(context, platform, part, num_parts, f"dcp{stage}.{number}")
        return local_rank, found

    def local_rank(self, parallel: ParallelConfig) -> int:
        """Return the number of this rank's device on its host."""
        return place_on_host(parallel, self.rank)[0]

    def _communicator(
        self, context: ExecutorContext, platform: Platform, rank: int, size: int, group: str
    ) -> Communicator:
        device = platform.device(self.local_rank(context.config.parallel))
        return make_communicator(
            context.plugins,
            CommunicatorContext(
                rank=rank, size=size, device=device, store=self._store, group=group,
                engine_config=context.config,
            ),
            platform.device_type,
        )  # fmt: skip


Rank.executor_class = RankExecutor


def own_plan(plan: KVCachePlan, own: Mapping[str, KVCacheSpec]) -> KVCachePlan:
    """Return the part of `plan` that is for the layers of this rank's stage: the same groups and blocks."""
    tensors = tuple(
        replace(tensor, shared_by=tuple(name for name in tensor.shared_by if name in own)) for tensor in plan.tensors
    )
    return replace(
        plan,
        tensors=tuple(tensor for tensor in tensors if tensor.shared_by),
        groups=tuple(_own_layers(group, own) for group in plan.groups),
    )


def _own_layers(group: KVCacheGroup, own: Mapping[str, KVCacheSpec]) -> KVCacheGroup:
    places = [place for place, name in enumerate(group.layer_names) if name in own]
    return replace(
        group, layer_names=tuple(group.layer_names[place] for place in places),
        layer_specs=tuple(group.layer_specs[place] for place in places) if group.layer_specs else (),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pelton_plugins.executors.multiproc.rank", description=__doc__)
    for name in ("rank", "size", "ring", "socket"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = read_arguments(parser, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    setup()
    ring = RingReader(arguments.ring, arguments.size, arguments.rank)
    Rank(arguments.rank, arguments.size, ring, socket.socket(fileno=arguments.socket)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(0)


if __name__ == "__main__":
    sys.exit(main())
