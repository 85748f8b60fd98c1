"""Processes of ranks as the executor sees them: each a `RankProcess`, all of them started at once by `RanksAhead`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import weakref
from pathlib import Path

from msgspec.structs import replace

from pelton.config import EngineConfig
from pelton.plugins import Plugins
from pelton.utils.own_process import own_program
from pelton_plugins.executors.multiproc import messages
from pelton_plugins.executors.multiproc.messages import FRAME
from pelton_plugins.executors.multiproc.ring import RingWriter, make_ring_file, make_shared_file

RING_BYTES = 1 << 24
FULL_S = 50e-6  # between two looks at a ring without room
_READ_BYTES = 1 << 20


class RankProcess:
    """Started in its constructor, with our import path, in a process group of its own."""

    def __init__(self, rank: int, size: int, ring: int, store: int) -> None:
        """ring, store: descriptors that it is handed."""
        self.rank = rank
        self._received = bytearray()
        self.socket, theirs = socket.socketpair()
        program = "pelton_plugins.executors.multiproc.rank"
        command, environment = own_program(program, rank=rank, size=size, ring=ring, socket=theirs.fileno())
        with theirs:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(ring, store, theirs.fileno()),
                process_group=0,
            )

    @property
    def name(self) -> str:
        return f"Rank {self.rank} (pid {self.process.pid})"

    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return self.process.poll() is not None

    def wake(self) -> None:
        """There is more in the ring. A full socket has woken it already."""
        with contextlib.suppress(OSError):
            self.socket.send(b"\0", socket.MSG_DONTWAIT)

    def answers(self) -> list[bytes] | None:
        """Return what has come, whole; None when the process has closed its side and all of it was returned."""
        found, has_ended = [], False
        with contextlib.suppress(BlockingIOError):
            while not has_ended:
                try:
                    piece = self.socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    piece = b""
                has_ended = not piece
                self._received += piece
        while len(self._received) >= FRAME.size:
            end = FRAME.size + FRAME.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            found.append(bytes(self._received[FRAME.size : end]))
            del self._received[:end]
        return None if has_ended and not found else found

    def is_stopped(self) -> bool:
        """True while a signal holds the process."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in "Tt"

    def describe_end(self, wait_s: float = 5.0) -> str:
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its connection."
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{self.name} was killed by {signal.Signals(-code).name}."
        return f"{self.name} ended with status {code}."

    def kill(self) -> None:
        """End it now. Idempotent."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.socket.close()


class RanksAhead:
    """The processes of all ranks of one host, which prepare themselves (`messages.Prepare`) before they are told of a model. They end
    with this, unless an executor takes them over."""

    def __init__(self, config: EngineConfig, plugins: Plugins) -> None:
        self.config, self.size = config, config.parallel.num_ranks
        self.processes: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, end_ranks, self.processes)
        ring, store = make_ring_file(self.size, RING_BYTES), make_shared_file(0)
        path = f"/proc/self/fd/{store}"  # handed down, as the ring is: nothing is left behind however the processes end
        self.ring = RingWriter(ring, self.size)
        try:
            for rank in range(self.size):
                self.processes.append(RankProcess(rank, self.size, ring, store))
            prepare = messages.encode(messages.Prepare.of(config, plugins, path))
            self.ring.write(prepare, self._wake, lambda: time.sleep(FULL_S))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ring)
            os.close(store)

    def fits(self, config: EngineConfig) -> bool:
        """Return whether these ranks are prepared for `config`, whose batch sizes may have been found since."""
        return replace(self.config, scheduler=config.scheduler) == config

    def hand_over(self) -> list[RankProcess]:
        """Return the processes, which are the caller's from now on, with the ring."""
        self._finalizer.detach()
        return self.processes

    def close(self) -> None:
        """End the ranks, where nobody has taken them over."""
        if self._finalizer.alive:
            self._finalizer()
            self.ring.close()

    def _wake(self) -> None:
        for rank in self.processes:
            rank.wake()


def end_ranks(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()
