"""A node without a front end (`pelton serve --headless`): engines for a server on another host.

For each of its engines it connects to that server, starts an engine process once it is told what to serve, and passes messages on.
When the engine or the connection ends the other ends too, and it connects again: the server starts the engine anew, or is gone.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pelton.config import EngineConfig
from pelton.engine import protocol
from pelton.errors import ConfigError, PeltonError, error_info
from pelton.logging import get_logger, setup
from pelton.model.resolve import resolve_model
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins
from pelton.utils.own_process import own_program
from pelton_plugins.data_parallel.secure import address, connect, read_secret

logger = get_logger(__name__)

POLL_MS = 200
SHORT_MESSAGE = 64  # bytes; a longer one is none that says that a front end joins
PAUSE_S = 0.5  # between two lives of an engine


def run_node(config: EngineConfig, plugins: Plugins) -> int:
    """Run this node's engines until SIGINT or SIGTERM. Raises `ConfigError`."""
    parallel = config.parallel
    if parallel.data_parallel_address is None:
        raise ConfigError("headless needs --data-parallel-address: that of the server's host.")
    if len(parallel.engine_indexes) == parallel.data_parallel_size:
        raise ConfigError(
            f"data_parallel_size_local is {len(parallel.engine_indexes)} of {parallel.data_parallel_size} engines; a headless node "
            "leaves the server one at least. Set --data-parallel-size and --data-parallel-size-local."
        )
    secret = read_secret(parallel.data_parallel_key_file)
    setup(config.observability.log_level)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    model = resolve_model(config, plugins)
    engines = [NodeEngine(config, model, index, secret, stop) for index in parallel.engine_indexes]
    threads = [threading.Thread(target=engine.run, name=f"pelton-engine-{engine.index}") for engine in engines]
    for thread in threads:
        thread.start()
    logger.info(
        "Engines %s connect to %s.", ", ".join(str(engine.index) for engine in engines), parallel.data_parallel_address
    )
    while any(thread.is_alive() for thread in threads):
        threads[0].join(0.2)
    failed = [engine.failure for engine in engines if engine.failure is not None]
    if failed:
        raise failed[0]
    return 0


class NodeEngine:
    """One engine of this node, life after life, on a thread of its own."""

    def __init__(
        self, config: EngineConfig, model: ResolvedModel, index: int, secret: bytes, stop: threading.Event
    ) -> None:
        self.index = index
        self.failure: PeltonError | None = None
        self._config, self._model, self._secret, self._stop = config, model, secret, stop
        self._where = address(config, index)

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                self._live()
            except PeltonError as error:
                self.failure = error
                self._stop.set()
            except Exception:
                logger.exception("Engine %d starts again.", self.index)
            self._stop.wait(PAUSE_S)

    def _live(self) -> None:
        socket_dir = protocol.make_socket_dir()
        context: zmq.Context[Any] = zmq.Context()
        process: subprocess.Popen[bytes] | None = None
        try:
            far = connect(context, self._where, self._secret)
            command, environment = own_program("pelton.engine.process", socket_dir=socket_dir, hang_dump_s=60.0)
            # The end of its standard input tells the process that we are gone, from whichever thread it was started.
            process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, process_group=0)
            _Relay(context, socket_dir, far, self).run(process, self._stop)
        finally:
            if process is not None:
                _end(process)
            context.destroy(300)
            shutil.rmtree(socket_dir, ignore_errors=True)

    def adapt(self, start: protocol.Start) -> protocol.Start:
        """The head's start message with what is this node's: where the model lies, and which devices the engine has.
        Raises `ConfigError` for another model."""
        theirs, ours = start.model, self._model
        if (theirs.architecture, theirs.dtype, theirs.hf_config) != (ours.architecture, ours.dtype, ours.hf_config):
            names = [f"{model.name} ({model.architecture}, {model.dtype})" for model in (ours, theirs)]
            raise ConfigError(
                f"Engine {self.index}: its node has {names[0]}, the server {names[1]}; give both the same model."
            )
        replace, own = msgspec.structs.replace, self._config.parallel
        parallel = replace(
            start.config.parallel, data_parallel_start_rank=own.data_parallel_start_rank,
            data_parallel_size_local=len(own.engine_indexes), device=own.device,
        )  # fmt: skip
        model = replace(theirs, path=ours.path, tokenizer_path=ours.tokenizer_path)
        return replace(start, model=model, config=replace(start.config, parallel=parallel))


