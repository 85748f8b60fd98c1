"""Clients that read streams, many in one process: `python -m pelton_plugins.bench.stream.client JSON`.

Sockets and epoll without a library, so that reading takes little of the processor time that the server needs too. A chunk
is an event that has text; the times are those at which it could be read.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from array import array
from typing import Any

import msgspec

TEXT = b'"text":"'
END = b"0\r\n\r\n"


class Client:
    """One connection, which sends a request as soon as the answer before has ended. Each prompt begins with another token, so
    that no prefix cache has it."""

    next_token = 10
    vocab_size = 11

    def __init__(self, host: str, port: int, body: bytes, path: str) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: "
        )
        self._before, _, rest = body.partition(b"[")
        self._after = rest[rest.index(b",") :] if b"," in rest.partition(b"]")[0] else b"]" + rest.partition(b"]")[2]
        self.sent = 0.0
        self.last = 0.0
        self.num_chunks = 0
        self.tail = b""

    def send(self) -> None:
        self.sent, self.last, self.num_chunks, self.tail = time.perf_counter(), 0.0, 0, b""
        body = self._before + b"[%d" % Client.next_token + self._after
        Client.next_token = 10 + (Client.next_token - 9) % (Client.vocab_size - 10)
        self.socket.setblocking(True)
        self.socket.sendall(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        self.socket.setblocking(False)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Keep all connections busy until `begin_s + seconds` (monotonic); count what came after `begin_s`."""
    clients = {}
    poll = select.epoll()
    Client.vocab_size, Client.next_token = job["vocab_size"], job["first_token"]
    for body in job["bodies"]:
        client = Client(job["host"], job["port"], body.encode(), job["path"])
        clients[client.socket.fileno()] = client
        poll.register(client.socket.fileno(), select.EPOLLIN)
    itls, ttfts, chunks_of = array("d"), array("d"), array("q")
    num_chunks = 0
    error = None
    for client in clients.values():
        client.send()
    begin, end = job["begin_s"], job["begin_s"] + job["seconds"]
    clock, now = time.monotonic, 0.0
    while now < end and error is None:
        for fd, _ in poll.poll(0.2):
            client = clients[fd]
            data = client.socket.recv(65_536)
            now, at = clock(), time.perf_counter()
            if not data:
                error = "The server closed a connection."
                break
            if not client.last and not data.startswith(b"HTTP/1.1 200") and not client.tail:
                error = data[:500].decode(errors="replace")
                break
            found = data.count(TEXT)
            if found:
                if now >= begin:
                    num_chunks += found
                    if client.last:
                        itls.append(at - client.last)
                    else:
                        ttfts.append(at - client.sent)
                client.last = at
                client.num_chunks += found
            client.tail = (client.tail + data)[-5:] if len(data) < 5 else data[-5:]
            if client.tail == END:
                if now >= begin:
                    chunks_of.append(client.num_chunks)
                client.send()
        now = clock()
    return {
        "num_chunks": num_chunks, "itls": list(itls), "ttfts": list(ttfts),
        "chunks_of": list(chunks_of), "error": error, "cpu_s": time.process_time(),
    }  # fmt: skip


def main() -> int:
    job = json.loads(sys.stdin.readline())
    sys.stdout.buffer.write(msgspec.msgpack.encode(run(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
