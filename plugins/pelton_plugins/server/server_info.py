"""Answer of GET /server_info."""

from __future__ import annotations

import platform
import sys
from typing import Any

import msgspec

import pelton
from pelton_plugins.server.state import ServerState

SECRET = ("api_key",)
"""Settings that nobody is told: whether they are set, and no more."""


class ServerInfo(msgspec.Struct, kw_only=True):
    version: str
    models: list[str]
    server_config: dict[str, Any]
    """Settings of the HTTP server."""
    engine_config: dict[str, Any] | None = None
    """Settings of the engine by section; null while it loads."""
    engine: dict[str, Any] | None = None
    """What it found when it started: device, attention backend, sizes, seconds of each phase."""
    system: dict[str, str]


def server_info_of(state: ServerState) -> ServerInfo:
    llm = state.llm
    server = msgspec.to_builtins(state.config)
    for name in SECRET:
        server[name] = "set" if server[name] else "not set"
    return ServerInfo(
        version=pelton.__version__,
        models=list(state.model_names),
        server_config=server,
        engine_config=None if llm is None else plain(llm.config),
        engine=None if llm is None else plain(llm.info),
        system={"python": sys.version.split()[0], "platform": platform.platform()},
    )


def plain(value: Any) -> dict[str, Any]:
    """A struct as JSON has it; what JSON has no word for as text."""
    found: dict[str, Any] = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    return found
