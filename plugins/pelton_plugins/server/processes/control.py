"""Messages between the process that owns the engine and the API processes: msgpack over a pair of stream sockets.

The owner sends `Configure` first, `Resolved` once the model is found, then `EngineUp` and `EngineDown` of each engine as it goes, and
where there are several, `Loads`; `Engines` where another number of them is wanted. An API
process answers `Ready` or `Failed`, and tells its figures several times a second, which is also its sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.errors import EngineError, ErrorInfo
from pelton.messages.report import EngineInfo
from pelton.metrics.stats import IterationStats
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.http_metrics import HttpCounts

TELL_INTERVAL_S = 0.5
"""Between two `Figures` of an API process."""
MAX_MESSAGE_BYTES = 2**28
_LENGTH = struct.Struct("!I")


class _Message(msgspec.Struct, array_like=True, tag=True):
    """The tag is the class name."""


class Configure(_Message):
    server: ServerConfig
    engine: EngineConfig
    explicit: list[str]
    plugin_digest: str
    index: int
    """Of the process, from 0; one that takes a dead one's place has its index."""
    port: int
    is_replacement: bool = False
    """Others serve meanwhile: connections wait for this one to load."""


class Resolved(_Message):
    """The model lies on this machine."""


class EngineUp(_Message):
    socket_dir: str
    client_index: int
    """Used once, so that a new process never gets outputs that were meant for a dead one."""
    info: EngineInfo
    engine: int = 0
    """Number of the engine, where there are several."""


class EngineDown(_Message):
    reason: str
    engine: int = 0


class Loads(_Message):
    """Requests of each engine, from all API processes: what their routers go by."""

    loads: dict[int, tuple[int, int]]
    """Engine to (waiting, running)."""


class AskScale(_Message):
    """A client wants another number of engines."""

    number: int
    """Of the question of this process."""
    num_engines: int
    drain_timeout_s: float


class Scaled(_Message):
    """The answer to `AskScale`."""

    number: int
    error: ErrorInfo | None = None


class Scaling(_Message):
    """The number of engines begins to change, or has changed."""

    is_under_way: bool


class Engines(_Message):
    """There are engines 0 to `num_engines` - 1 from now on. Answer with `EnginesTaken` once requests of others have ended."""

    number: int
    num_engines: int
    drain_timeout_s: float


class EnginesTaken(_Message):
    number: int


class AskFigures(_Message):
    """Answer with `Figures` at once."""

    number: int


class MetricsText(_Message):
    number: int
    text: str


class AskKept(_Message):
    """Do something with a response that process `keeper` keeps. The owner hands it on."""

    number: int
    """Of the question of process `asker`."""
    asker: int
    keeper: int
    action: str
    response_id: str


class Kept(_Message):
    """The answer to `AskKept`."""

    number: int
    asker: int
    body: bytes
    """JSON."""
    error: ErrorInfo | None = None


class Ready(_Message):
    pid: int


class Failed(_Message):
    error: ErrorInfo


class Figures(_Message):
    """Counts of an API process since its last report."""

    number: int
    """Of the question; 0 without one."""
    iterations: dict[int, IterationStats]
    """By engine."""
    http: HttpCounts
    process: dict[str, float]
    """Of `process_*` and `python_*` families, by sample name."""


class AskMetrics(_Message):
    """A scrape came here: the text over all processes is wanted."""

    number: int


ToApi = (
    Configure | Resolved | EngineUp | EngineDown | Loads | AskFigures | MetricsText | AskKept | Kept | Scaled | Scaling
    | Engines
)  # fmt: skip
ToOwner = Ready | Failed | Figures | AskMetrics | AskKept | Kept | AskScale | EnginesTaken

_encoder = msgspec.msgpack.Encoder()


class Link:
    """One end of the pair. reads: the union of messages that come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reads: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reads)

    def send(self, message: ToApi | ToOwner) -> None:
        """Never waits; a peer that is gone is noticed by `receive`."""
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """The next message. Raises `asyncio.IncompleteReadError` or `OSError` when the peer is gone."""
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise EngineError(f"A message between processes of the server says that it has {size} bytes.")
        return self._decoder.decode(await self._reader.readexactly(size))

    def close(self) -> None:
        """End it; what was sent still goes out."""
        self._writer.close()

    async def closed(self, timeout_s: float = 1.0) -> None:
        """Wait until it did."""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
