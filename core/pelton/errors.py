"""The errors that cross Pelton's interfaces, classed by who has to act.

`ConfigError`: the operator. `RequestError`: the client (becomes a 4xx). `PluginError`: the
plugin's author. `EngineError`: nobody's input, the engine itself. A message says what was found,
what would be right, and what to do. Errors cross process borders as `ErrorInfo`, never pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: what a client of the engine is told."""

    kind: str
    """Class name of the error, such as "RequestError"."""
    message: str
    param: str | None = None
    """Name of the request field that is at fault."""
    status: int = 500
    """HTTP status that fits."""


class PeltonError(Exception):
    """Root of all errors that Pelton raises on purpose."""

    status = 500
    param: str | None = None

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(kind=type(self).__name__, message=str(self), param=self.param, status=self.status)


class ConfigError(PeltonError, ValueError):
    """A setting is wrong: the operator has to act."""


class PluginError(PeltonError):
    """A plugin is missing, broken or made for another API version."""


class RequestError(PeltonError, ValueError):
    """A request is wrong: the client has to act. `param` names the field."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, value: Any = None) -> None:
        if param is not None and value is not None:
            shown = repr(value)
            message = f"{message} (parameter={param}, value={shown if len(shown) <= 200 else shown[:200] + '...'})"
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    status = 404


class AdapterNotFoundError(ModelNotFoundError):
    """The request names an adapter that is in none of the places that were looked at."""


class InvalidAdapterError(RequestError):
    """An adapter's files are wrong, or it is not made for this model."""


class AdapterRankError(InvalidAdapterError):
    """An adapter's rank is above `max_lora_rank`."""


class NotSupportedError(RequestError):
    """The request is sound, but this model or set-up does not offer what it asks for. No 5xx: clients would try again."""


class QueueFullError(RequestError):
    """Admission limits (`max_num_queued_reqs`, `max_num_queued_tokens`) refuse the request for now."""

    status = 503


class DeadlineExceededError(RequestError):
    """The request's own time limit passed before it finished."""

    status = 408


class EngineError(PeltonError):
    """One request failed inside the engine; the engine goes on."""


class EngineDeadError(PeltonError):
    """The engine process is gone; every waiting request gets this, with the cause."""

    status = 500


_BY_KIND: dict[str, type[PeltonError]] = {
    cls.__name__: cls
    for cls in (
        PeltonError, ConfigError, PluginError, RequestError, ModelNotFoundError, AdapterNotFoundError, InvalidAdapterError,
        AdapterRankError, NotSupportedError,
        QueueFullError, DeadlineExceededError, EngineError, EngineDeadError,
    )
}  # fmt: skip


def error_info(error: BaseException) -> ErrorInfo:
    """An error as data, its root cause last."""
    info = error.to_info() if isinstance(error, PeltonError) else None
    kind = info.kind if info is not None else EngineError.__name__
    message = str(error) if info is not None else f"{type(error).__name__}: {error}"
    root = error
    while (cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        root = cause
    if root is not error and str(root) not in message:
        message += f" Root cause: {type(root).__name__}: {root}"
    return ErrorInfo(
        kind=kind, message=message, param=info.param if info else None, status=info.status if info else 500
    )


def error_from_info(info: ErrorInfo) -> PeltonError:
    """Make the error again on this side of a process border; an unknown kind becomes `EngineError`."""
    error = _BY_KIND.get(info.kind, EngineError)(info.message)
    error.param, error.status = info.param, info.status
    return error
