"""Routes of other plugins: served like our own, and refused at the start when they cannot be."""

from __future__ import annotations

import pytest
from litestar import Request, get, post

from pelton.errors import PluginError
from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.plugin import pelton_http_routes
from pelton_plugins.server.state import ServerState


class Offer:
    def __init__(self, name, routes):
        self.name, self.load, self.resolve = name, f"x:{name}", lambda: routes


class Offers:
    def __init__(self, *routes):
        self._extra = [Offer(f"extra{i}", one) for i, one in enumerate(routes)]

    def entries(self, hook):
        return [*pelton_http_routes(), *self._extra]


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
    "routes, message", [(clashes, "do not fit together"), (broken, "'extra0' of x:extra0 fail: KeyError")]
)
def test_routes_that_cannot_be_served_stop_the_start(routes, message):
    with pytest.raises(PluginError, match=message):
        build_app(ServerState(config=ServerConfig(), model_names=["m"]), Offers(routes))
