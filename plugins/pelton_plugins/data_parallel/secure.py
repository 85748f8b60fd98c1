"""Sockets between hosts: TCP with CURVE (encrypted, and both sides prove that they have the shared key).

Both key pairs are made from one secret in a file that every node has; nothing else is accepted, not even to be decoded.
"""

from __future__ import annotations

import hashlib
import os
import stat

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pelton import limits
from pelton.config import EngineConfig
from pelton.errors import ConfigError

LEAST_SECRET_BYTES = 32
HEARTBEAT_MS = 2000
LOST_MS = 8000
"""A peer that says nothing for so long, not even that it is there, is lost."""


def read_secret(path: str | None) -> bytes:
    """Raises `ConfigError` for a file that is missing, short, or readable by others."""
    if path is None:
        raise ConfigError(
            "data_parallel_key_file is not set, and engines of several hosts need it. Make one file for all nodes: "
            "head -c 32 /dev/urandom | base64 > key; chmod 600 key."
        )
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"data_parallel_key_file {path} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise ConfigError(f"data_parallel_key_file {path} has mode {mode:o}; others may not read it: chmod 600 {path}.")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"data_parallel_key_file {path} has {len(secret)} bytes; use at least {LEAST_SECRET_BYTES} random ones."
        )
    return secret


def key_pair(secret: bytes, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of a side of the connection, in Z85."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=f"pelton-{side}".encode()).digest())
    return zmq.curve_public(private), private


def address(config: EngineConfig, index: int) -> str:
    """Where the head waits for engine `index` of another node: each has a port of its own."""
    parallel = config.parallel
    host = parallel.data_parallel_address or ""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{parallel.data_parallel_rpc_port + index}"


class _OnlyOne:
    """Accepts one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key, in Z85, may connect."""
        return key == self._public


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500), (zmq.SNDTIMEO, 1000),
        (zmq.MAXMSGSIZE, limits.MAX_IPC_MESSAGE_BYTES), (zmq.IPV6, 1),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, LOST_MS), (zmq.HANDSHAKE_IVL, LOST_MS),
        (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 2000),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    return socket


def listen(
    context: zmq.Context[zmq.Socket[bytes]], where: str, secret: bytes
) -> tuple[zmq.Socket[bytes], ThreadAuthenticator]:
    """A ROUTER for nodes that have the secret. Raises `ConfigError` where the address is taken or not of this host."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=_OnlyOne(key_pair(secret, "node")[0]))
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, "head")
    try:
        socket.bind(where)
    except zmq.ZMQError as error:
        socket.close(0)
        guard.stop()
        raise ConfigError(
            f"data_parallel_address: cannot listen at {where}: {error}. Use an address of this host, and a "
            "data_parallel_rpc_port with a free port behind it for each engine."
        ) from error
    return socket, guard


def connect(context: zmq.Context[zmq.Socket[bytes]], where: str, secret: bytes) -> zmq.Socket[bytes]:
    """A DEALER to the head, which may not be there yet."""
    socket = _socket(context, zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, "node")
    socket.curve_serverkey = key_pair(secret, "head")[0]
    try:
        socket.connect(where)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"data_parallel_address: {where} is not an address to connect to: {error}.") from error
    return socket
