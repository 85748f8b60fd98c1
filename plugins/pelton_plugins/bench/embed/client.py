"""One client of `pelton bench embed --http`, in a process of its own: plain sockets that are kept open, a request in flight on each.

A job as JSON on the first line of stdin; "ready" on stdout; it sends from the next line of stdin on, and ends with its figures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import sys
import time
from typing import Any

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Job(msgspec.Struct, kw_only=True):
    """The requests of one client, and the time that it sends them for."""

    host: str
    port: int
    path: str
    headers: str
    """Of each request, each line with its end."""
    model: str
    length: int
    """Tokens of each input."""
    batch_size: int
    """Inputs of a request."""
    connections: int
    vocab_size: int
    words: list[str] = []
    """Words of a token each: inputs are texts of them, with room for the special tokens. Token ids without."""
    num_special: int = 0
    warm_s: float
    seconds: float
    seed: int


class Result(msgspec.Struct, kw_only=True):
    """Figures of the answers within the seconds that count."""

    num_requests: int = 0
    latencies_s: list[float] = []
    dimensions: int = 0
    core_share: float = 0.0
    """Of the time since it began to send, that this client computed."""
    error: str | None = None


class Source:
    """Bodies of requests. No input comes twice, so that no prefix cache knows it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._random = random.Random(job.seed)
        self._ids = range(10, job.vocab_size)

    def next(self) -> bytes:
        job, choices = self._job, self._random.choices
        inputs: list[Any]
        if job.words:
            room = job.length - job.num_special
            inputs = [" ".join(choices(job.words, k=room)) for _ in range(job.batch_size)]
        else:
            inputs = [choices(self._ids, k=job.length) for _ in range(job.batch_size)]
        body = msgspec.json.encode({"model": job.model, "input": inputs, "encoding_format": "base64"})
        head = (
            f"POST {job.path} HTTP/1.1\r\nHost: {job.host}:{job.port}\r\nContent-Type: application/json\r\n"
            f"{job.headers}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Run:
    """The requests of all connections."""

    def __init__(self, job: Job) -> None:
        self.job, self.source, self.result = job, Source(job), Result()
        self.starts = self.ends = float("inf")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_checked = False
        self._began = self._cpu = 0.0

    def begin(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self.starts = self._began + self.job.warm_s
        self.ends = self.starts + self.job.seconds

    def answered(self, sent: float, body: bytes) -> bool:
        """Take an answer in; whether to go on."""
        now = time.perf_counter()
        if not self.is_checked:
            self.is_checked = True
            self._check(body)
        if self.starts <= now < self.ends:
            self.result.num_requests += 1
            self.result.latencies_s.append(now - sent)
        if now >= self.ends and not self.done.done():
            self.result.core_share = (time.process_time() - self._cpu) / (now - self._began)
            self.done.set_result(None)
        return now < self.ends

    def _check(self, body: bytes) -> None:
        vectors = [base64.b64decode(one["embedding"]) for one in json.loads(body)["data"]]
        sizes = {len(vector) for vector in vectors}
        if len(vectors) != self.job.batch_size or len(sizes) != 1:
            self.fail(
                f"the answer has {len(vectors)} vectors of {sorted(sizes)} bytes for {self.job.batch_size} inputs"
            )
        self.result.dimensions = sizes.pop() // 4

    def fail(self, why: str) -> None:
        if not self.done.done():  # afterwards the connections end because this client ends them
            self.result.error = why
            self.done.set_result(None)


class _Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parts: list[bytes] = []
        self._missing = -1  # bytes of the answer; below 0 while its head is not there
        self._sent = 0.0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self) -> None:
        request = self._run.source.next()
        self._sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing < 0:
            whole = b"".join(self._parts)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                self._parts = [whole]
                return
            length = _LENGTH.search(whole, 0, end)
            if not whole.startswith(b"HTTP/1.1 200") or length is None:
                self._run.fail(f"the server answered {whole[:400].decode('utf-8', 'replace')}")
                return
            self._parts = [whole[end + 4 :]]
            self._missing = int(length[1]) - len(self._parts[0])
        else:
            self._missing -= len(data)
        if self._missing == 0:
            body, self._parts, self._missing = b"".join(self._parts), [], -1
            if self._run.answered(self._sent, body):
                self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.fail("the server closed a connection")


async def run(job: Job) -> Result:
    """Send until the seconds are over."""
    loop = asyncio.get_running_loop()
    one_run = _Run(job)
    connections: list[_Connection] = []
    for _ in range(job.connections):
        _, protocol = await loop.create_connection(lambda: _Connection(one_run), job.host, job.port)
        connections.append(protocol)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    one_run.begin()
    for connection in connections:
        connection.send()
    await one_run.done
    for connection in connections:
        connection.transport.abort()
    return one_run.result


def main() -> None:
    import uvloop

    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(msgspec.json.encode(runner.run(run(job))).decode(), flush=True)


if __name__ == "__main__":
    main()
