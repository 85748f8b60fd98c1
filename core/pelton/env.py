"""The environment variables that Pelton reads: each is a spelling of a setting, and this is the one file that reads them.

A flag or an argument wins over its variable. A value that cannot be read is a `ConfigError`, never ignored.
HF_HUB_OFFLINE and HF_HOME are huggingface_hub's own.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from pelton.errors import ConfigError

PROGRAM: ContextVar[str] = ContextVar("program", default="pelton")
"""The command that runs, as usage shows it."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    setting: str
    """Flat name of the setting that it spells."""
    doc: str


PLUGINS = Variable(
    "PELTON_PLUGINS", "plugins", "Third-party plugins to load, comma list; unset: all, empty: built-ins only"
)
LOG_LEVEL = Variable("PELTON_LOG_LEVEL", "log_level", f"One of {', '.join(LOG_LEVELS)}")
API_KEY = Variable("PELTON_API_KEY", "api_key", "Key that clients of the HTTP server must send")
DEPENDENT_LAUNCH = Variable(
    "PELTON_DEPENDENT_LAUNCH",
    "dependent_launch",
    "0: a CUDA kernel starts only when the one before it has ended; to measure what starting earlier gains, or to look for a fault",
)
TRACE_PLUGINS = Variable(
    "PELTON_TRACE_PLUGINS", "trace_plugins", "1: say each call of a hook on stderr, who answered, and what it gave"
)
VARIABLES = (PLUGINS, LOG_LEVEL, API_KEY, DEPENDENT_LAUNCH, TRACE_PLUGINS)


def plugin_names(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """Names in PELTON_PLUGINS; None when it is not set."""
    text = environ.get(PLUGINS.name)
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not all(char.isalnum() or char in "_-." for char in name):
            raise ConfigError(
                f"{PLUGINS.name} is {text!r}: {name!r} is not a plugin name; use a comma list, such as 'a,b'."
            )
    return names


def traces_plugins(environ: Mapping[str, str] = os.environ) -> bool:
    """PELTON_TRACE_PLUGINS; False when it is not set."""
    text = environ.get(TRACE_PLUGINS.name, "0")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{TRACE_PLUGINS.name} is {text!r}; use 0 or 1.")
    return text == "1"


def log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """PELTON_LOG_LEVEL, lower-case; None when it is not set."""
    text = environ.get(LOG_LEVEL.name)
    if text is not None and text.lower() not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL.name} is {text!r}; use one of {', '.join(LOG_LEVELS)}.")
    return text.lower() if text is not None else None


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """PELTON_API_KEY; None when it is not set."""
    text = environ.get(API_KEY.name)
    if text is not None and (not text or text != text.strip() or not text.isascii() or not text.isprintable()):
        # The value is a secret: it is not shown.
        raise ConfigError(
            f"{API_KEY.name} is empty, or has spaces around it or unprintable characters; give a key or unset it."
        )
    return text


def dependent_launch(environ: Mapping[str, str] = os.environ) -> bool:
    """PELTON_DEPENDENT_LAUNCH, 0 or 1; True when it is not set."""
    text = environ.get(DEPENDENT_LAUNCH.name, "1")
    if text not in ("0", "1"):
        raise ConfigError(f"{DEPENDENT_LAUNCH.name} is {text!r}; use 0 or 1.")
    return text == "1"


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, tuple[str, str]]:
    """Flat setting name to (value, name of the variable), for those that are set and are settings of a struct."""
    found = {LOG_LEVEL: log_level(environ), API_KEY: api_key(environ)}
    return {variable.setting: (value, variable.name) for variable, value in found.items() if value is not None}


def misspelt(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable that looks like a misspelt one of ours. Only a hint: container platforms inject
    variables such as PELTON_PORT for a service called pelton."""
    known = [variable.name for variable in VARIABLES]
    lines = []
    for name in sorted(environ):
        if name.startswith("PELTON_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if close:
                lines.append(f"Environment variable {name} is not read; did you mean {close[0]}?")
    return lines
