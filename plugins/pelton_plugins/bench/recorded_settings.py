"""Settings of the executor `recorded`."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

SETTINGS = "recorded"


class RecordedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the executor that writes down its steps."""

    path: str | None = None
    """The file for `pelton simulate --step-times`, written when the engine ends; engine r of several, from 1 on, adds ".r" to it."""
    after_s: float = 0.0
    """Steps of the first seconds are left out: of the warm-up."""

    def __post_init__(self) -> None:
        if not self.after_s >= 0:
            raise ConfigError(f"recorded.after_s is {self.after_s}; use at least 0.")
