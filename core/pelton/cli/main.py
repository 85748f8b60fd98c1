"""The `pelton` program: finds a command among the plugins' entries and runs it.

Help is made from the entries: no command is imported for it, and neither is torch. What a user did wrong ends in one
line on stderr; a traceback is for our own mistakes only.

Exit status: 0 done, 1 failed, 2 wrong settings or plugins, 130 interrupted, 141 the reader of our output is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence

from pelton import __version__, env
from pelton.config.engine import did_you_mean
from pelton.entries import CommandEntry
from pelton.errors import ConfigError, PeltonError, PluginError
from pelton.plugins import load_plugins

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

WORKS_WITHOUT_PLUGINS = ("plugins", "version", "collect-env")
"""Built-in commands that tell what is wrong when a plugin of somebody else's stops all others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except PeltonError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (ConfigError, PluginError)) else EXIT_FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0


def _run(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("--version", "-V", "-v"):
        print(f"pelton {__version__}")
        return 0
    commands = find_commands(name)
    if name in ("--help", "-h", "help"):
        print(help_text(commands.values()))
        return 0
    if name not in commands:
        kind = "flag" if name.startswith("-") else "command"
        hint = did_you_mean(name, commands)
        raise ConfigError(f"Unknown {kind} {name!r}.{hint} Commands: {', '.join(sorted(commands))}.")
    for line in env.misspelt():
        print(f"warning: {line}", file=sys.stderr)
    env.PROGRAM.set(f"pelton {name}")
    run: Callable[[list[str]], int] = commands[name].resolve()
    return run(rest)


def find_commands(wanted: str) -> dict[str, CommandEntry]:
    """Every plugin's commands by name; the built-in ones when a plugin is broken and `wanted` is one that tells about it."""
    try:
        entries = load_plugins().entries("pelton_cli_commands")
    except PeltonError:
        if wanted not in WORKS_WITHOUT_PLUGINS:
            raise
        entries = load_plugins(only=()).entries("pelton_cli_commands")
    return {entry.name: entry for entry in entries}


def help_text(commands: Iterable[CommandEntry]) -> str:
    """The program's help: one line a command."""
    entries = sorted(commands, key=lambda entry: entry.name)
    width = max(len(entry.name) for entry in entries)
    return "\n".join(
        [
            f"pelton {__version__}: serves large language models",
            "",
            "usage: pelton COMMAND [arguments]",
            "",
            *(f"  {entry.name.ljust(width)}  {entry.help or entry.doc}" for entry in entries),
            "",
            "pelton COMMAND --help says more. pelton --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
