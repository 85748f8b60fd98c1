"""`python -m pelton_plugins.data_parallel.stand_in`: what an engine of another host looks like on this one.

To its front ends it is an engine process: the same sockets, the same messages, and its end is the engine's end. What they send it
passes on to the node that connects for this engine, unread; and back. See `node.py` for the other side.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from pelton.engine import protocol
from pelton.engine.process import is_parent_gone
from pelton.errors import EngineDeadError, PeltonError, error_info
from pelton.logging import get_logger, setup
from pelton.utils.own_process import read_arguments
from pelton_plugins.data_parallel.secure import address, listen, read_secret

logger = get_logger(__name__)

POLL_MS = 250
CHECK_S = 5.0
"""For how long we look for our node after a connection has ended: its socket can take what is sent for a moment longer."""


class StandIn:
    """One life: from the front end's start message to the end of either side."""

    def __init__(self, socket_dir: str, parent_pid: int) -> None:
        self._socket_dir, self._parent_pid = socket_dir, parent_pid
        self._context: zmq.Context[Any] = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.bind(protocol.address(socket_dir, protocol.INPUT_SOCKET))
        self._outs: dict[int, zmq.Socket[bytes]] = {}
        self._peer: bytes | None = None
        self._check_at = self._check_until = math.inf
        self._decoder = protocol.decoder_for_front_end()

    def run(self) -> None:
        """Raises `PeltonError`: the address cannot be used, or the node is lost."""
        self._tell(protocol.encode(protocol.Hello(protocol.PROTOCOL, os.getpid())))
        while not self._in.poll(POLL_MS):
            self._check_parent()
        first = self._in.recv()
        message = protocol.decoder_for_engine().decode(first)
        if not isinstance(message, protocol.Start):
            return
        setup(message.config.observability.log_level)
        parallel = message.config.parallel
        index, where = parallel.data_parallel_rank, address(message.config, parallel.data_parallel_rank)
        far, guard = listen(self._context, where, read_secret(parallel.data_parallel_key_file))
        try:
            logger.info("Engine %d waits for its node at %s.", index, where)
            self._relay(far, index, first)
        finally:
            guard.stop()
            far.close(500)

    def _relay(self, far: zmq.Socket[bytes], index: int, first: bytes) -> None:
        monitor = far.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for socket in (self._in, far, monitor):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(POLL_MS))
            self._check_parent()
            if far in ready:
                self._take_far(far, index, first)
            if self._in in ready and not self._take_near(far, index):
                return
            if monitor in ready:
                parse_monitor_message(monitor.recv_multipart())
                self._check_from_now()
            self._check_peer(far, index)

    def _check_from_now(self) -> None:
        """Somebody has gone, perhaps our node: not as many times as there are messages, but for as long as its socket may take some,
        and once more at the end, however late that is."""
        self._check_at = time.monotonic()
        self._check_until = self._check_at + CHECK_S

    def _check_peer(self, far: zmq.Socket[bytes], index: int) -> None:
        now = time.monotonic()
        if self._peer is not None and self._check_at <= now:
            self._check_at = now + POLL_MS / 1000 if now < self._check_until else math.inf
            self._send_far(far, b"", index)

    def _take_far(self, far: zmq.Socket[bytes], index: int, first: bytes) -> None:
        """Pass on all that has come from the node."""
        while True:
            try:
                peer, place, data = far.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:  # not three parts: of another version
                continue
            if peer == self._peer:
                self._tell(data, int.from_bytes(place, "little"))
            elif self._is_hello(data):
                self._greet(far, peer, index, first)

    def _is_hello(self, data: bytes) -> bool:
        try:
            return isinstance(self._decoder.decode(data), protocol.Hello)
        except (msgspec.MsgspecError, ValueError):
            return False

    def _greet(self, far: zmq.Socket[bytes], peer: bytes, index: int, first: bytes) -> None:
        """Take the node that comes first. One that comes while another is held may be the same, in its next life: then the first
        connection is dead, whether or not we have heard of its end, and this engine's life is over."""
        if self._peer is not None:
            logger.warning("Engine %d has a node, and another one offers to run it. Is the first one gone?", index)
            self._check_from_now()
            return
        try:
            far.send_multipart([peer, first])
        except zmq.ZMQError:  # gone already; it comes again
            return
        self._peer = peer
        logger.info("The node of engine %d is there.", index)

    def _take_near(self, far: zmq.Socket[bytes], index: int) -> bool:
        """Pass on all that front ends have sent. False where they end the engine before it has a node."""
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._in.recv(zmq.NOBLOCK)
                if self._peer is not None:
                    self._send_far(far, data, index)
                elif isinstance(protocol.decoder_for_engine().decode(data), protocol.Shutdown):
                    return False  # others come once the engine is ready
        return True

    def _send_far(self, far: zmq.Socket[bytes], data: bytes, index: int) -> None:
        try:
            far.send_multipart([self._peer or b"", data])
        except zmq.ZMQError as error:
            raise EngineDeadError(f"The connection to the node of engine {index} is lost: {error}.") from error

    def _tell(self, data: bytes, client_index: int = 0) -> None:
        out = self._outs.get(client_index)
        if out is None:
            out = self._outs[client_index] = self._context.socket(zmq.PUSH)
            out.setsockopt(zmq.SNDHWM, 0)
            out.setsockopt(zmq.LINGER, 500)
            out.connect(protocol.address(self._socket_dir, protocol.output_socket(client_index)))
        out.send(data)

    def fail(self, error: PeltonError) -> None:
        self._tell(protocol.encode(protocol.Failed(error_info(error))))

    def _check_parent(self) -> None:
        if is_parent_gone(self._parent_pid, 0.0):
            os._exit(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pelton_plugins.data_parallel.stand_in", description=__doc__)
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--hang-dump-s", type=float, default=60.0)
    parser.add_argument("--imports", default="")
    arguments = read_arguments(parser, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup()
    stand_in = StandIn(arguments.socket_dir, arguments.parent_pid)
    try:
        stand_in.run()
    except PeltonError as error:
        stand_in.fail(error)
        time.sleep(0.05)  # lets the I/O thread write it
        sys.stdout.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
