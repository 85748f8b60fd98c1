"""Conformance of this package's middleware, in a server of a tiny model with random weights."""

from __future__ import annotations

from pelton.testing.http import Call, HTTPConformance
from pelton.testing.server import TinyServer


class TestSkeletonMiddleware(HTTPConformance):
    calls = (Call("GET", "/v1/models", holds="tiny", is_own=False),)

    def test_an_unknown_tenant_is_refused(self, server: TinyServer) -> None:
        assert server.ask("GET", "/v1/models", headers={"x-tenant": "blue"}).status == 200
        assert server.ask("GET", "/v1/models", headers={"x-tenant": "red"}).status == 403
