"""`Child`: one place among the API processes, and the process that holds it now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from pelton.logging import get_logger
from pelton.utils.own_process import own_program
from pelton_plugins.server.processes import control
from pelton_plugins.server.processes.load_counts import LoadCounts

if TYPE_CHECKING:
    from pelton_plugins.server.processes.owner import Owner

logger = get_logger(__name__)

PROGRAM = "pelton_plugins.server.processes.api_process"
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
HEALTHY_S = 60.0  # after this long alive, earlier deaths are forgotten


class Child:
    """`keep` starts a process, follows it, and starts another when it ends."""

    def __init__(self, owner: Owner, index: int, listener: socket.socket, load_file: int, load: LoadCounts) -> None:
        self._owner = owner
        self.index = index
        self.client_indexes: dict[int, int] = {}  # by engine
        self.ready = asyncio.Event()
        self.num_in_progress = 0
        self.num_sleeping: dict[str, int] = {}
        self.samples: dict[str, float] = {}
        self._listener, self._load_file, self._load = listener, load_file, load
        self._process: asyncio.subprocess.Process | None = None
        self._link: control.Link | None = None
        self._last_sign = time.monotonic()
        self._asked: dict[int, asyncio.Future[None]] = {}

    @property
    def is_linked(self) -> bool:
        return self._link is not None

    async def keep(self) -> None:
        deaths = 0
        while not self._owner.is_stopping:
            since = time.monotonic()
            await self._start()
            await self._follow()
            assert self._process is not None
            code = await self._process.wait()
            self._link = None
            self._load.clear(self.index)
            self.num_in_progress, self.num_sleeping, self.samples = 0, {}, {}
            if self._owner.is_stopping:
                return
            self.ready.clear()
            self._owner.forget(self)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            logger.error("API process %d (pid %d) %s; another takes its place.", self.index, self._process.pid, how)
            deaths = 1 if time.monotonic() - since > HEALTHY_S else deaths + 1
            await asyncio.sleep(BACKOFF_S[min(deaths, len(BACKOFF_S)) - 1])

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        files = {"control_fd": theirs.fileno(), "listen_fd": self._listener.fileno(), "load_fd": self._load_file}
        command, environment = own_program(PROGRAM, is_bound=False, **files)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=list(files.values()),
            start_new_session=True,  # Ctrl-C is the owner's
        )
        theirs.close()
        ours.setblocking(False)
        self._link = control.Link(*await asyncio.open_unix_connection(sock=ours), control.ToOwner)
        self._last_sign = time.monotonic()
        self._owner.greet(self)

    async def _follow(self) -> None:
        """Take its messages until it is gone."""
        assert self._link is not None
        link = self._link
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._take(await link.receive())
        link.close()
        for asked in self._asked.values():
            asked.cancel()
        self._asked.clear()

    def _take(self, message: control.ToOwner) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, control.Ready):
            self.ready.set()
        elif isinstance(message, control.Figures):
            self.num_in_progress, self.samples = message.http.num_in_progress, message.process
            self.num_sleeping = message.http.num_sleeping
        self._owner.take(self, message)
        if isinstance(message, (control.Figures, control.EnginesTaken)):
            asked = self._asked.pop(message.number, None)
            if asked is not None:
                asked.set_result(None)

    async def ask(self, question: control.AskFigures | control.Engines) -> None:
        """Ask the process, and wait until it has answered or is gone."""
        number = question.number
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(question)
        try:
            await asked
        finally:
            self._asked.pop(number, None)

    def send(self, message: control.ToApi) -> None:
        if self._link is not None:
            self._link.send(message)

    def kill_if_silent(self, now: float, most_s: float) -> None:
        if self.ready.is_set() and now - self._last_sign > most_s:
            logger.error(
                "API process %d has not responded for %.0f s and is killed.", self.index, now - self._last_sign
            )
            self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, timeout_s: float) -> None:
        """Let it finish what runs, then make it end."""
        self._signal(signal.SIGTERM)
        process: Any = self._process
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                self.kill()
