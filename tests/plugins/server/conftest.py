"""Servers over a fake engine (pelton_fake_server)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pelton_fake_server import FakeAsyncLLM, RoutesOnly, Running

from pelton_plugins.server.app import build_app
from pelton_plugins.server.config import ServerConfig
from pelton_plugins.server.state import ServerState


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for the tests of a file that do not change it."""
    with Running(ServerConfig(access_log=False), FakeAsyncLLM()) as running:
        yield running


@pytest.fixture(scope="module")
def make_app() -> Callable[..., Any]:
    """Makes applications without a socket: for `pelton_plugins.server.batch.call`."""

    def make(answer: str, **settings: Any) -> Any:
        config = ServerConfig(access_log=False, **settings)
        return build_app(ServerState(config=config, model_names=["fake"], llm=FakeAsyncLLM(answer)), RoutesOnly())

    return make


@pytest.fixture(scope="module")
def run_server() -> Iterator[Callable[..., Running]]:
    """Starts servers for the tests of a file."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            Running(ServerConfig(access_log=False, **settings), FakeAsyncLLM())
        )


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers of a test's own settings."""
    with contextlib.ExitStack() as stack:

        def start_one(llm: FakeAsyncLLM | None = None, plugins: Any = None, **settings: Any) -> Running:
            config = ServerConfig(access_log=False, **settings)
            return stack.enter_context(Running(config, llm or FakeAsyncLLM(), plugins))

        yield start_one


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream: decoded chunks, and "[DONE]"."""
    import json

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = [part for part in response.text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]
