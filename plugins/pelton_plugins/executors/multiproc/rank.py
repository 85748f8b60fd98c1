"""The process of one rank: `python -m pelton_plugins.executors.multiproc.rank`, started by the executor and by nobody else.

Inside is the executor of one worker, which knows its place among the ranks. Three threads: the main one takes jobs from the ring
and notices the end of the engine; the worker's runs them in order; one answers. For steps one rank alone answers, the first of the last
stage, unless another's fails; with a KV connector all do.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pelton.errors import EngineDeadError, PeltonError, PluginError, error_info
from pelton.executor.interface import ExecutorContext, StepHandle
from pelton.kv_cache.spec import KVCacheGroup, KVCachePlan, KVCacheSpec
from pelton.logging import get_logger, setup
from pelton.parallel.communicator import GroupContext
from pelton.plugins import load_plugins
from pelton.utils import garbage
from pelton.utils.own_process import end_process, read_arguments
from pelton_plugins.executors.in_process import InProcessExecutor
from pelton_plugins.executors.multiproc import messages
from pelton_plugins.executors.multiproc.messages import FRAME
from pelton_plugins.executors.multiproc.place import RankPlace
from pelton_plugins.executors.multiproc.ring import RingReader
from pelton_plugins.executors.multiproc.transfers import transfers_alone

if TYPE_CHECKING:
    from pelton.platform.interface import Platform

logger = get_logger(__name__)


class Jobs(Protocol):
    """A source of a rank's jobs, each as bytes."""

    def read(self, wait: Callable[[], None]) -> bytes: ...


class Rank:
    place_class: ClassVar[type[RankPlace]] = RankPlace

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
        gc.disable()  # until the KV cache is there: `garbage.paused`
        try:
            self._executor = executor = self._start()
        except Exception as error:
            if not isinstance(error, PeltonError):
                logger.exception("Rank %d did not start", self.rank)
            self._answer(messages.CallDone(0, None, error_info(error)))
            return
        if executor is None:
            return
        self._answer(messages.CallDone(0, executor.max_concurrent_steps))
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

    def _start(self) -> InProcessExecutor | None:
        """Do what needs no model first: the engine may still be looking for it. None: the engine ends before it starts."""
        prepare = self._next_job()
        if not isinstance(prepare, messages.Prepare):
            return None
        config = prepare.config
        setup(config.observability.log_level if self.rank == 0 else "warning")
        plugins = load_plugins(only=prepare.plugin_names)
        if plugins.digest() != prepare.plugin_digest:
            raise PluginError(
                f"Rank {self.rank} found other plugins than the engine: {', '.join(map(str, plugins.loaded))}. "
                "Did an installation change while Pelton was starting?"
            )
        place = self.place_class(config, plugins, self.rank, prepare.store)
        start = self._next_job()
        if not isinstance(start, messages.Start):
            return None
        self._tells_results = self.rank == start.config.parallel.telling_rank
        self._tells_transfers = start.config.kv_transfer.kv_connector is not None
        return RankExecutor(ExecutorContext(config=start.config, model=start.model, plugins=plugins), place)

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
            executor.initialize_kv_cache(own_plan(messages.plan_from_data(args[0]), executor.kv_cache_specs()))
            gc.freeze()  # what the start has made lives on; to look for garbage among it takes 0.1 s
            gc.set_threshold(*garbage.THRESHOLDS)
            gc.enable()
            return None
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

    def __init__(self, context: ExecutorContext, place: RankPlace) -> None:
        self.rank, self._place = place.rank, place
        super().__init__(context)

    def check_sizes(self, context: ExecutorContext) -> None: ...

    def find_platform(self, context: ExecutorContext) -> Platform:
        return self._place.platform

    def prepare(self, context: ExecutorContext, platform: Platform) -> None: ...

    def place(self, context: ExecutorContext, platform: Platform) -> tuple[int, GroupContext]:
        return self._place.found()


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
