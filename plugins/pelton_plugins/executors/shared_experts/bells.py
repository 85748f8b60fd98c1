"""`Bells`: one process wakes the others that sleep. Sockets in a folder that nobody else may enter."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_NUMBER = struct.Struct("<Q")


class Bells:
    """rung: called on a thread of its own with the number that another rank has rung with."""

    def __init__(self, folder: Path, rank: int, size: int, rung: Callable[[int], None]) -> None:
        self._others = [str(folder / f"bell-{other}") for other in range(size) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own = folder / f"bell-{rank}"
        own.unlink(missing_ok=True)  # of the process that was this rank before
        self._socket.bind(str(own))
        self._rung = rung
        threading.Thread(target=self._listen, name="pelton-bell", daemon=True).start()

    def ring(self, number: int) -> None:
        """Never waits. Who has gone meanwhile hears nothing; who has not heard the last one yet is awake."""
        data = _NUMBER.pack(number)
        for address in self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(data, socket.MSG_DONTWAIT, address)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(_NUMBER.size):
                self._rung(*_NUMBER.unpack(data))
