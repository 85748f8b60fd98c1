"""Reading and decoding request bodies: capped before parsing, decoded once, errors with the field's path."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive, Scope
from msgspec import inspect

from pelton import limits
from pelton.errors import RequestError
from pelton.logging import get_logger
from pelton_plugins.server.errors import BodyTooLargeError, ClientDisconnected, UnavailableError

logger = get_logger(__name__)

MAX_ERRORS_SHOWN = 10
MAX_INPUT_CHARS = 200

T = TypeVar("T", bound=msgspec.Struct)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r"\$((?:\.\w+|\[\d+\])*)")
_STEP = re.compile(r"\w+")
_ONE_OF_SEVERAL = ("Invalid enum value", "Invalid value")


class BodyBudget:
    """Bytes of all bodies that are read or worked on now: what many large ones become in memory is bounded too."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    def take(self, count: int) -> None:
        """Raises `UnavailableError` (503) when there is no room; nothing is taken then."""
        if self.num_bytes + count > self.most and self.num_bytes:
            raise UnavailableError(
                f"Request bodies of {self.num_bytes} bytes are in work already; try again in a moment."
            )
        self.num_bytes += count

    def give_back(self, count: int) -> None:
        self.num_bytes -= count


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, *, timeout_s: float | None = None, budget: BodyBudget | None = None
) -> bytes:
    """The whole body. Raises `BodyTooLargeError` as soon as it is known to be too long, and `RequestError` (408) when nothing of
    it comes for `timeout_s`. Of `budget` the caller gives back what the body has bytes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise _too_large(int(value), max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await receive()
            except TimeoutError:
                raise _SlowBodyError(f"Nothing of the request body came for {timeout_s:g} s.") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            assert message["type"] == "http.request"
            part = message.get("body", b"")
            if size + len(part) > max_bytes:
                raise _too_large(size + len(part), max_bytes)
            if budget is not None:
                budget.take(len(part))
            size += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
    except BaseException:
        if budget is not None:
            budget.give_back(size)
        raise


class _SlowBodyError(RequestError):
    status = 408


def _too_large(found: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body has {found} bytes or more; at most {max_bytes} are taken.")


def check_headers(scope: Scope) -> bytes:
    """JSON bodies must say that they are; and an engine is not chosen by the client. Returns the form of the load that is asked for."""
    found = load = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            found = found or value
        elif name == b"endpoint-load-metrics-format":
            load = value
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError(
                f"Content-Encoding is {value.decode('latin-1')[:MAX_INPUT_CHARS]!r}; send the body as it is, without one.",
                param="Content-Encoding",
            )
        elif name == b"x-data-parallel-rank":
            raise RequestError(
                "X-data-parallel-rank is not offered: the engine is chosen by load, or with --data-parallel-routing prefix by "
                "how the prompt begins.",
                param="X-data-parallel-rank",
            )
    if found.split(b";", 1)[0].strip().lower() != b"application/json":
        shown = found.decode("latin-1")[:MAX_INPUT_CHARS]
        raise RequestError(f"Content-Type is {shown!r}; send JSON with Content-Type: application/json.")
    return load


@cache
def _decoder(struct: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(struct)


def decode(body: bytes, struct: type[T]) -> T:
    """Raises `RequestError` that lists up to ten wrong fields."""
    if not body:
        raise RequestError("The request body is empty; send a JSON object.", param="body")
    _check_counts(body)
    try:
        request: T = _decoder(struct).decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(body, struct, error) from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", param="body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from None
    if logger.isEnabledFor(logging.DEBUG):
        _log_unknown(body, struct)
    return request


COUNTED_FROM = 65_536  # bytes; a shorter body cannot have so many


def _check_counts(body: bytes) -> None:
    """Refuse what would become far more objects than its bytes, before they are made."""
    if len(body) < COUNTED_FROM:
        return
    for mark, most, what in (
        (b"{", limits.MAX_JSON_OBJECTS, "objects"),
        (b"[", limits.MAX_JSON_OBJECTS, "lists"),
        (b",", limits.MAX_JSON_ITEMS, "items"),
    ):
        if body.count(mark) > most:
            raise RequestError(f"The request body has more than {most} {what} ({mark.decode()!r}).", param="body")


def _unreadable(body: bytes, error: Exception) -> RequestError:
    reason = "a string has an unpaired surrogate" if _has_half_pair(body) else error
    return RequestError(f"1 validation error: body: {reason}.", param="body")


def _has_half_pair(body: bytes) -> bool:
    """JSON but for an escape such as \\ud800 alone, of which msgspec says odd things."""
    if not _SURROGATE.search(body):
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass
    return False


def _validation_error(body: bytes, struct: type[T], first: msgspec.ValidationError) -> RequestError:
    """Look at each field on its own, so that the client hears of all mistakes at once."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _unreadable(body, error)
    found: list[tuple[str, str]] = []
    if isinstance(raw, dict):
        for field in msgspec.structs.fields(struct):
            name = field.encode_name
            if name not in raw:
                if field.required:
                    found.append((f"body.{name}", "field required"))
                continue
            try:
                msgspec.convert(raw[name], field.type, str_keys=True)
            except msgspec.ValidationError as error:
                if isinstance(error.__cause__, RequestError):
                    return error.__cause__
                message, path = explained(error, field.type)
                found.append((f"body.{name}{path}", f"{message}, input: {_shown(_at(raw[name], path))}"))
            except RecursionError:
                found.append((f"body.{name}", "nested too deeply"))
    if not found:
        message, path = explained(first, struct)
        found = [(f"body{path}", message)]
    plural = "" if len(found) == 1 else "s"
    listed = "; ".join(f"{path}: {message}" for path, message in found[:MAX_ERRORS_SHOWN])
    more = f"; and {len(found) - MAX_ERRORS_SHOWN} more" if len(found) > MAX_ERRORS_SHOWN else ""
    return RequestError(f"{len(found)} validation error{plural}: {listed}{more}", param=found[0][0])


