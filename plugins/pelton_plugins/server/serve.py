"""The life of the server process, from the bind to the exit code.

The socket is open before the model loads, so that a taken port is told at once and /health says what goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from pelton.config import EngineConfig
from pelton.engine.start_table import start_table
from pelton.errors import ConfigError, EngineDeadError, RequestError
from pelton.logging import get_logger
from pelton.plugins import Plugins, load_plugins
from pelton.utils.threads import take_short_turns
from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.errors import UnavailableError
from pelton_plugins.server.low_priority import LowPriority
from pelton_plugins.server.state import ServerState
from pelton_plugins.server.wire import BoundedHttpProtocol

if TYPE_CHECKING:
    from pelton.engine.client import EngineClient
    from pelton_plugins.server.ahead import EngineAhead
    from pelton_plugins.server.processes.owner import Owner

logger = get_logger(__name__)


class _Uvicorn(uvicorn.Server):
    """uvicorn raises the signals again that it caught; ours are the owner's, and the exit code is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One engine behind one socket, from the bind to the last answer."""

    def __init__(
        self, config: ServerConfig, engine_config: EngineConfig, plugins: Plugins, explicit: Collection[str] = (),
        ahead: EngineAhead | None = None,
    ) -> None:  # fmt: skip
        names = engine_config.model.served_model_name or [engine_config.model.model]
        self.config = config
        self.port = config.port  # once bound, the real one where this is 0
        self.engine_config = engine_config
        self.plugins = plugins
        self.explicit = explicit
        self.ahead = ahead
        self.state = ServerState(config=config, model_names=names)
        if config.otlp_traces_endpoint is not None:
            from pelton_plugins.server.tracing import make_tracing

            self.state.tracing = make_tracing(
                config.otlp_traces_endpoint, detailed=bool(config.collect_detailed_traces)
            )
        self.priority = LowPriority()
        self._uvicorn: _Uvicorn | None = None
        self._num_signals = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._loading: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self.config, self.port)

    async def run(self) -> int:
        """Serve until a signal. Returns the exit code."""
        take_short_turns()  # results are read beside the event loop
        listener = self._listen()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        limit_s = self.config.graceful_shutdown_s
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self.state, self.plugins),
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                root_path=self.config.root_path,
                ssl_certfile=self.config.ssl_certfile,
                ssl_keyfile=self.config.ssl_keyfile,
                timeout_keep_alive=self.config.timeout_keep_alive_s,
                timeout_graceful_shutdown=None if math.isinf(limit_s) else int(limit_s) + 5,
            )
        )
        self._loading = asyncio.create_task(self._load())
        self._loading.add_done_callback(self._on_loaded)
        try:
            await self._before_accepting()
            await self._uvicorn.serve(sockets=[listener])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if self._deadline is not None:
                self._deadline.cancel()
            if self.state.tracing is not None:
                self.state.tracing.shutdown()
            self._stop_engine()
        return self._exit_code()

    def _listen(self) -> socket.socket:
        listener = bind(self.config)
        self.port = listener.getsockname()[1]
        return listener

    async def _load(self) -> None:
        from pelton.sdk.async_llm import AsyncLLM

        started = time.perf_counter()
        llm = await asyncio.to_thread(
            AsyncLLM,
            self.engine_config,
            plugins=self.plugins,
            max_restarts=self.config.max_engine_restarts,
            explicit=self.explicit,
            start_engine=self._start_engine,
        )
        try:
            await llm.start()
        except BaseException:
            _shutdown(llm)
            raise
        assert self.state.parsers is not None
        try:
            self.state.parsers.of_model(llm)
        except BaseException:
            _shutdown(llm)
            raise
        if llm.info.report.platform == "cpu":
            self.priority.lower()
        self.state.llm = llm
        self._announce(llm, time.perf_counter() - started)

    async def _before_accepting(self) -> None:
        """A first start answers at once, so that /health tells what it waits for."""

    def _start_engine(self, *arguments: Any, **options: Any) -> EngineClient:
        from pelton.engine.process_client import ProcessClient

        connection = None if options or self.ahead is None else self.ahead.take()
        return ProcessClient(*arguments, connection=connection, **{"connect": self.priority.connect} | options)

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        """A server whose engine did not start ends; `_exit_code` says why."""
        if not task.cancelled() and task.exception() is not None:
            self.state.phase = "the engine did not start"
            assert self._uvicorn is not None
            self._uvicorn.should_exit = True

    def _stop_engine(self) -> None:
        assert self._loading is not None
        if not self._loading.done():
            # A thread is in the middle of the start and cannot be interrupted; the engine process ends when we do.
            if self._num_signals:
                print("Stopped while loading.", file=sys.stderr, flush=True)
                os._exit(0)
            logger.error("The server failed while the model was loading.", exc_info=True)
            os._exit(1)
        if self.state.llm is not None:
            _shutdown(self.state.llm)

    def _exit_code(self) -> int:
        assert self._loading is not None
        if self._loading.done() and not self._loading.cancelled():
            error = self._loading.exception()
            if error is not None:
                raise error
        return 0

    def _on_signal(self, number: int) -> None:
        """First: stop taking requests, let those that run finish by the deadline. Second: gone at once; the engine
        process ends with us."""
        self._num_signals += 1
        assert self._uvicorn is not None
        if self._num_signals > 1:
            print("Second signal: exiting now.", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.state.is_draining = True
        count = len(self.state.exchanges)
        if count:
            logger.info("Shutting down; %d requests have %g s to finish.", count, self.config.graceful_shutdown_s)
        self._uvicorn.should_exit = True
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.config.graceful_shutdown_s, self._end_requests)

    def _end_requests(self) -> None:
        self.state.end_all(UnavailableError("The server shut down before the request finished."))

    def _announce(self, llm: Any, seconds: float) -> None:
        announce(llm, self.config, self.state.model_name, self.url, seconds)


