"""`ProcessClient`: the engine in a process of its own, started as our own entry point.

The user's script is never imported again and nothing is forked: a script without a main guard, threads, a
notebook and `python -c` all work. One thread per engine process reads its messages and notices its death;
another forwards its stderr and remembers the last lines.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import zmq

from pelton.config import EngineConfig
from pelton.engine import protocol
from pelton.engine.channel import Channel
from pelton.engine.client import EngineClient
from pelton.errors import ConfigError, EngineDeadError, RequestError, error_from_info
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel
from pelton.utils.own_process import own_program

if TYPE_CHECKING:
    from pelton.plugins import Plugins

POLL_S = 0.2  # how long a death may go unnoticed where the kernel has no pidfd
LAST_LINES = 20
HANG_DUMP_S = 60.0
MESSAGE_REQUESTS = 256


class ProcessClient(EngineClient):
    """Starts the engine and waits until it is ready. Raises what stopped it, as the same class of error.

    hang_dump_s: a step that runs longer makes the engine process write its stacks to stderr. connection: to a process that was
    started before it was known what it serves. connect: starts a process, each time, from `hang_dump_s`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ResolvedModel,
        plugins: Plugins,
        *,
        hang_dump_s: float = HANG_DUMP_S,
        connection: EngineConnection | None = None,
        connect: Callable[[float], EngineConnection] | None = None,
    ) -> None:
        self._start_message = protocol.Start(
            protocol.PROTOCOL, config, model, plugins.digest(), [p.name for p in plugins.loaded if not p.is_builtin]
        )
        self._hang_dump_s = hang_dump_s
        self._is_closed = False
        self._call_ids = itertools.count()
        self._connect = connect or EngineConnection
        self._connection = connection or self._connect(hang_dump_s)
        self.info: EngineInfo = self._connection.start(self._start_message)

    @property
    def pid(self) -> int:
        return self._connection.process.pid

    def restart(self) -> None:
        """Start a new engine process in place of a dead one. Raises as the constructor does."""
        self._connection.close(0.0)
        if self._is_closed:
            raise EngineDeadError("The engine was shut down.")
        self._connection = self._connect(self._hang_dump_s)
        if self._is_closed:  # shutdown came meanwhile, and saw the old connection
            self._connection.close(0.0)
        self.info = self._connection.start(self._start_message)

    @property
    def socket_dir(self) -> str:
        """Where further front ends of the same engine find its sockets (`protocol.Join`)."""
        return self._connection.socket_dir

    def kill(self, reason: str) -> None:
        self._connection.kill(reason)

    def forget_client(self, client_index: int) -> None:
        """End the requests of a front end that joined and is gone."""
        self._connection.send(protocol.Leave(client_index))

    def add_request(self, request: EngineRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """In messages that are soon made and read: the engine begins meanwhile."""
        for start in range(0, len(requests), MESSAGE_REQUESTS):
            self._send(requests[start : start + MESSAGE_REQUESTS])

    def _send(self, requests: Sequence[EngineRequest]) -> None:
        try:
            self._connection.send(protocol.Add(list(requests)))
        except RequestError:  # too large, perhaps only together
            if len(requests) == 1:
                raise
            for request in requests:
                self._send([request])

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if request_ids:
            self._connection.send(protocol.Finish(list(request_ids), reason))

    def get_outputs(self, timeout_s: float | None = None) -> EngineOutputs:
        return self._connection.get(timeout_s)

    async def get_outputs_async(self) -> list[EngineOutputs]:
        return await self._connection.get_async()

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        answer = self._connection.call(next(self._call_ids), method, args, timeout_s)
        if answer.error is not None:
            raise error_from_info(answer.error)
        return answer.result

    @property
    def has_work(self) -> bool:
        return self._connection.has_outputs

    @property
    def error(self) -> Exception | None:
        return self._connection.error

    @property
    def last_progress_age_s(self) -> float:
        """How long the step loop has been in one step, and how long the process has been silent, together."""
        return self._connection.last_progress_age_s

    @property
    def silence_s(self) -> float:
        return self._connection.silence_s

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self._is_closed = True
        self._connection.close(timeout_s)

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            with contextlib.suppress(Exception):
                self._connection.close(0.0)


class EngineConnection(Channel):
    """One engine process from its start to its end. imports: modules that it imports while it is not told what to serve; prepare: what
    it is told by then."""

    program: ClassVar[str] = "pelton.engine.process"

    def __init__(
        self, hang_dump_s: float = HANG_DUMP_S, imports: Sequence[str] = (), prepare: protocol.Prepare | None = None
    ) -> None:
        self._prepare = prepare
        self._start: Future[protocol.Start] = Future()
        self._ready: Future[EngineInfo] = Future()
        self._failure: str | None = None
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.socket_dir = protocol.make_socket_dir()
        super().__init__(self.socket_dir)
        try:
            self.process = _spawn(self.program, self.socket_dir, hang_dump_s, imports)
        except BaseException:
            self._context.destroy(0)  # waits for open sockets otherwise, for ever, once it is collected
            shutil.rmtree(self.socket_dir, ignore_errors=True)
            raise
        # At exit, or when the last reference goes, no process and no directory is left behind.
        self._finalizer = weakref.finalize(self, _clean_up, self.process, self.socket_dir)
        self._stderr_thread = threading.Thread(
            target=_forward_stderr, args=(self.process, self._last_lines), name="pelton-engine-stderr", daemon=True
        )
        self._stderr_thread.start()
        self._reader = threading.Thread(target=self._read, name="pelton-engine-reader", daemon=True)
        self._reader.start()

    def start(self, message: protocol.Start) -> EngineInfo:
        """Say what to serve; blocks until the engine is ready. Raises what stops it."""
        try:
            self._start.set_result(message)
            return self._ready.result()
        except BaseException:
            self.close(0.0)
            raise

    def close(self, timeout_s: float) -> None:
        """Ask the process to end, then make it. Idempotent."""
        with self._close_lock:
            if self._is_closing and not self._reader.is_alive():
                return
            self._is_closing = True
            if self.process.poll() is None and timeout_s > 0:
                with contextlib.suppress(Exception):
                    self.send(protocol.Shutdown())
                    self.process.wait(timeout_s)
            self._finalizer()
            if threading.current_thread() is not self._reader:
                self._reader.join(2.0)
            self.close_sender()
            # Waits for all sockets. At the interpreter's end the reader counts as ended without having closed its own.
            if self._from_engine.closed:
                self._context.term()

    def kill(self, reason: str) -> None:
        """Kill the process; calls that wait fail with `reason`."""
        self._failure = reason
        self.process.kill()

    # -- reader's side --

    def _read(self) -> None:
        pidfd = _open_pidfd(self.process.pid)
        poller = zmq.Poller()
        poller.register(self._from_engine, zmq.POLLIN)
        if pidfd is not None:
            poller.register(pidfd, zmq.POLLIN)
        try:
            while self.process.poll() is None:
                poller.poll(None if pidfd is not None else int(POLL_S * 1000))
                self.take_messages()
            while self._from_engine.poll(20 if self._ready.done() else 1000):  # what it sent may still be on its way
                self.take_messages()
        finally:
            if pidfd is not None:
                os.close(pidfd)
            self._from_engine.close(0)
            self._stderr_thread.join(0.3 if self._ready.done() else 3.0)
            error = EngineDeadError(self._describe_end())
            if not self._ready.done():
                self._ready.set_exception(error)
            self.declare_dead(error)

    def handle(self, message: protocol.ToFrontEnd) -> None:
        if isinstance(message, protocol.Hello):
            self._greet(message)
        elif isinstance(message, protocol.Ready):
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, protocol.Failed):
            self._failure = message.error.message
            if not self._ready.done():
                self._ready.set_exception(error_from_info(message.error))

    def _greet(self, hello: protocol.Hello) -> None:
        if hello.protocol != protocol.PROTOCOL:
            self._ready.set_exception(
                ConfigError(
                    f"The engine process speaks protocol {hello.protocol}, this one {protocol.PROTOCOL}: two versions "
                    "of Pelton are mixed. Install one."
                )
            )
            return
        if self._prepare is not None:
            self.send(self._prepare)
        self._start.add_done_callback(lambda start: self.send(start.result()))

    def _describe_end(self) -> str:
        if self._is_closing:
            return "The engine was shut down."
        code = self.process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
                return f"The engine process (pid {self.process.pid}) {how}.{self._why()}"
        return f"The engine process (pid {self.process.pid}) ended with status {code}.{self._why()}"

    def _why(self) -> str:
        if self._failure is not None:
            return f" Cause: {self._failure}"
        last = self._last_lines[-1] if self._last_lines else ""
        return "" if not last or last.startswith(("INFO ", "DEBUG ")) else f" Its last line: {last}"


def _spawn(program: str, socket_dir: str, hang_dump_s: float, imports: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the engine's program in a process group of its own (Ctrl-C is ours)."""
    command, environment = own_program(
        program, socket_dir=socket_dir, hang_dump_s=hang_dump_s, imports=",".join(imports)
    )
    if imports:  # started ahead, in the main thread: it still ends by itself, and removes its folder then
        command = [flag for flag in command if flag != "--die-with-parent"]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # never written: its end tells the engine that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def _forward_stderr(process: subprocess.Popen[bytes], last_lines: deque[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            if line.strip():
                last_lines.append(line.strip())
            with contextlib.suppress(ValueError, OSError, AttributeError):  # our stderr may be closed or None
                sys.stderr.write(line)
                sys.stderr.flush()


def _clean_up(process: subprocess.Popen[bytes], socket_dir: str) -> None:
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    shutil.rmtree(socket_dir, ignore_errors=True)


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open") or not hasattr(select, "poll"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
