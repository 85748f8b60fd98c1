"""Settings of structured output."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError


class StructuredOutputsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How constraints on a request's output are compiled."""

    backend: str | None = None
    """Name of a structured-output backend, such as llguidance; the best that is installed when unset: auto."""
    disable_any_whitespace: bool = False
    """Write JSON without whitespace between its parts, where a request does not say."""
    disable_additional_properties: bool = False
    """Objects have no properties that a JSON schema does not name, where neither it nor the request says."""
    grammar_compile_timeout_s: float = 5.0
    """Longest compilation of one constraint; one that takes longer is refused."""
    grammar_threads: int | None = None
    """Threads that make token masks; half of a few cores and most of many, up to 16, when unset."""

    def __post_init__(self) -> None:
        if not 0.0 < self.grammar_compile_timeout_s <= 600.0:
            raise ConfigError(
                f"grammar_compile_timeout_s is {self.grammar_compile_timeout_s}; use more than 0 and at most 600, such as 5."
            )
        if self.grammar_threads is not None and not 1 <= self.grammar_threads <= 64:
            raise ConfigError(f"grammar_threads is {self.grammar_threads}; use 1 to 64, such as 4.")