def url_of(config: ServerConfig, port: int) -> str:
    """The address to try from this machine."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "localhost") else config.host
    scheme = "https" if config.ssl_certfile else "http"
    # Without root_path: the proxy in front has that, not this socket.
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def announce(llm: Any, config: ServerConfig, model_name: str, url: str, seconds: float) -> None:
    """Print the start table, and a request to try."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    path, body = example(llm, model_name)
    print(start_table(llm.info, llm.model), file=sys.stderr, flush=True)
    print(
        f"Pelton serves {model_name} at {url} (ready in {seconds:.1f} s). Try:\n\n"
        f"  curl {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'\n",
        file=sys.stderr,
        flush=True,
    )


def example(llm: Any, model_name: str) -> tuple[str, str]:
    """A route that this model answers, and a body for it."""
    model, text = f'{{"model": "{model_name}"', '"What is the capital of France?"'
    if llm.model.pooling is None:
        rest = f', "messages": [{{"role": "user", "content": {text}}}], "temperature": 0, "max_completion_tokens": 32}}'
        try:
            llm.render_chat([{"role": "user", "content": "a"}])
        except RequestError:  # it has no chat template
            return (
                "/v1/completions",
                model + ', "prompt": "The capital of France is", "temperature": 0, "max_tokens": 32}',
            )
        return "/v1/chat/completions", model + rest
    tasks = llm.model.pooling.tasks
    if "score" in tasks:
        return "/score", model + f', "text_1": {text}, "text_2": ["Paris", "A river"]}}'
    path = "/v1/embeddings" if "embed" in tasks else "/classify" if "classify" in tasks else "/pooling"
    return path, model + f', "input": {text}}}'


def _shutdown(llm: Any) -> None:
    """AsyncLLM's own shutdown; an engine that is dead already is not news here."""
    with contextlib.suppress(EngineDeadError):
        llm.shutdown()


def check_tls(config: ServerConfig) -> None:
    """Load the certificate and its key. Raises `ConfigError` that names the setting, the file and the reason."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    name, path = "ssl_certfile", config.ssl_certfile
    try:
        context.load_verify_locations(path)  # certificates only, so that a failure below is the key's
        name, path = "ssl_keyfile", config.ssl_keyfile
        open(path, "rb").close()  # the error of the load below names no file
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl.SSLError too
        reason = "is not the key of ssl_certfile" if "MISMATCH" in str(error) else "cannot be loaded"
        found = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or error
        wanted = "a certificate chain" if name == "ssl_certfile" else f"the private key of {config.ssl_certfile}"
        raise ConfigError(f"{name} {path} {reason} ({found}). Give {wanted} as PEM.") from None


def bind(config: ServerConfig, *, port: int | None = None, is_shared: bool = False) -> socket.socket:
    """A listening socket. Raises `ConfigError` that names address and reason.

    is_shared: further ones may listen at the same port; the kernel deals connections out to them.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Connections inherit it: a vanished client is noticed.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port if port is None else port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}. "
            "Stop what uses the port, or give another one with --port (0 takes a free one)."
        ) from None
    listener.setblocking(False)
    return listener


def run_server(
    config: ServerConfig,
    engine_config: EngineConfig,
    plugins: Plugins | None = None,
    *,
    explicit: Collection[str] = (),
    ahead: EngineAhead | None = None,
) -> int:
    """Serve until a signal, on uvloop. explicit: flat names of the settings that the user gave. ahead: has the engine's process."""
    import uvloop

    config.check_exposure()
    config.check_policy(engine_config.scheduler.scheduling_policy)
    check_tls(config)
    server: Server | Owner
    num_servers = config.num_servers(engine_config)
    if num_servers > 1:
        from pelton_plugins.server.processes.owner import Owner

        config = msgspec.structs.replace(config, api_server_count=num_servers)
        server = Owner(config, engine_config, plugins or load_plugins(), explicit, ahead)
    else:
        server = Server(config, engine_config, plugins or load_plugins(), explicit, ahead)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run())
