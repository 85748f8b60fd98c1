"""The `pelton` program: finds a command among the plugins' entries and runs it.

Help is made from the entries: no command is imported for it, and neither is torch. What a user did wrong ends in one
line on stderr, and so does a plugin's command that fails (PELTON_LOG_LEVEL=debug has the traceback); others are our own mistakes.

Exit status: 0 done, 1 failed, 2 wrong settings or plugins, 130 interrupted, 141 the reader of our output is gone.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

from pelton import __version__, env
from pelton.config.engine import did_you_mean
from pelton.entries import CommandEntry
from pelton.errors import ConfigError, PeltonError, PluginError
from pelton.plugins import calling, load_plugins

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

BUILT_IN = "pelton_plugins."
WORKS_WITHOUT_PLUGINS = ("plugins", "version", "collect-env")
"""Built-in commands that tell what is wrong when a plugin of somebody else's stops all others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    atexit.register(gc.freeze)  # the end looks for no garbage: with torch loaded that takes half a second
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
    except (PeltonError, OSError) as error:
        if os.environ.get(env.LOG_LEVEL.name, "").lower() == "debug":
            traceback.print_exception(error)
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
        name = next((entry.name for entry in commands.values() if name in entry.aliases), name)
    if name not in commands:
        kind = "flag" if name.startswith("-") else "command"
        hint = did_you_mean(name, commands)
        raise ConfigError(f"Unknown {kind} {name!r}.{hint} Commands: {', '.join(sorted(commands))}.")
    for line in env.misspelt():
        print(f"warning: {line}", file=sys.stderr)
    env.PROGRAM.set(f"pelton {name}")
    entry = commands[name]
    run: Callable[[list[str]], int] = entry.resolve()
    with nullcontext() if entry.load.startswith(BUILT_IN) else calling(entry):
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
    listed = "\n".join(f"  {entry.name.ljust(width)}  {entry.help or entry.doc}" for entry in entries)
    about = f"pelton {__version__}: serves large language models\n\nusage: pelton COMMAND [arguments]"
    return f"{about}\n\n{listed}\n\npelton COMMAND --help says more. pelton --version prints the version."


if __name__ == "__main__":
    sys.exit(main())
