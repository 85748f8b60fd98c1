"""Hook functions of the built-in commands."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import CommandEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"
OTHER_NAMES = {"collect-env": ("collect_env",), "generate": ("complete",)}  # vLLM's


@hookimpl
def pelton_cli_commands() -> Sequence[CommandEntry]:
    commands = {
        "backends": ("backends", "platforms, attention backends and ops for this machine and model, with the winners"),
        "chat": ("chat", "talk with a model, in this process or at a server"),
        "collect-env": ("collect_env", "what a bug report needs to know of this machine"),
        "generate": ("generate", "complete prompts from arguments, a file or stdin"),
        "plugins": ("plugins", "loaded plugins: what they offer, and what is chosen"),
        "version": ("version", "versions of Pelton, its hook API and Python"),
    }
    return [
        CommandEntry(
            name=name,
            load=f"pelton_plugins.commands.{module}:run",
            help=text,
            priority=10,
            aliases=OTHER_NAMES.get(name, ()),
        )
        for name, (module, text) in commands.items()
    ]
