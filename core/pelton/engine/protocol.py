"""Messages between the front end and the engine process: msgpack of tagged structs, never pickle.

Order of a start: the engine sends `Hello`; the front end checks the protocol and answers `Start`, perhaps `Prepare` before it; the
engine checks the plugin digest, starts (its log on stderr shows the phases), and sends `Ready` or `Failed`. After
that the front end sends requests and calls, the engine `Outputs` and `CallResult`s, in any order.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from typing import Any

import msgspec

from pelton import limits
from pelton.config import EngineConfig
from pelton.errors import EngineError, ErrorInfo, RequestError
from pelton.messages.outputs import EngineOutputs, FinishReason
from pelton.messages.report import EngineInfo
from pelton.messages.request import EngineRequest
from pelton.model.resolved import ResolvedModel

PROTOCOL = 1
MAX_IPC_PATH_BYTES = 100  # sun_path holds 108 with its end; some systems hold 104
INPUT_SOCKET, OUTPUT_SOCKET = "in", "out"


class _Message(msgspec.Struct, array_like=True, tag=True):
    """The tag is the class name."""


class Prepare(_Message):
    """Before `Start`, to an engine that is started before its model is found: what its executor starts meanwhile."""

    config: EngineConfig
    plugin_names: list[str]


class Start(_Message):
    protocol: int
    config: EngineConfig
    model: ResolvedModel
    plugin_digest: str
    plugin_names: list[str]


class Add(_Message):
    requests: list[EngineRequest]


class Finish(_Message):
    request_ids: list[str]
    reason: FinishReason


class Call(_Message):
    call_id: int
    method: str
    args: list[Any]
    client_index: int = 0


class Join(_Message):
    """A further front end: it has bound the socket of its outputs, and sends requests with its index."""

    client_index: int


class Leave(_Message):
    """A front end that joined is gone: its requests end."""

    client_index: int


class Shutdown(_Message):
    pass


class Hello(_Message):
    protocol: int
    pid: int


class Heartbeat(_Message):
    """Every second, from a thread beside the step loop."""

    busy_s: float
    """How long the step loop has been in one step; 0 when it waits for requests."""


class Ready(_Message):
    info: EngineInfo


class Failed(_Message):
    error: ErrorInfo


class Outputs(_Message):
    outputs: EngineOutputs


class CallResult(_Message):
    call_id: int
    result: Any = None
    error: ErrorInfo | None = None


ToEngine = Prepare | Start | Add | Finish | Call | Join | Leave | Shutdown
ToFrontEnd = Hello | Heartbeat | Ready | Failed | Outputs | CallResult

_encoder = msgspec.msgpack.Encoder()


def decoder_for_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


def decoder_for_front_end() -> msgspec.msgpack.Decoder[ToFrontEnd]:
    return msgspec.msgpack.Decoder(ToFrontEnd)


def encode(message: ToEngine | ToFrontEnd) -> bytes:
    """Raises `RequestError` when the message is too large or holds what msgpack cannot."""
    try:
        data = _encoder.encode(message)
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        raise RequestError(f"The message holds something that is not plain data: {error}") from None
    if len(data) > limits.MAX_IPC_MESSAGE_BYTES:
        raise RequestError(
            f"The message to the other process has {len(data)} bytes; at most {limits.MAX_IPC_MESSAGE_BYTES} are sent."
        )
    return data


def make_socket_dir() -> str:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    for parent in (None, "/tmp"):
        try:
            path = tempfile.mkdtemp(prefix="pelton-", dir=parent)
        except OSError as error:
            raise EngineError(f"No place for a socket: {error}. Set TMPDIR to a folder that can be written.") from None
        if len(os.fsencode(os.path.join(path, OUTPUT_SOCKET))) <= MAX_IPC_PATH_BYTES:
            os.chmod(path, stat.S_IRWXU)
            return path
        shutil.rmtree(path)
    raise EngineError(
        f"No place for a socket: paths under {tempfile.gettempdir()} exceed {MAX_IPC_PATH_BYTES} bytes. Set TMPDIR to a shorter one."
    )


def output_socket(client_index: int) -> str:
    """Name of the socket on which a front end gets its outputs; 0 is the one that started the engine."""
    return f"{OUTPUT_SOCKET}{client_index}" if client_index else OUTPUT_SOCKET


def address(socket_dir: str, name: str) -> str:
    return f"ipc://{os.path.join(socket_dir, name)}"
