"""The engine in its own process: starts from anywhere, dies with its parent, is missed when it dies, takes no poison."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from pelton.config import EngineConfig
from pelton.engine import process, process_client, protocol
from pelton.engine.core import EngineCore
from pelton.engine.process_client import EngineConnection, ProcessClient
from pelton.errors import ConfigError, EngineDeadError, EngineError, PluginError, RequestError, error_info
from pelton.messages.outputs import EngineOutput, FinishReason
from pelton.messages.request import EngineRequest
from pelton.model.resolve import resolve_model
from pelton.plugins import load_plugins
from pelton.sampling_params import SamplingParams
from pelton.testing.fake_executor import FakeExecutor
from pelton.testing.fake_model import fake_resolved_model
from pelton.testing.scheduler import make_request

ENTRY_POINT = "pelton.engine.process"

Start = Callable[..., ProcessClient]
pytestmark = pytest.mark.usefixtures("forks")  # scripts are none, nor are the engines that they start


@pytest.fixture
def start(settings: dict[str, Any]) -> Iterator[Start]:
    """Start a client; what the script holds goes to the fake executor."""
    clients: list[ProcessClient] = []

    def start_client(*, hang_dump_s: float = 60.0, **script: Any) -> ProcessClient:
        config = EngineConfig.from_flat(**settings, plugin_config={"fake_engine": script})
        plugins = load_plugins()
        clients.append(ProcessClient(config, resolve_model(config, plugins), plugins, hang_dump_s=hang_dump_s))
        return clients[-1]

    yield start_client
    for client in clients:
        client.shutdown()


def test_what_was_sent_last_arrives_however_slowly(tmp_path: Path) -> None:
    size = 64 << 20
    code = f"""
import os
from pelton.engine import process, protocol
from pelton.errors import ConfigError, error_info
wire = process.Wire({str(tmp_path)!r})
wire.send(protocol.Failed(error_info(ConfigError("x" * {size}))))
wire.close()
os._exit(0)
"""
    context = zmq.Context()
    with context.socket(zmq.PULL) as pull:
        pull.linger = 0
        pull.bind(protocol.address(str(tmp_path), protocol.output_socket(0)))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
        assert pull.poll(10_000), "the process ended before its message was written"
        assert len(pull.recv()) > size
    context.term()


def request(request_id: str = "r", *, max_tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3)) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params)


def collect(client: ProcessClient, request_id: str = "r", timeout_s: float = 90.0) -> tuple[list[int], EngineOutput]:
    """All token ids of a request, and its last output."""
    ids: list[int] = []
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for output in client.get_outputs(0.2).outputs:
            if output.request_id == request_id:
                ids += output.new_token_ids
                if output.finish_reason is not None:
                    return ids, output
    raise AssertionError(f"{request_id} did not finish within {timeout_s} s")


def wait_until(condition: Callable[[], bool], timeout_s: float = 90.0) -> bool:
    """Whether it holds before the time is over, which no machine is so slow as to need."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# Starting from anywhere.

USE = """
from pelton import LLM, SamplingParams
from pelton.testing import fake_engine

def use():
    with LLM(engine_process=True, **fake_engine.settings({model!r})) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        print("TOKENS", len(output.outputs[0].token_ids))
"""


