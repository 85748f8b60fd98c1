"""Routes of other plugins: served like our own, and refused at the start when they cannot be."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from litestar import Request, get, post

from pelton.entries import Entry
from pelton.errors import PluginError
from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.plugin import pelton_http_routes
from pelton_plugins.server.state import ServerState


class Offer:
    def __init__(self, name, routes):
        self.name, self.load, self.resolve = name, f"x:{name}", lambda: routes

    def __str__(self):
        return f"pelton_http_routes {self.name!r} (x:{self.name} of acme (acme 0.3))"


class Offers:
    def __init__(self, *routes):
        self._extra = [Offer(f"extra{i}", one) for i, one in enumerate(routes)]
        self._middleware = []

    def entries(self, hook):
        return self._middleware if hook == "pelton_http_middleware" else [*pelton_http_routes(), *self._extra]

    def wrapped(self, *middleware):
        """With middleware, the outermost first."""
        self._middleware = [Entry(name=f"m{i}", load=f"{__name__}:{one}") for i, one in enumerate(middleware)]
        return self


def good(state):
    @get("/hello")
    async def hello() -> dict[str, str]:
        """Say hello."""
        return {"model": state.model_name}

    @post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @get("/fails")
    async def fails() -> None:
        raise ValueError("secret in /home/x/y")

    return [hello, echo, fails]


def clashes(state):
    @get("/version")
    async def version() -> str:
        return "mine"

    return [version]


def broken(state):
    raise KeyError("nothing here")


def test_a_plugins_routes_are_served_and_described(start):
    server = start(plugins=Offers(good))
    assert server.client.get("/hello").json() == {"model": "fake"}
    assert server.client.post("/echo", content=b"abc").json() == {"bytes": 3}
    assert server.client.get("/openapi.json").json()["paths"]["/hello"]["get"]["summary"] == "Say hello."


def test_an_exception_in_a_plugins_route_is_a_scrubbed_500(start):
    reply = start(plugins=Offers(good)).client.get("/fails")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "InternalServerError" and "secret" not in reply.text


@pytest.mark.parametrize(
    "routes, message",
    [
        (
            clashes,
            r"do not fit together: .* Both .* and pelton_http_routes 'extra0' \(.* of acme .* offer GET /version\.",
        ),
        (broken, r"'extra0' \(x:extra0 of acme \(acme 0\.3\)\) fails: KeyError"),
    ],
)
def test_routes_that_cannot_be_served_stop_the_start(routes, message):
    with pytest.raises(PluginError, match=message):
        build_app(ServerState(config=ServerConfig(), model_names=["m"]), Offers(routes))


def teapot(app, state):
    """Answers one path itself, and marks what it lets pass."""

    async def asgi(scope, receive, send):
        if scope["path"] == "/teapot":
            await send({"type": "http.response.start", "status": 418, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": state.model_name.encode()})
            return

        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-passed", b"teapot")]
            await send(message)

        await app(scope, receive, marked)

    return asgi


def second(app, state):
    async def asgi(scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-passed", b"second")]
            await send(message)

        await app(scope, receive, marked)

    return asgi


def failing(app, state):
    raise KeyError("no tenants")


def nothing(app, state):
    return None


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This module under its name, for entries."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(**globals()))


def test_middleware_answers_itself_or_passes_on(start):
    client = start(plugins=Offers(good).wrapped("teapot", "second")).client
    reply = client.get("/teapot")
    assert (reply.status_code, reply.text) == (418, "fake")
    reply = client.get("/hello")
    assert reply.json() == {"model": "fake"} and reply.headers.get_list("x-passed") == ["second", "teapot"]
    assert client.get("/no-such-path").headers.get_list("x-passed") == ["second", "teapot"]
    assert 'status="4xx"' in client.get("/metrics").text, "what it answers itself is counted"


def test_middleware_opens_nothing_that_the_key_closes(start):
    client = start(plugins=Offers(good).wrapped("teapot"), api_key=["k"]).client
    reply = client.get("/hello")
    assert reply.status_code == 401 and reply.headers["x-passed"] == "teapot"
    assert client.get("/hello", headers={"authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize("name, message", [("failing", "KeyError: 'no tenants'"), ("nothing", "gives None")])
def test_middleware_that_cannot_be_made_stops_the_start(name, message):
    with pytest.raises(PluginError, match=message):
        build_app(ServerState(config=ServerConfig(), model_names=["m"]), Offers().wrapped(name))
