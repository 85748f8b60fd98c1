"""`pelton serve`: flags to settings, errors to one line and an exit code. Imports the server only once there is one to run."""

from __future__ import annotations

import contextlib
import sys

from pelton.config import EngineConfig
from pelton.errors import ConfigError, PeltonError, PluginError
from pelton.logging import setup
from pelton.plugins import Plugins, load_plugins
from pelton_plugins.flags import parse_flags
from pelton_plugins.server.config import ServerConfig

HELP = "Serve a model over an OpenAI-compatible HTTP API: /v1/chat/completions, /v1/completions, /metrics, ..."


def run_node(config: EngineConfig, plugins: Plugins) -> int:
    """Run engines for a server on another host. Raises `ConfigError` where the routing's plugin cannot."""
    routing = config.parallel.data_parallel_routing
    client = plugins.find("pelton_engine_clients", routing, setting="data_parallel_routing").resolve()
    if not hasattr(client, "run_node"):
        raise ConfigError(f"headless is set, and data_parallel_routing {routing!r} runs no engines of other hosts.")
    status: int = client.run_node(config, plugins)
    return status


def run(argv: list[str]) -> int:
    """The `serve` command: 0 after a signal, 2 for a wrong setting or plugin, 1 when the engine did not start."""
    try:
        parsed = parse_flags(argv, [ServerConfig], positional="model", program="pelton serve", doc=HELP)
        config: ServerConfig = parsed.structs["ServerConfig"]
        config.check_exposure()
        setup(parsed.config.observability.log_level)

        from pelton_plugins.server.ahead import EngineAhead

        plugins = load_plugins()
        if config.headless:
            return run_node(parsed.config, plugins)
        with contextlib.closing(EngineAhead(parsed.config, plugins)) as ahead:
            from pelton_plugins.server.serve import run_server

            return run_server(config, parsed.config, plugins, explicit=parsed.explicit, ahead=ahead)
    except PeltonError as error:
        print(f"pelton serve: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PluginError)) else 1