def explained(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """msgspec's "Expected ... - at `$.a[0]`" to the message and ".a[0]"; of a field with few values the message names them.

    kind: the type that the value was to have.
    """
    text, _, path = str(error).partition(" - at ")
    found = _PATH.search(path)
    place = found[1] if found else ""
    values = _values(inspect.type_info(kind), _STEP.findall(place)) if text.startswith(_ONE_OF_SEVERAL) else []
    return f"{text}; use one of {', '.join(values)}" if values else text, place


def _values(kind: inspect.Type, steps: list[str]) -> list[str]:
    """Those that may stand at a place within a type, where they are literals."""
    if isinstance(kind, inspect.Metadata):
        return _values(kind.type, steps)
    if isinstance(kind, inspect.UnionType):
        return [value for one in kind.types for value in _values(one, steps)]
    if not steps:
        return [str(value) for value in kind.values] if isinstance(kind, inspect.LiteralType) else []
    step, rest = steps[0], steps[1:]
    if isinstance(kind, inspect.ListType):
        return _values(kind.item_type, rest)
    if isinstance(kind, inspect.StructType):
        if step == kind.tag_field:
            return [str(kind.tag)]
        return [value for field in kind.fields if field.encode_name == step for value in _values(field.type, rest)]
    return []


def _at(value: Any, path: str) -> Any:
    """Return what stands at a simple path such as "[3]" or ".a[0]"; the whole value where it cannot be followed."""
    current = value
    for step in path.replace("[", ".").replace("]", "").split(".")[1:]:
        try:
            current = current[int(step)] if isinstance(current, list) else current[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return value
    return current


def _shown(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeEncodeError):
        text = type(value).__name__
    return text if len(text) <= MAX_INPUT_CHARS else text[:MAX_INPUT_CHARS] + "..."


def _log_unknown(body: bytes, struct: type[T]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(struct)}
    unknown = sorted(set(msgspec.json.decode(body)) - known)
    if unknown:
        names = ascii(", ".join(unknown))[1:-1]  # a client's own words: on one line
        logger.debug("%s: fields that mean nothing here: %s", struct.__name__, names[:1000])
