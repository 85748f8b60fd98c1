"""The engine process: `python -m pelton.engine.process`, started by `process_client.py` and by nobody else.

Three threads. The main one runs the step loop; one reads and decodes messages, so that a long prompt
does not hold up a step; one watches: it ends the process when the front end is gone, sends heartbeats,
and writes all stacks to stderr when a step hangs. No message from outside ends the process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pelton import limits
from pelton.engine import protocol
from pelton.errors import ConfigError, PeltonError, PluginError, RequestError, error_info
from pelton.logging import get_logger, setup
from pelton.messages.outputs import EngineOutput, EngineOutputs, FinishReason
from pelton.messages.request import EngineRequest
from pelton.utils.own_process import end_process, read_arguments

if TYPE_CHECKING:
    from pelton.engine.core import EngineCore

logger = get_logger(__name__)

WATCH_INTERVAL_S = 0.25
HEARTBEAT_INTERVAL_S = 1.0
EXIT_GRACE_S = 1.0  # what the step loop gets to end by itself after `Shutdown`
_IDLE_WAITS, _IDLE_WAIT_S = 10, 0.02
"""Short waits without a message behind which an engine counts as idle. One long wait would be over as well when the process was
stopped meanwhile."""


class Wire:
    """The two sockets. `send` from any thread, `receive` from one."""

    def __init__(self, socket_dir: str) -> None:
        self._context, self._out_context = zmq.Context(io_threads=1), zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.setsockopt(zmq.MAXMSGSIZE, limits.MAX_IPC_MESSAGE_BYTES)
        self._in.bind(protocol.address(socket_dir, protocol.INPUT_SOCKET))
        self._socket_dir = socket_dir
        self._outs: dict[int, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()
        self._decoder = protocol.decoder_for_engine()
        self.join(0)

    def join(self, client_index: int) -> None:
        """Connect to the socket that a front end has bound."""
        out = self._out_context.socket(zmq.PUSH)
        out.setsockopt(zmq.SNDHWM, 0)
        out.setsockopt(zmq.LINGER, 500)
        out.connect(protocol.address(self._socket_dir, protocol.output_socket(client_index)))
        with self._lock:
            self._outs[client_index] = out

    def remove_folder(self) -> None:
        shutil.rmtree(self._socket_dir, ignore_errors=True)

    def leave(self, client_index: int) -> None:
        with self._lock:
            self._outs.pop(client_index).close(0)

    def send(self, message: protocol.ToFrontEnd, client_index: int = 0) -> None:
        """Forgotten where that front end is gone."""
        data = protocol.encode(message)
        with self._lock:
            if (out := self._outs.get(client_index)) is not None:
                out.send(data)

    def send_all(self, message: protocol.ToFrontEnd) -> None:
        for client_index in list(self._outs):
            self.send(message, client_index)

    def receive(self) -> protocol.ToEngine:
        """The next sound message; others are logged and forgotten."""
        while True:
            frames = self._in.recv_multipart(copy=False)
            try:
                return self._decoder.decode(frames[0].buffer)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                logger.error("A message of %d bytes was dropped: %s", len(frames[0].buffer), error)

    def close(self) -> None:
        with self._lock:
            for out in self._outs.values():
                out.close()
        self._out_context.term()  # returns once all is written: the last message may say why the process ends


class EngineProcess:
    """Reader and watcher threads around one `EngineCore`."""

    def __init__(self, wire: Wire, *, parent_pid: int, hang_dump_s: float) -> None:
        self.imports: Sequence[str] = ()  # modules, once it is greeted
        self._wire = wire
        self._parent_pid = parent_pid
        self._hang_dump_s = hang_dump_s
        self._inbox: queue.SimpleQueue[protocol.ToEngine] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._is_stopping = False
        self._joined: set[int] = set()
        self._client_of: dict[str, int] = {}  # unfinished requests of front ends that joined

    def start_threads(self) -> None:
        threading.Thread(target=self._read, name="pelton-reader", daemon=True).start()
        threading.Thread(target=self._watch, name="pelton-watcher", daemon=True).start()

    def run(self) -> None:
        """Handshake, start the core, step until told to stop."""
        self._wire.send(protocol.Hello(protocol.PROTOCOL, os.getpid()))
        for name in self.imports:
            with contextlib.suppress(ImportError):  # who needs it finds that out, and says so
                importlib.import_module(name)
        try:
            core = self._start_core()
        except Exception as error:
            if not isinstance(error, PeltonError):
                logger.exception("The engine did not start")
            self._wire.send(protocol.Failed(error_info(error)))
            return
        if core is None:
            return
        self._wire.send(protocol.Ready(core.info))
        gc.enable()
        try:
            self._loop(core)
        except Exception as error:
            logger.exception("The engine's step loop failed")
            self._wire.send(protocol.Failed(error_info(error)))
            raise
        finally:
            core.shutdown()

    def _start_core(self) -> EngineCore | None:
        """Start it when told to. None: told to end instead."""
        message, ahead = self._inbox.get(), None
        if isinstance(message, protocol.Prepare):
            from pelton.executor.select import start_ahead
            from pelton.plugins import load_plugins

            ahead = start_ahead(message.config, load_plugins(only=message.plugin_names))
            message = self._inbox.get()
        with contextlib.nullcontext() if ahead is None else contextlib.closing(ahead):
            return start_core(message, ahead) if isinstance(message, protocol.Start) else None

    def _loop(self, core: EngineCore) -> None:
        inbox = self._inbox
        while True:
            if not core.has_work() and inbox.empty():
                gc.collect(1)  # nobody waits now
                if not self._handle(core, self._next_message(core)):
                    return
            while not inbox.empty():
                if not self._handle(core, inbox.get()):
                    return
            if core.has_work():
                self._step(core)

    def _next_message(self, core: EngineCore) -> protocol.ToEngine:
        """Wait for one. When none comes for a moment, prepare ahead what may be: not at once, for the front end still starts, or a
        client is about to send its next request, and either would wait for it."""
        inbox = self._inbox
        for _ in range(_IDLE_WAITS):
            with contextlib.suppress(queue.Empty):
                return inbox.get(timeout=_IDLE_WAIT_S)
        while inbox.empty() and core.prepare_ahead():
            pass
        return inbox.get()

    def _step(self, core: EngineCore) -> None:
        self._busy_since = time.monotonic()
        outputs = core.step()
        self._busy_since = None
        if outputs.outputs or outputs.stats is not None:
            self._tell(core, outputs)

    def _tell(self, core: EngineCore, outputs: EngineOutputs) -> None:
        """Send everyone their outputs, and the figures to who started us."""
        if self._joined:
            outputs = self._tell_joined(core, outputs)
        if outputs.outputs or outputs.stats is not None:
            self._send_outputs(core, outputs, 0)

    def _tell_joined(self, core: EngineCore, outputs: EngineOutputs) -> EngineOutputs:
        """Send those that joined their outputs; returns the rest."""
        shares: dict[int, list[EngineOutput]] = {0: []}
        client_of = self._client_of
        for output in outputs.outputs:
            owner = client_of.get(output.request_id, 0)
            if output.finish_reason is not None and owner:
                del client_of[output.request_id]
            share = shares.get(owner)
            if share is None:
                shares[owner] = [output]
            else:
                share.append(output)
        rest = shares.pop(0)
        for client_index, share in shares.items():
            self._send_outputs(core, EngineOutputs(share, outputs.timestamp), client_index)
        return EngineOutputs(rest, outputs.timestamp, outputs.stats)

    def _send_outputs(self, core: EngineCore, outputs: EngineOutputs, client_index: int) -> None:
        """A request whose output is too large to be sent ends with an error."""
        try:
            self._wire.send(protocol.Outputs(outputs), client_index)
            return
        except RequestError as error:
            logger.error("Outputs are sent one by one: %s", error)
        for output in outputs.outputs:
            try:
                self._wire.send(protocol.Outputs(EngineOutputs([output], outputs.timestamp)), client_index)
            except RequestError as error:
                core.finish_requests([output.request_id])
                reason = RequestError(
                    f"What one step brought for this request is too large; ask for fewer logprobs. {error}"
                )
                failed = EngineOutput(output.request_id, finish_reason=FinishReason.ERROR, error=reason.to_info())
                self._wire.send(protocol.Outputs(EngineOutputs([failed], outputs.timestamp)), client_index)
        stats = EngineOutputs(timestamp=outputs.timestamp, stats=outputs.stats)
        self._wire.send(protocol.Outputs(stats), client_index)

    def _handle(self, core: EngineCore, message: protocol.ToEngine) -> bool:
        """False when the process should end. A request or a call that fails gets an answer; the loop goes on."""
        if isinstance(message, protocol.Add):
            self._add(core, message.requests)
        elif isinstance(message, protocol.Finish):
            core.finish_requests(message.request_ids, message.reason)
            if message.reason == FinishReason.STOP:  # nothing more comes of these
                for request_id in message.request_ids:
                    self._client_of.pop(request_id, None)
        elif isinstance(message, protocol.Call):
            while core.has_work() and not core.has_unfinished_requests():
                self._step(core)  # open steps of requests that ended still hold blocks
            self._busy_since = time.monotonic()
            self._wire.send(call(core, message), message.client_index)
            self._busy_since = None
        elif isinstance(message, protocol.Join):
            self._wire.join(message.client_index)
            self._joined.add(message.client_index)
        elif isinstance(message, protocol.Leave):
            if message.client_index in self._joined:
                self._joined.remove(message.client_index)
                self._wire.leave(message.client_index)
            core.finish_requests([name for name, owner in self._client_of.items() if owner == message.client_index])
        elif isinstance(message, protocol.Shutdown):
            return False
        else:
            logger.error("A second Start was ignored.")
        return True

    def _add(self, core: EngineCore, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            owner = request.client_index
            if owner and owner not in self._joined:
                continue  # sent by one that has left meanwhile
            refused = core.try_add(request)
            if refused is not None:
                self._wire.send(protocol.Outputs(EngineOutputs([refused], time.monotonic())), owner)
            elif owner:
                self._client_of[request.request_id] = owner

    def _read(self) -> None:
        while True:
            message = self._wire.receive()
            if isinstance(message, protocol.Shutdown):
                self._is_stopping = True
                threading.Timer(EXIT_GRACE_S, end_process, (0,)).start()
            self._inbox.put(message)

    def _watch(self) -> None:
        next_beat = 0.0
        dumped_for: float | None = None
        while True:
            if is_parent_gone(self._parent_pid, WATCH_INTERVAL_S):
                self._wire.remove_folder()  # nobody else will
                end_process(1)
            now, since = time.monotonic(), self._busy_since
            if since is not None and now - since > self._hang_dump_s and dumped_for != since:
                dumped_for = since
                logger.error("A step has been running for %.1f s; stacks of all threads follow.", now - since)
                faulthandler.dump_traceback(all_threads=True)
            if now >= next_beat and not self._is_stopping:
                next_beat = now + HEARTBEAT_INTERVAL_S
                with contextlib.suppress(zmq.ZMQError):
                    self._wire.send_all(protocol.Heartbeat(0.0 if since is None else now - since))


def start_core(start: protocol.Start, ahead: Any = None) -> EngineCore:
    """Check that both sides are the same Pelton with the same plugins, then start the core."""
    if start.protocol != protocol.PROTOCOL:
        raise ConfigError(
            f"The front end speaks protocol {start.protocol}, the engine process {protocol.PROTOCOL}: two versions of "
            "Pelton are mixed. Install one."
        )
    setup(start.config.observability.log_level)
    from pelton.plugins import load_plugins

    plugins = load_plugins(only=start.plugin_names)
    if plugins.digest() != start.plugin_digest:
        raise PluginError(
            "The engine process found other plugins than the front end: "
            f"{', '.join(map(str, plugins.loaded))}. Did an installation change while Pelton was starting?"
        )
    from pelton.engine.core import EngineCore

    return EngineCore(start.config, start.model, plugins, ahead=ahead)


def call(core: EngineCore, message: protocol.Call) -> protocol.CallResult:
    try:
        answer = protocol.CallResult(message.call_id, result=core.call(message.method, *message.args))
        protocol.encode(answer)  # utility calls are rare: find out here whether the result can be sent
        return answer
    except Exception as error:
        return protocol.CallResult(message.call_id, error=error_info(error))


def is_parent_gone(parent_pid: int, wait_s: float) -> bool:
    """Wait a little for the end of stdin, which the front end holds open; it may have left a copy in another process,
    so the parent's id counts too."""
    with contextlib.suppress(OSError, ValueError):
        readable, _, _ = select.select([0], [], [], wait_s)
        if readable and os.read(0, 4096) == b"":
            return True
    return os.getppid() != parent_pid


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pelton.engine.process", description=__doc__)
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--hang-dump-s", type=float, default=60.0)
    parser.add_argument("--imports", default="", help="modules that the start needs, with commas")
    arguments = read_arguments(parser, argv)
    gc.disable()  # until the engine has started: `garbage.paused`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    setup()
    wire = Wire(arguments.socket_dir)
    process = EngineProcess(wire, parent_pid=arguments.parent_pid, hang_dump_s=arguments.hang_dump_s)
    process.imports = list(filter(None, arguments.imports.split(",")))
    process.start_threads()
    status = 0
    try:
        process.run()
    except Exception:
        status = 1
    wire.close()
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(status)


if __name__ == "__main__":
    main()
