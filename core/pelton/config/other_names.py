"""Settings of vLLM's that have another name here, or none. The table is read when somebody gives a name that is not known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pelton.errors import ConfigError


class OtherName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting of vLLM's, and what to do about it."""

    here: str = ""
    """Its name here; with ! in front where that says the opposite. Empty: there is no such setting."""
    instead: str = ""
    """Why there is none, and what to do."""
    accepts: list[Any] = []
    """Values that ask for nothing, beside None."""
    is_switch: bool = False
    """As a flag it has no value."""

    def check(self, shown: str, value: Any) -> None:
        """Raise `ConfigError` where there is no such setting, unless the value asks for nothing."""
        if value is not None and value not in self.accepts:
            raise ConfigError(f"{shown} is {value!r}; Pelton has no such setting: {self.instead}.")


@cache
def other_names() -> dict[str, OtherName]:
    """Read the table: by vLLM's flat name, or section and field."""
    return msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, OtherName])


def translated(given: Mapping[str, Any], known: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names here and values; what asks for nothing is left out. prefix: of a section. Raises `ConfigError`."""
    for name, value in given.items():
        other = None if name in known else other_names().get(prefix + name)
        if other is None:
            yield name, value
        elif other.here:
            yield other.here.removeprefix("!"), not value if other.here.startswith("!") else value
        else:
            other.check(prefix + name, value)
