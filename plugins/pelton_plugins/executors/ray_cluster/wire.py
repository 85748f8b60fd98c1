"""The connection of a rank on another host to its executor: TCP, a proof of both sides that they know the token, then messages.

Nothing is encrypted, as nothing between Ray's own processes is by default: the cluster's network has to be a private one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable

from pelton.errors import EngineDeadError

FRAME = struct.Struct("<Q")
HELLO = struct.Struct("<I")
NONCE_BYTES = 32
TIMEOUT_S = 20.0


def _proof(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, side + nonces, hashlib.sha256)


def accept(listener: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """The next rank and its connection; None for a stranger. Raises `TimeoutError` when nobody comes in the listener's time."""
    found, _ = listener.accept()
    try:
        found.settimeout(TIMEOUT_S)
        ours = os.urandom(NONCE_BYTES)
        found.sendall(ours)
        theirs = _exactly(found, NONCE_BYTES)
        (rank,) = HELLO.unpack(_exactly(found, HELLO.size))
        if not hmac.compare_digest(_exactly(found, 32), _proof(token, b"rank" + HELLO.pack(rank), ours + theirs)):
            raise ConnectionError
        found.sendall(_proof(token, b"executor", ours + theirs))
    except OSError:
        found.close()
        return None
    found.settimeout(None)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return rank, found


def connect(host: str, port: int, token: bytes, rank: int) -> socket.socket:
    """Connect a rank to its executor. Raises `EngineDeadError` where that is gone, or is somebody else."""
    try:
        made = socket.create_connection((host, port), TIMEOUT_S)
        theirs, ours = _exactly(made, NONCE_BYTES), os.urandom(NONCE_BYTES)
        made.sendall(ours + HELLO.pack(rank) + _proof(token, b"rank" + HELLO.pack(rank), theirs + ours))
        answer = _exactly(made, 32)
    except OSError as error:
        raise EngineDeadError(f"Rank {rank} cannot connect to its executor at {host}:{port}: {error}.") from error
    if not hmac.compare_digest(answer, _proof(token, b"executor", theirs + ours)):
        raise EngineDeadError(f"Rank {rank}: at {host}:{port} is somebody else than its executor.")
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class SocketJobs:
    """Jobs of a rank, from its connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, wait: Callable[[], None]) -> bytes:
        """Return the next job. The end of the connection is the end of this process."""
        with contextlib.suppress(OSError):
            (length,) = FRAME.unpack(_exactly(self._connection, FRAME.size))
            return _exactly(self._connection, length)
        os._exit(1)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("the connection has ended")
        found += piece
    return bytes(found)
