"""Conformance of HTTP routes and middleware: what any of them has to keep in a real server, run with pytest.

Subclass `HTTPConformance` in a test module and set `calls`. The package has to be installed: the server loads it as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pelton.testing.server import Reply, TinyServer, serve_tiny

KEY = "conformance"
_STARTED = pytest.StashKey[dict[tuple[str, ...], TinyServer]]()


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and what must come of it."""

    method: str
    path: str
    body: Any = None
    status: int = 200
    holds: str = ""
    """A part of the answer."""
    is_own: bool = True
    """The path is one of the package's routes, not of the server's."""


class HTTPConformance:
    calls: ClassVar[Sequence[Call]]
    flags: ClassVar[Sequence[str]] = ()
    """More flags of `pelton serve`."""

    @pytest.fixture(scope="class")
    def server(self, pytestconfig: pytest.Config) -> TinyServer:
        """One for all classes with the same flags: a start takes seconds."""
        started = pytestconfig.stash.setdefault(_STARTED, {})
        flags = tuple(self.flags)
        if flags not in started:
            stack = ExitStack()
            started[flags] = stack.enter_context(serve_tiny(*flags, key=KEY))
            pytestconfig.add_cleanup(stack.close)
        return started[flags]

    def ask(self, server: TinyServer, call: Call, **more: Any) -> Reply:
        return server.ask(call.method, call.path, call.body, **more)

    def test_answers_as_it_says(self, server: TinyServer) -> None:
        for call in self.calls:
            reply = self.ask(server, call)
            assert reply.status == call.status and call.holds in reply.text, (
                f"{call.method} {call.path}: {reply.status} {reply.text[:300]}"
            )

    def test_nothing_is_open_without_the_key(self, server: TinyServer) -> None:
        for call in self.calls:
            for key in (None, "wrong"):
                status = self.ask(server, call, key=key).status
                assert status in (401, 403), f"{call.method} {call.path} answers {status} without the key"

    def test_rubbish_is_the_clients_error(self, server: TinyServer) -> None:
        for call in self.calls:
            if call.method in ("POST", "PUT", "PATCH"):
                for body in (b"", b"\xff\x00", b"[" * 1000, b"null", b'{"a":'):
                    reply = server.ask(call.method, call.path, body)
                    assert 400 <= reply.status < 500, (
                        f"{call.path}, body {body[:10]!r}: {reply.status} {reply.text[:300]}"
                    )

    def test_own_routes_are_described(self, server: TinyServer) -> None:
        described = server.ask("GET", "/openapi.json").json()["paths"]
        for call in self.calls:
            path = call.path.partition("?")[0]
            if call.is_own:
                assert path in described, f"{path} is not in /openapi.json"

    def test_the_servers_own_routes_go_on(self, server: TinyServer) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        reply = server.ask("POST", "/v1/completions", body)
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert server.ask("GET", "/health", key=None).status == 200