class _Relay:
    """Messages between one engine process and the head."""

    def __init__(self, context: zmq.Context[Any], socket_dir: str, far: zmq.Socket[bytes], engine: NodeEngine) -> None:
        self._context, self._socket_dir, self._far, self._engine = context, socket_dir, far, engine
        self._poller = zmq.Poller()
        self._fronts: dict[zmq.Socket[bytes], bytes] = {}  # of the engine's outputs, with who gets them
        self._bind(0)
        self._to_engine = context.socket(zmq.PUSH)
        self._to_engine.setsockopt(zmq.SNDHWM, 0)
        self._to_engine.connect(protocol.address(socket_dir, protocol.INPUT_SOCKET))
        self._decoder = protocol.decoder_for_engine()
        self._is_started = self._is_connected = False

    def _bind(self, client_index: int) -> None:
        front = self._context.socket(zmq.PULL)
        front.setsockopt(zmq.RCVHWM, 0)
        front.bind(protocol.address(self._socket_dir, protocol.output_socket(client_index)))
        self._fronts[front] = client_index.to_bytes(4, "little")
        self._poller.register(front, zmq.POLLIN)

    def run(self, process: subprocess.Popen[bytes], stop: threading.Event) -> None:
        """Until the engine ends, the connection does, or this node."""
        monitor = self._far.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )  # fmt: skip
        for socket in (self._far, monitor):
            self._poller.register(socket, zmq.POLLIN)
        while not stop.is_set():
            ready = dict(self._poller.poll(POLL_MS))
            for front in [one for one in self._fronts if one in ready]:
                self._send_on(front)
            if self._far in ready:
                self._take_far()
            if monitor in ready and not self._note(parse_monitor_message(monitor.recv_multipart())["event"]):
                logger.warning("Engine %d: the connection to its server has ended.", self._engine.index)
                return
            if process.poll() is not None:
                time.sleep(0.05)
                for front in self._fronts:  # what it said last
                    self._send_on(front)
                return

    def _note(self, event: int) -> bool:
        """False when the connection that there was has ended."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        elif event == zmq.EVENT_DISCONNECTED:
            return not self._is_connected
        else:
            logger.error(
                "Engine %d: its server refuses the connection. Is data_parallel_key_file the same?", self._engine.index
            )
            time.sleep(1.0)
            return False  # it is not tried again by itself: the next life does
        return True

    def _send_on(self, front: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._far.send_multipart([self._fronts[front], front.recv(zmq.NOBLOCK)])

    def _take_far(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._far.recv(zmq.NOBLOCK)
                if not data:
                    continue  # a question whether we are there
                if not self._is_started or len(data) <= SHORT_MESSAGE:
                    data = self._look_at(data)
                if data:
                    self._to_engine.send(data)

    def _look_at(self, data: bytes) -> bytes:
        message = self._decoder.decode(data)
        if isinstance(message, protocol.Join):
            self._bind(message.client_index)
        elif isinstance(message, protocol.Leave):
            place = message.client_index.to_bytes(4, "little")
            for front in [one for one, index in self._fronts.items() if index == place]:
                self._poller.unregister(front)
                del self._fronts[front]
                front.close(0)
        elif isinstance(message, protocol.Start):
            self._is_started = True
            try:
                return protocol.encode(self._engine.adapt(message))
            except PeltonError as error:
                failed = protocol.encode(protocol.Failed(error_info(error)))
                self._far.send_multipart([bytes(4), failed])
                return b""
        return data


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3.0)
        return
    process.kill()
    process.wait()
