"""A small client of an OpenAI-compatible server, on the standard library: `pelton chat --url` needs no more."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pelton import __version__
from pelton.errors import ConfigError, EngineError, PeltonError, RequestError

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0
MAX_BODY_BYTES = 16 * 2**20


class ServerClient:
    """One server. Each call has a connection of its own, which closing the iterator closes: the server then aborts."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; use an address such as http://127.0.0.1:8000.")
        try:
            self.port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url is {url!r}: {error}.") from error
        self.url = url
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"User-Agent": f"pelton/{__version__}"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The first model that the server names."""
        connection, response = self._request("GET", "/v1/models")
        try:
            models = msgspec.json.decode(response.read(MAX_BODY_BYTES))["data"]
            return str(models[0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} names no model at /v1/models; is it an OpenAI-compatible server?") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of a server-sent event stream, decoded, until [DONE]. Raises `RequestError` or `EngineError`."""
        connection, response = self._request("POST", path, msgspec.json.encode(body))
        try:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = msgspec.json.decode(data)
                if "error" in chunk:
                    raise EngineError(_message(chunk) or "The server ended the answer with an error.")
                yield chunk
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EngineError(f"The connection to {self.url} broke: {error}.") from error
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_TIMEOUT_S)
            headers = {**self.headers, **({"Content-Type": "application/json"} if body is not None else {})}
            connection.request(method, self.prefix + path, body=body, headers=headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineError(f"{self.url} cannot be reached: {error}. Is `pelton serve` running there?") from error
        if response.status != 200:
            refusal = _error_of(response, self.url)
            connection.close()
            raise refusal
        return connection, response


def _error_of(response: http.client.HTTPResponse, url: str) -> PeltonError:
    text = response.read(MAX_BODY_BYTES)
    try:
        message = _message(msgspec.json.decode(text))
    except msgspec.DecodeError:
        message = ""
    message = message or text[:200].decode("utf-8", "replace") or response.reason
    if response.status == 401:
        message += " Set PELTON_API_KEY."
    kind = RequestError if 400 <= response.status < 500 else EngineError
    return kind(f"{url} answered {response.status}: {message}")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
