"""Settings of the executor `recorded`."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

SETTINGS = "recorded"


class RecordedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the executor that writes down its steps."""

    path: str | None = None
    """The file for `pelton simulate --step-times`, written when the engine ends; engine r of several, from 1 on, adds ".r" to it."""
    executor: str | None = None
    """The executor whose steps are recorded; the one that the engine would have when unset."""
    after_s: float = 0.0
    """Steps of the first seconds are left out: of the warm-up."""

    def __post_init__(self) -> None:
        if self.executor == SETTINGS:
            raise ConfigError(
                "recorded.executor is 'recorded'; name the executor whose steps it records, or leave it out."
            )
        if not self.after_s >= 0:
            raise ConfigError(f"recorded.after_s is {self.after_s}; use at least 0.")
