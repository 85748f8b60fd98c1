"""Provenance of a result, and the file that it goes to: versions, device, settings, date; a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import msgspec

from pelton import __version__
from pelton.config.engine import FIELD_HOME
from pelton.errors import ConfigError
from pelton_plugins.flags import Parsed

PACKAGES = ("torch", "triton")


def today() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions() -> dict[str, str]:
    found = {"pelton": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def flat_settings(parsed: Parsed) -> dict[str, Any]:
    """The engine settings that were given, by flat name, as plain data."""
    flat: dict[str, Any] = {}
    for name in sorted(parsed.explicit):
        if name in FIELD_HOME:
            section, field = FIELD_HOME[name]
            flat[name] = msgspec.to_builtins(getattr(getattr(parsed.config, section), field))
    if parsed.config.plugin_config:
        flat["plugin_config"] = msgspec.to_builtins(parsed.config.plugin_config)
    return flat


def circumstances(device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The part that every result has."""
    return {"date": today(), "device": device, "versions": versions(), "settings": settings}


def write_json(path: str | None, result: Any) -> None:
    """Write a result, when a file was asked for; what is not a number becomes null."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(_plain(result), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def number(value: float | None, digits: int = 3) -> str:
    """A figure for people: `digits` that count, thousands apart; a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0) if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f}"
