"""Settings of routing by prefix."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError


class PrefixSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `--data-parallel-routing prefix`."""

    max_imbalance: int = 32
    """By how much the score (4 x waiting + running) of an engine may lie above the lowest, so that its cached prefix still counts."""
    piece_tokens: int = 32
    """Tokens of the pieces in which beginnings are compared."""
    max_pieces: int = 200_000
    """Pieces remembered; the least recently used ones are forgotten."""

    def __post_init__(self) -> None:
        for name, least in (("max_imbalance", 0), ("piece_tokens", 1), ("max_pieces", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"data_parallel.{name} is {getattr(self, name)}; use at least {least}.")
