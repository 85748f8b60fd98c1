"""Settings of the executor `paced`, apart from it: `pelton plugins` lists them without an engine's modules."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

SETTINGS = "paced_executor"


class PacedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pace of the executor `paced`."""

    step_s: float = 0.0
    """Seconds between the results of two steps, at least."""

    def __post_init__(self) -> None:
        if self.step_s < 0:
            raise ConfigError(f"step_s is {self.step_s}; use 0 or more seconds.")
