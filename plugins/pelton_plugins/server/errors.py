"""From exceptions to the one error shape that clients see.

{"error": {"message", "type", "param", "code"}}, code being the HTTP status, and one type per status.
"""

from __future__ import annotations

import re
from http import HTTPStatus

import msgspec
from litestar.exceptions import HTTPException

from pelton.errors import EngineDeadError, EngineError, PeltonError, RequestError
from pelton.logging import get_logger

logger = get_logger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    431: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


class BodyTooLargeError(RequestError):
    status = 413


class NotAllowedError(RequestError):
    """The operator has not allowed it."""

    status = 403


class UnavailableError(RequestError):
    """The server is loading, shutting down, or has all the requests it takes."""

    status = 503


class ClientDisconnected(Exception):
    """The client went away: there is nobody to answer."""


def error_response(status: int, message: str, param: str | None = None) -> ErrorResponse:
    kind = ERROR_TYPES.get(status) or ("BadRequestError" if status < 500 else "InternalServerError")
    return ErrorResponse(ErrorDetail(message=message, type=kind, param=param, code=status))


def describe(error: BaseException, request_id: str, *, in_detail: bool = False) -> ErrorResponse:
    """Return the response for `error`. An unexpected error is logged with its traceback, and its text is hidden from the client."""
    if isinstance(error, HTTPException):
        return _describe_http(error)
    if isinstance(error, RequestError):
        return error_response(error.status, without_internals(str(error)), error.param)
    if isinstance(error, (EngineError, EngineDeadError)):
        logger.error("Request %s: %s: %s", request_id, type(error).__name__, error)
        status = error.status if error.status >= 500 else 500
        return error_response(status, str(error) if in_detail else scrub(str(error)), error.param)
    logger.error("Request %s failed.", request_id, exc_info=error)
    if in_detail:
        return error_response(500, f"{type(error).__name__}: {error}")
    what = scrub(str(error)) if isinstance(error, PeltonError) else "Internal server error."
    return error_response(500, f"{what} The server's log tells more under request id {request_id}.")


def _describe_http(error: HTTPException) -> ErrorResponse:
    status = error.status_code
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Error"
    return error_response(status, phrase if status >= 500 else f"{phrase}.")


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL)
_PATH = re.compile(r"(?<![\w:/])(?:[A-Za-z]:)?(?:[/\\][\w.@+~-]+){2,}/?")


def without_internals(message: str) -> str:
    """Drop tracebacks and memory addresses."""
    return _ADDRESS.sub("<address>", _TRACEBACK.sub("", message)).strip()


def scrub(message: str) -> str:
    """Drop tracebacks, memory addresses and file paths."""
    return _PATH.sub("<path>", without_internals(message))