def run_python(settings: dict[str, Any], site: Path, arguments: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("use()", id="no-main-guard"),
        pytest.param("import threading\nt = threading.Thread(target=use)\nt.start()\nt.join()", id="in-a-thread"),
        pytest.param(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nuse()",
            id="beside-threads",
        ),
        pytest.param(
            "import sys, types\nm = types.ModuleType('__main__')\nm.use = use\nsys.modules['__main__'] = m\n"
            "exec(compile('use()', '<cell 1>', 'exec'), m.__dict__)",
            id="notebook-cell",
        ),
    ],
)
def test_starts_from_a_script(settings: dict[str, Any], fake_engine_site: Path, tmp_path: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(USE.format(model=settings["model"]) + code + "\nprint('once')\n")
    out = run_python(settings, fake_engine_site, [str(script)])
    assert out.split() == ["TOKENS", "5", "once"]  # the script ran once: nobody imported it again


def test_starts_from_python_c(settings: dict[str, Any], fake_engine_site: Path) -> None:
    out = run_python(settings, fake_engine_site, ["-c", USE.format(model=settings["model"]) + "use()"])
    assert out.split() == ["TOKENS", "5"]


def test_a_module_beside_the_script_is_not_taken_for_the_standard_library(
    settings: dict[str, Any], fake_engine_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder is on nobody's path unless it was on the front end's."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('shadowed')\n")
    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text(USE.format(model=settings["model"]) + "use()\n")
    monkeypatch.chdir(tmp_path)
    assert run_python(settings, fake_engine_site, [str(script)]).split() == ["TOKENS", "5"]


def test_the_engine_process_keeps_the_users_pythonpath(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "--python-path" not in psutil.Process(start().pid).cmdline()
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    cmdline = psutil.Process(start().pid).cmdline()
    assert cmdline[cmdline.index("--python-path") + 1] == "/somewhere"


# What goes through.


def test_runs_requests_and_calls(start: Start) -> None:
    client = start()
    assert client.info.num_blocks == 257
    assert client.info.plugin_digest == load_plugins().digest()
    for index in range(20):
        client.add_request(request(str(index), prompt=(index + 1, 2)))
    ends = {}
    while len(ends) < 20:
        for output in client.get_outputs(5).outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert client.call("kv_cache_usage") == 0.0
    assert client.call("reset_prefix_cache") is True
    assert client.call("worker.anything", 1) == "anything"


def test_no_outputs_within_the_timeout_is_an_empty_batch(start: Start) -> None:
    assert start().get_outputs(0.05).outputs == []


def test_a_refused_request_is_an_output_with_the_error(start: Start) -> None:
    client = start()
    client.add_request(request("twice", max_tokens=200))
    client.add_request(request("huge", prompt=(1,) * 1000))
    _, last = collect(client, "huge")
    assert last.finish_reason == FinishReason.ERROR
    assert last.error is not None
    assert collect(client, "twice")[1].finish_reason == FinishReason.LENGTH


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(start: Start) -> None:
    client = start(fail_at_step=0)
    client.add_request(request("a"))
    _, last = collect(client, "a")
    assert last.error is not None and "as the script says" in last.error.message
    client.add_request(request("b"))
    assert len(collect(client, "b")[0]) == 8


@pytest.mark.parametrize(
    "call, error, message",
    [
        pytest.param(("nonsense",), RequestError, "no such call", id="unknown"),
        pytest.param(("worker.sleep_s", "x"), EngineError, "TypeError", id="raises"),
    ],
)
def test_calls_that_fail_raise_here(start: Start, call: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        start().call(*call)


def test_calls_have_a_time_limit_and_the_engine_survives_it(start: Start) -> None:
    client = start()
    os.kill(client.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"did not answer 'worker.anything' within 0.1 s"):
            client.call("worker.anything", timeout_s=0.1)
    finally:
        os.kill(client.pid, signal.SIGCONT)
    assert client.call("kv_cache_usage") == 0.0


# Poison on the sockets.


@pytest.mark.parametrize("socket", [protocol.INPUT_SOCKET, protocol.OUTPUT_SOCKET])
def test_garbage_on_a_socket_is_dropped(start: Start, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start()
    address = protocol.address(client.socket_dir, socket)
    with zmq.Context() as context, context.socket(zmq.PUSH) as rogue:
        rogue.setsockopt(zmq.LINGER, 1000)
        rogue.connect(address)
        bad_params = msgspec.msgpack.encode(
            ["Add", [{"request_id": "r", "prompt_token_ids": [], "sampling_params": {"n": 0}}]]
        )
        for garbage in (b"", b"\xff" * 100, b"\x93" * 10_000, msgspec.msgpack.encode(["Nonsense", 1]), bad_params):
            rogue.send(garbage)
        rogue.send_multipart([b"\x00", b"\x01"])
    time.sleep(0.1)
    client.add_request(request())
    assert len(collect(client)[0]) == 8


def test_an_oversized_message_is_refused_on_both_sides(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start()
    monkeypatch.setattr(protocol.limits, "MAX_IPC_MESSAGE_BYTES", 1000)
    with pytest.raises(RequestError, match="at most 1000"):
        client.add_request(request(prompt=(1,) * 2000))
    monkeypatch.undo()
    address = protocol.address(client.socket_dir, protocol.INPUT_SOCKET)
    with zmq.Context() as context, context.socket(zmq.PUSH) as rogue:
        rogue.setsockopt(zmq.LINGER, 300)
        rogue.connect(address)
        rogue.send(bytes(protocol.limits.MAX_IPC_MESSAGE_BYTES + 1))
    client.add_request(request())
    assert len(collect(client)[0]) == 8


def test_requests_that_are_too_large_for_one_message_go_in_several(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start()
    monkeypatch.setattr(protocol.limits, "MAX_IPC_MESSAGE_BYTES", 300)
    monkeypatch.setattr("pelton.engine.process_client.MESSAGE_REQUESTS", 3)
    client.add_requests([request(str(number), max_tokens=1, prompt=(1,) * 40) for number in range(5)])
    done: set[str] = set()
    assert wait_until(lambda: done.update(one.request_id for one in client.get_outputs(0.2).outputs) or len(done) == 5)
    with pytest.raises(RequestError, match="at most 300"):
        client.add_requests([request("small"), request("large", prompt=(1,) * 2000)])


def test_an_output_that_is_too_large_to_be_sent_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.limits, "MAX_IPC_MESSAGE_BYTES", 2000)
    config = EngineConfig.from_flat(
        max_num_seqs=8, max_num_batched_tokens=512, num_gpu_blocks_override=100, block_size=4
    )
    model, plugins, told = fake_resolved_model(), load_plugins(only=[]), []
    core = EngineCore(config, model, plugins, executor=FakeExecutor(config, model, plugins))

    class Wire:
        def send(self, message: protocol.ToFrontEnd, client_index: int = 0) -> None:
            protocol.encode(message)
            told.append(message)

        send_all = send

    engine = process.EngineProcess(Wire(), parent_pid=0, hang_dump_s=60.0)  # type: ignore[arg-type]
    core.add_request(make_request("small", [1, 2, 3], 5))
    core.add_request(make_request("big", 200, 2, prompt_logprobs=0))
    while core.has_work():
        engine._step(core)
    outputs = [output for message in told for output in message.outputs.outputs]
    big = [output for output in outputs if output.request_id == "big"]
    assert big[0].finish_reason is FinishReason.ERROR and "fewer logprobs" in big[0].error.message
    small = [output for output in outputs if output.request_id == "small"]
    assert sum(len(output.new_token_ids) for output in small) == 5 and small[-1].finish_reason is FinishReason.LENGTH
    assert any(message.outputs.stats is not None for message in told)
    assert core.call("kv_cache_usage") == 0


@pytest.mark.parametrize(
    "sent_after_s, num_prepared",
    [pytest.param(0.0, 0, id="at-once"), pytest.param(0.05, 0, id="soon"), pytest.param(0.4, 3, id="idle")],
)
def test_steps_are_prepared_ahead_only_when_nothing_came_for_a_moment(sent_after_s: float, num_prepared: int) -> None:
    engine = process.EngineProcess(None, parent_pid=0, hang_dump_s=60.0)  # type: ignore[arg-type]
    message, num_calls = protocol.Shutdown(), 0

    class Inbox(queue.Queue[Any]):
        """Its clock goes on by what is waited."""

        now_s = 0.0

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is not None and self.now_s + timeout <= sent_after_s:
                self.now_s += timeout
                raise queue.Empty
            return message

    class Core:
        def prepare_ahead(self) -> bool:
            nonlocal num_calls
            num_calls += 1
            return num_calls < 3

    engine._inbox = Inbox()
    assert engine._next_message(Core()) is message  # type: ignore[arg-type]
    assert num_calls == num_prepared


def test_sockets_lie_in_a_private_directory_that_goes_away(start: Start) -> None:
    client = start()
    folder = client.socket_dir
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    client.shutdown()
    assert not os.path.exists(folder)


def test_a_long_temporary_path_is_no_obstacle(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = start()
    client.add_request(request())
    assert len(collect(client)[0]) == 8
    assert list(deep.iterdir()) == []


# Errors of the start.


def test_a_start_error_is_raised_here_as_the_same_class_with_its_cause(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"^the pool is too small Root cause: OSError: no such device$"):
        start(fail_start="the pool is too small")


def test_an_engine_that_dies_while_starting_is_an_error_with_its_last_words(start: Start) -> None:
    with pytest.raises(EngineDeadError, match=r"was killed by SIGKILL.* the device is on fire"):
        start(die_at_start=True)


def test_other_plugins_in_the_engine_process_are_an_error(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_flat(**settings)
    plugins = load_plugins()
    monkeypatch.setattr(type(plugins), "digest", lambda self: "another")
    with pytest.raises(PluginError, match="other plugins than the front end"):
        ProcessClient(config, resolve_model(config, plugins), plugins)


def test_another_protocol_is_refused_by_both_sides(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_flat(**settings)
    plugins = load_plugins()
    model = resolve_model(config, plugins)
    with pytest.raises(ConfigError, match="speaks protocol 99"):
        process.start_core(protocol.Start(99, config, model, "", []))
    monkeypatch.setattr(protocol, "PROTOCOL", 99)
    with pytest.raises(ConfigError, match="two versions of Pelton are mixed"):
        ProcessClient(config, model, plugins)


# Deaths.


def test_a_killed_engine_is_noticed(start: Start) -> None:
    """By its end: a step may take for ever."""
    client = start(step_s=0.05)
    client.add_request(request(max_tokens=200))
    client.get_outputs(5)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"pid {client.pid}\) was killed by SIGKILL"):
        while True:
            client.get_outputs(5)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.add_request(request("late"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.call("kv_cache_usage")


def test_a_call_that_waits_learns_of_the_death(start: Start) -> None:
    client = start()
    threading.Timer(0.2, os.kill, (client.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.call("worker.sleep_s", 3600, timeout_s=600)


def test_a_dead_engine_can_be_started_again(start: Start) -> None:
    client = start()
    first = client.pid
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: client.error is not None)
    client.restart()
    assert client.error is None and client.pid != first
    client.add_request(request())
    assert len(collect(client)[0]) == 8


def test_a_process_that_the_system_refuses_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make_socket_dir = protocol.make_socket_dir
    monkeypatch.setattr(protocol, "make_socket_dir", lambda: made.append(make_socket_dir()) or made[-1])

    def refuse(*args: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(process_client, "_spawn", refuse)
    num_files = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Cannot allocate") as caught:
        start()
    del caught
    assert psutil.Process().num_fds() <= num_files and not Path(made[0]).exists()


def test_restarts_leak_no_files_and_no_threads(start: Start) -> None:
    client = start()
    counts = []
    for _ in range(4):
        os.kill(client.pid, signal.SIGKILL)
        assert wait_until(lambda: client.error is not None)
        client.restart()
        counts.append((psutil.Process().num_fds(), threading.active_count()))
    assert counts[-1] == counts[0]


PARENT = """
import os, sys, threading, time
from pelton.testing import fake_engine
from pelton import LLM

def begin():
    global llm
    llm = LLM(engine_process=True, **fake_engine.settings({model!r}, plugin_config={{"fake_engine": {{"step_s": 0.2}}}}))
    print(llm.llm_engine.client.pid, flush=True)

{how}
time.sleep(60)
"""
FORK = "begin()\npid = os.fork()\nprint(pid, flush=True)"  # the child keeps a copy of the pipe that the engine watches


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("begin()", id="main-thread"),
        pytest.param("t = threading.Thread(target=begin)\nt.start()\nt.join()", id="thread-that-ended"),
        pytest.param(FORK, id="a-fork-holds-the-pipe"),
    ],
)
def test_no_engine_outlives_a_killed_parent(
    settings: dict[str, Any], fake_engine_site: Path, how: str, tmp_path: Path
) -> None:
    code = textwrap.dedent(PARENT).format(model=settings["model"], how=how)
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(fake_engine_site), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    fork = int(parent.stdout.readline()) if how == FORK else None
    try:
        assert is_running(engine)
        time.sleep(0.3)
        assert is_running(engine)  # the end of the thread that started it did not end it
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(engine))
    finally:
        for pid in (engine, fork):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


def test_an_interpreter_that_forgets_to_shut_down_leaves_nothing(
    settings: dict[str, Any], fake_engine_site: Path, tmp_path: Path
) -> None:
    code = PARENT.format(model=settings["model"], how="begin()\nraise SystemExit")
    environment = os.environ | {"PYTHONPATH": str(fake_engine_site), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert wait_until(lambda: not is_running(int(done.stdout.split()[0])))
    assert list(tmp_path.iterdir()) == []


def test_shutdown_does_not_wait_for_a_socket_that_nobody_will_close(start: Start) -> None:
    """At the interpreter's end the reader is gone before it could close its own."""
    client = start()
    connection = client._connection
    connection.process.kill()
    connection._reader.join(60)
    connection._from_engine = left_open = connection._context.socket(zmq.PULL)
    ends = threading.Thread(target=client.shutdown, daemon=True)
    ends.start()
    ends.join(60)
    hangs = ends.is_alive()
    left_open.close(0)
    assert not hangs


@pytest.mark.parametrize(
    "script, busy",
    [
        pytest.param({}, False, id="idle"),
        pytest.param({"step_s": 0.3}, True, id="in-a-step"),
        pytest.param({"hang_at_step": 0}, True, id="in-a-hung-step"),
    ],
)
def test_shutdown_is_prompt_and_idempotent(start: Start, script: dict[str, Any], busy: bool) -> None:
    client = start(**script)
    if busy:
        client.add_request(request(max_tokens=200))
        time.sleep(0.2)
    began = time.monotonic()
    client.shutdown(timeout_s=120)
    client.shutdown()
    assert time.monotonic() - began < 30, "it waits for what runs"
    assert not is_running(client.pid)
    with pytest.raises(EngineDeadError, match="was shut down"):
        while True:  # what came before the end is still there to be taken
            client.get_outputs(1)


def test_a_client_that_is_collected_takes_its_engine_along(start: Start, settings: dict[str, Any]) -> None:
    config = EngineConfig.from_flat(**settings)
    plugins = load_plugins()
    client = ProcessClient(config, resolve_model(config, plugins), plugins)
    pid = client.pid
    del client
    assert wait_until(lambda: not is_running(pid))


# Started ahead.


def test_a_client_takes_a_process_that_runs_already(settings: dict[str, Any]) -> None:
    config, plugins = EngineConfig.from_flat(**settings), load_plugins()
    connection = EngineConnection(imports=["colorsys", "no_such_module"])
    client = ProcessClient(config, resolve_model(config, plugins), plugins, connection=connection)
    try:
        assert client.pid == connection.process.pid
        client.add_request(request(max_tokens=4))
        assert len(collect(client)[0]) == 4
        client.kill("for the test")
        client.restart()
        assert client.pid != connection.process.pid
        client.add_request(request(max_tokens=4))
        assert len(collect(client)[0]) == 4
    finally:
        client.shutdown()


# Hangs.


def test_a_hung_step_is_visible_and_writes_its_stacks(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    client = start(hang_at_step=0, hang_dump_s=0.2)
    assert wait_until(lambda: client.last_progress_age_s < 1)
    client.add_request(request())
    assert wait_until(lambda: client.last_progress_age_s > 1.0)
    seen = ""

    def shows_stacks() -> bool:
        nonlocal seen
        seen += capfd.readouterr().err
        return "stacks of all threads follow" in seen and "fake_engine.py" in seen

    assert wait_until(shows_stacks)
    assert client.error is None


def test_a_stopped_process_is_visible(start: Start) -> None:
    client = start()
    os.kill(client.pid, signal.SIGSTOP)
    try:
        assert wait_until(lambda: client.last_progress_age_s > 0.3)
    finally:
        os.kill(client.pid, signal.SIGCONT)
    assert wait_until(lambda: client.last_progress_age_s == 0.0)


def test_death_is_noticed_without_pidfd(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "_open_pidfd", lambda pid: None)
    client = start()
    os.kill(client.pid, signal.SIGKILL)
    assert wait_until(lambda: client.error is not None)


# Parts.


def test_error_info_ends_with_the_root_cause() -> None:
    try:
        try:
            raise OSError("disk full")
        except OSError as error:
            raise ValueError("cannot write") from error
    except ValueError as error:
        info = error_info(error)
    assert (info.kind, info.message) == ("EngineError", "ValueError: cannot write Root cause: OSError: disk full")


def test_front_end_half_imports_no_torch() -> None:
    code = "import pelton.engine.process_client, pelton.sdk.async_llm, pelton.engine.process, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_no_folder_for_sockets_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**options: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(protocol.tempfile, "mkdtemp", refused)
    with pytest.raises(EngineError, match=r"^No place for a socket: .*No usable temporary .*Set TMPDIR to a folder"):
        protocol.make_socket_dir()
