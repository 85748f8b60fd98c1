"""Answer of GET /server_info."""

from __future__ import annotations

import contextlib
import platform
import sys
from typing import Any

import msgspec

import pelton
from pelton.errors import EngineDeadError, EngineError
from pelton_plugins.server.state import ServerState

SECRET = ("api_key",)
"""Settings that nobody is told: whether they are set, and no more."""


class ServerInfo(msgspec.Struct, kw_only=True):
    version: str
    models: list[str]
    server_config: dict[str, Any]
    """Settings of the HTTP server."""
    engine_config: dict[str, Any] | None = None
    """Settings of the engine by section; null while it loads. data_parallel_size is the number of engines now."""
    engine: dict[str, Any] | None = None
    """What it found when it started: device, attention backend, sizes, seconds of each phase."""
    system: dict[str, str]


async def server_info_of(state: ServerState) -> ServerInfo:
    llm = state.llm
    config = None if llm is None else plain(llm.config)
    if llm is not None and config is not None and llm.config.parallel.enable_elastic_ep:
        with contextlib.suppress(EngineError, EngineDeadError):  # it is not there just now
            config["parallel"]["data_parallel_size"] = await llm.call("num_engines")
    server = msgspec.to_builtins(state.config)
    for name in SECRET:
        server[name] = "set" if server[name] else "not set"
    return ServerInfo(
        version=pelton.__version__,
        models=list(state.model_names),
        server_config=server,
        engine_config=config,
        engine=None if llm is None else plain(llm.info),
        system={"python": sys.version.split()[0], "platform": platform.platform()},
    )


def plain(value: Any) -> dict[str, Any]:
    """A struct as JSON has it; what JSON has no word for as text."""
    found: dict[str, Any] = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    return found
