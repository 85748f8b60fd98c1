"""The worker's thread: order, errors, masks, shutdown; with a worker that needs no model."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from pelton_e2e import eventually

from pelton.config import EngineConfig
from pelton.errors import ConfigError, EngineDeadError, EngineError, NotSupportedError
from pelton.executor.interface import ExecutorContext
from pelton.messages.report import DeviceReport
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.worker.interface import Worker
from pelton_plugins.executors import in_process
from pelton_plugins.executors.in_process import InProcessExecutor, WorkerThread
from pelton_plugins.executors.one_rank import OneRank

AHEAD = 17
"""max_seq_len of a step whose masks the device waits for."""
HELD = -1
"""max_query_len of a step that takes until its worker's gate is opened."""


class EchoWorker(Worker):
    """Sleeps as long as the step says, notes what it was asked."""

    log: list[str]

    def init_device(self) -> None:
        self.log = []
        self.gate = threading.Event()
        self.thread = threading.current_thread()

    def load_model(self) -> None:
        if self.config.model.model == "broken":
            raise ConfigError("weights are torn")

    def kv_cache_specs(self):
        return {}

    def available_kv_cache_bytes(self) -> int:
        return 5

    def initialize_kv_cache(self, plan) -> None:
        self.log.append("kv")

    def warm_up(self) -> None:
        self.log.append("warm")

    def place(self):
        return self.parallel

    def execute(self, output):
        assert threading.current_thread() is self.thread and torch.is_inference_mode_enabled()
        self.log.append(f"execute {output.step_id}")
        if output.max_query_len == HELD:
            assert self.gate.wait(60)
        else:
            time.sleep(output.max_query_len / 1000)
        if output.max_seq_len == 13:
            raise RuntimeError("unlucky step")
        if output.max_seq_len == AHEAD:
            return ModelOutput(step_id=output.step_id)
        return None if output.grammar_rows else ModelOutput(step_id=output.step_id)

    def bring_masks(self, masks):
        self.log.append(f"bring {masks.step_id} {masks.error}".strip())

    def sample(self, masks):
        self.log.append(f"sample {masks.step_id}")
        return ModelOutput(step_id=masks.step_id, token_ids=[[1]])

    def report(self):
        return DeviceReport(device="echo")

    def add(self, a: int, b: int) -> int:
        return a + b

    def shutdown(self) -> None:
        self.log.append("shutdown")


class FakePlatform:
    name = "fake"

    def __init__(self) -> None:
        self.prepared: list[EngineConfig] = []

    def prepare(self, config: EngineConfig) -> None:
        self.prepared.append(config)

    def stream_wait(self):
        return None

    def worker_class(self):
        assert len(self.prepared) == 1, "what takes long may begin before anything else is imported"
        return EchoWorker


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr("pelton.platform.select.select_platform", lambda config, plugins: FakePlatform())
    made: list[InProcessExecutor] = []

    def build(**flat) -> InProcessExecutor:
        made.append(
            InProcessExecutor(
                ExecutorContext(
                    config=EngineConfig.from_flat(**flat), model=SimpleNamespace(), plugins=SimpleNamespace()
                )
            )
        )
        return made[-1]

    yield build
    for executor in made:
        executor.shutdown()


def worker_of(executor: InProcessExecutor) -> EchoWorker:
    assert isinstance(executor._worker, EchoWorker)
    return executor._worker


def step(step_id: int, *, ms: int = 0, fails: bool = False, grammar: bool = False) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id, max_query_len=ms, max_seq_len=13 if fails else 0, grammar_rows=[0] if grammar else []
    )


def test_its_worker_has_a_communicator_of_one_rank(make):
    parallel = make().call("place")
    x = torch.arange(6.0).reshape(3, 2)
    communicator = parallel.communicator
    assert (parallel.rank, parallel.size, type(communicator)) == (0, 1, OneRank)
    for found in (parallel.all_reduce(x), parallel.all_gather(x), communicator.reduce_scatter(x)):
        assert found is x
    assert communicator.all_to_all(x, [3], [3]) is x
    with pytest.raises(EngineError, match="send to rank 1: this rank is the only one"):
        communicator.send(x, 1)
    with pytest.raises(EngineError, match="recv from rank 1: this rank is the only one"):
        communicator.recv(x, 1)
    communicator.shutdown()


def test_execute_returns_at_once_and_steps_run_in_order(make):
    executor = make()
    handles = [executor.execute(step(i, ms=HELD)) for i in range(3)]
    assert not any(handle.ready() for handle in handles)
    with pytest.raises(TimeoutError, match="did not end"):
        handles[2].result(timeout_s=0.01)
    worker_of(executor).gate.set()
    assert [handle.result(60).step_id for handle in handles] == [0, 1, 2]
    assert handles[2].ready()


def test_exception_comes_out_of_result_and_the_thread_lives(make):
    executor = make()
    handles = [executor.execute(step(0, fails=True)), executor.execute(step(1))]
    with pytest.raises(RuntimeError, match="unlucky"):
        handles[0].result(60)
    assert handles[1].result(60).step_id == 1
    executor.check_health()


