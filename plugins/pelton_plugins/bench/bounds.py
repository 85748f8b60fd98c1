"""Lower bounds of arguments: refused in one form, before anything starts."""

from __future__ import annotations

from typing import Any

from pelton.errors import ConfigError


def check_at_least(arguments: Any, **bounds: float) -> None:
    """Field names to the least value that each may have, in a list every item. What is unset is not looked at."""
    for name, least in bounds.items():
        value = getattr(arguments, name)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and not item >= least:
                raise ConfigError(f"{name} is {item}; use at least {least}.")
