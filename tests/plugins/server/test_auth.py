"""Keys: every route wants one but the public list; reachable addresses need one."""

from __future__ import annotations

import pytest
from litestar import get
from pelton_fake_server import FakeAsyncLLM, Running

from pelton.errors import ConfigError
from pelton_plugins.server.config import ServerConfig, is_loopback
from pelton_plugins.server.plugin import pelton_http_routes

PATHS = ["/v1/models", "/version", "/metrics", "/load", "/openapi.json", "/nowhere", "/v1/nowhere", "/docs", "/extra"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def extra_routes(state):
    @get("/extra")
    async def extra() -> dict[str, str]:
        return {"from": "a plugin", "model": state.model_name}

    return [extra]


class ExtraEntry:
    name = "extra"

    def resolve(self):
        return extra_routes


class WithExtra:
    def entries(self, hook):
        return [*pelton_http_routes(), ExtraEntry()] if hook == "pelton_http_routes" else []


@pytest.fixture(scope="module")
def locked():
    config = ServerConfig(access_log=False, api_key=["first-key", "second-key"])
    with Running(config, FakeAsyncLLM(), WithExtra()) as running:
        yield running


@pytest.mark.parametrize(
    "method, path", [*(("GET", p) for p in PATHS), *(("POST", p) for p in POSTS), ("OPTIONS", "/v1/models")]
)
def test_no_route_opens_without_a_key(locked, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}, {"Authorization": "Basic first-key"},
                    {"Authorization": "Bearer"}, {"Authorization": "Bearer first-key second-key"}):  # fmt: skip
        reply = locked.client.request(method, path, headers=headers)
        assert reply.status_code == 401
        if path.startswith("/v1/messages"):
            assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", "authentication_error")
        elif "/v2/" in path:
            assert "API key" in reply.json()["message"]
        else:
            error = reply.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("AuthenticationError", 401, None)
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_opens_every_route(locked, key):
    headers = {"Authorization": f"Bearer {key}"}
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.client.get("/extra", headers=headers).json() == {"from": "a plugin", "model": "fake"}
    assert locked.client.get("/nowhere", headers=headers).status_code == 404
    assert locked.post("/v1/completions", {"prompt": "a"}, headers=headers).status_code == 200


def test_health_and_ping_are_public(locked):
    assert locked.client.get("/health").status_code == 200
    assert locked.client.get("/ping").status_code == 200
    assert locked.client.get("/health/").status_code == 401


def test_the_public_list_is_a_setting(start):
    server = start(api_key=["k"], public_routes=["/metrics"])
    assert server.client.get("/metrics").status_code == 200
    assert server.client.get("/health").status_code == 401


def test_an_oversized_body_is_not_read_without_a_key(locked):
    assert locked.client.post("/v1/completions", content=b"x" * 2**20).status_code == 401


@pytest.mark.parametrize(
    "host, loopback",
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.4", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_reachable_addresses_need_a_key(host, loopback):
    assert is_loopback(host) == loopback
    if loopback:
        ServerConfig(host=host).check_exposure()
    else:
        with pytest.raises(ConfigError, match="no api_key is set"):
            ServerConfig(host=host).check_exposure()
        ServerConfig(host=host, api_key=["k"]).check_exposure()
        ServerConfig(host=host, allow_unauthenticated=True).check_exposure()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"port": 70000}, "port is 70000"),
        ({"api_key": [""]}, "empty key"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"graceful_shutdown_s": -1}, "graceful_shutdown_s is -1"),
        ({"ssl_certfile": "x.pem"}, "belong together"),
        ({"public_routes": ["health"]}, "start with a slash"),
        ({"sse_keep_alive_interval": 0}, "above 0"),
        ({"sse_keep_alive_interval": float("nan")}, "sse_keep_alive_interval is nan; use seconds above 0"),
        ({"graceful_shutdown_s": float("nan")}, "graceful_shutdown_s is nan; use 0 or more seconds"),
    ],
)
def test_bad_settings_name_the_field(settings, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)