def test_step_with_grammar_holds_back_later_steps_until_its_masks(make):
    executor = make()
    first, second = executor.execute(step(0, grammar=True)), executor.execute(step(1))
    time.sleep(0.05)
    assert not first.ready() and not second.ready()
    executor.sample(GrammarMasks(step_id=0, bitmask=b"", num_masks=[]))
    assert first.result(60).token_ids == [[1]] and second.result(60).step_id == 1
    assert worker_of(executor).log == ["execute 0", "sample 0", "execute 1"]


def test_masks_may_come_before_the_step_ran(make):
    executor = make()
    slow = executor.execute(step(0, ms=50))
    bound = executor.execute(step(1, grammar=True))
    executor.sample(GrammarMasks(step_id=1, bitmask=b"", num_masks=[]))
    assert slow.result(60).step_id == 0 and bound.result(60).step_id == 1


def test_failed_step_with_grammar_does_not_wait_for_masks(make):
    executor = make()
    with pytest.raises(RuntimeError, match="unlucky"):
        executor.execute(step(0, fails=True, grammar=True)).result(60)
    assert executor.execute(step(1)).result(60).step_id == 1
    bound = executor.execute(step(2, grammar=True))
    for step_id in (0, 2):  # those of the failed step come all the same, and are not kept
        executor.sample(GrammarMasks(step_id=step_id, bitmask=b"", num_masks=[]))
    assert bound.result(60).step_id == 2 and not executor._thread._masks


def test_masks_that_the_device_waits_for_reach_the_worker_beside_its_steps(make):
    executor = make()
    steps = [step(index, grammar=True) for index in range(3)]
    for output in steps:
        output.max_seq_len = AHEAD
    log = worker_of(executor).log
    executor.execute(steps[0]).result(60)
    blocking = executor.execute(step(1, ms=HELD))
    assert eventually(lambda: log == ["execute 0", "execute 1"])
    executor.sample(GrammarMasks(step_id=0, bitmask=b"", num_masks=[]))
    assert log == ["execute 0", "execute 1", "bring 0"]
    worker_of(executor).gate.set()
    blocking.result(60)
    early = executor.execute(step(2, ms=50))
    steps[1].step_id = 3
    executor.sample(GrammarMasks(step_id=3, bitmask=b"", num_masks=[]))
    executor.execute(steps[1]).result(60)
    assert early.ready() and log[-2:] == ["execute 3", "bring 3"] and not executor._thread._masks
    steps[2].step_id = 4
    executor.execute(steps[2]).result(60)
    executor.shutdown()
    assert log[-2:] == ["bring 4 The executor was shut down before this step had its masks.", "shutdown"]


def test_call_runs_a_method_on_the_workers_thread(make):
    executor = make()
    assert executor.call("add", 2, 3) == 5
    with pytest.raises(NotSupportedError, match="sleep"):
        executor.call("sleep")
    with pytest.raises(NotSupportedError, match="_private"):
        executor.call("_private")


def test_initialize_warms_up(make):
    executor = make()
    executor.initialize_kv_cache(None)
    assert worker_of(executor).log == ["kv", "warm"]
    assert executor.available_kv_cache_bytes() == 5
    assert executor.report().device == "echo"


def test_load_error_comes_out_of_the_constructor_and_leaves_no_thread(make):
    before = threading.active_count()
    with pytest.raises(ConfigError, match="torn"):
        make(model="broken")
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_than_one_device_is_refused(make, name):
    with pytest.raises(ConfigError, match=f"{name} is 2"):
        make(**{name: 2})


def test_shutdown_drops_queued_steps_and_is_idempotent(make):
    executor = make()
    worker = worker_of(executor)
    running, queued = executor.execute(step(0, ms=100)), executor.execute(step(1))
    assert eventually(lambda: worker.log == ["execute 0"])
    executor.shutdown()
    executor.shutdown()
    assert "execute 1" not in worker.log
    assert running.result(60).step_id == 0
    with pytest.raises(EngineDeadError):
        queued.result(60)
    assert worker.log[-1] == "shutdown" and worker.log.count("shutdown") == 1
    for use in (lambda: executor.execute(step(2)), lambda: executor.call("add", 1, 1), executor.check_health):
        with pytest.raises(EngineDeadError):
            use()


def test_shutdown_while_a_step_waits_for_masks(make):
    executor = make()
    handle = executor.execute(step(0, grammar=True))
    assert eventually(lambda: worker_of(executor).log == ["execute 0"])
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="masks"):
        handle.result(60)


def test_finished_step_is_not_kept_by_the_idle_thread():
    import gc
    import weakref

    class Big:
        pass

    thread = WorkerThread("test")
    future = thread.submit(Big)
    watched = weakref.ref(future.result(60))
    del future
    assert eventually(lambda: gc.collect() >= 0 and watched() is None)
    thread.close(1)


def test_interpreter_ends_while_a_step_runs():
    """A daemon thread, stopped before modules are taken apart: no hang, no crash."""
    code = (
        "import time\n"
        "from pelton_plugins.executors.in_process import WorkerThread\n"
        "t = WorkerThread('w')\n"
        "t.submit(lambda: time.sleep(600))\n"
        "t.submit(lambda: None)\n"
        "time.sleep(0.1)\n"
        "print('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout == "end\n"


def test_live_executors_are_shut_down_at_exit(make):
    executor = make()
    in_process._shutdown_all()
    with pytest.raises(EngineDeadError):
        executor.call("add", 1, 1)
