"""Settings of speculative decoding."""

from __future__ import annotations

import msgspec

from pelton.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 16


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafts of tokens that the model verifies in one step. Greedy output stays the same; with sampling its law does."""

    method: str | None = None
    """Name of a draft proposer, such as ngram, medusa, eagle, eagle3 or draft_model; without a `model` no speculation when unset."""
    model: str | None = None
    """medusa, eagle, eagle3, draft_model: folder, name or hub id of the weights that make drafts. They say the method when it is unset."""
    num_speculative_tokens: int = 3
    """Most drafts of one request in one step."""
    prompt_lookup_max: int = 5
    """ngram: most tokens of the end of the text that are looked up earlier in it."""
    prompt_lookup_min: int = 3
    """ngram: fewest tokens that have to be found again."""
    min_acceptance_rate: float = 0.15
    """Where a smaller share of the drafts is accepted, none are made for a while; 0: drafting never pauses."""
    drafts_on_device: bool | None = None
    """Whether workers make the drafts themselves where their method allows it, so that steps overlap. Unset: but on a CPU."""

    def __post_init__(self) -> None:
        if self.method in (None, "ngram") and self.model in ("ngram", "[ngram]"):  # as vLLM's programs name it
            msgspec.structs.force_setattr(self, "method", "ngram")
            msgspec.structs.force_setattr(self, "model", None)
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; use 1 to {MAX_SPECULATIVE_TOKENS}, such as 3."
            )
        if self.prompt_lookup_min < 1:
            raise ConfigError(f"prompt_lookup_min is {self.prompt_lookup_min}; use at least 1, such as 3.")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max is {self.prompt_lookup_max}; use at least prompt_lookup_min, {self.prompt_lookup_min}."
            )
        if not 0.0 <= self.min_acceptance_rate <= 1.0:
            raise ConfigError(f"min_acceptance_rate is {self.min_acceptance_rate}; use 0 to 1, such as 0.15.")
