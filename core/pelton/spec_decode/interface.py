"""Interface of a draft proposer that runs on the host: it guesses which tokens come next, and the model verifies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.config import EngineConfig, SpeculativeConfig
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.ops.speculation import LookupDraftsNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """Everything that a draft proposer is made from. New fields have defaults."""

    config: SpeculativeConfig
    vocab_size: int
    max_model_len: int
    engine_config: EngineConfig | None = None
    """All settings, for `read_settings`; None in tests of a proposer alone."""
    metrics: PluginMetrics = field(default_factory=PluginMetrics)
    """Counters of its own."""


class DraftProposer(ABC):
    """Called on the engine core's thread, between `update` and `schedule`; must not block.

    The factory of a `pelton_draft_proposers` entry takes one `ProposerContext`. An exception in `propose` costs the request
    its drafts of that step and nothing else.
    """

    max_draft_tokens: int
    """Most drafts of one call; the scheduler cuts longer answers."""

    lookup: LookupDraftsNeeds | None = None
    """Needs of the op `lookup_drafts` with which workers make the same drafts themselves: then nothing waits for the host, and
    `propose` is called where the engine prefers it. None: the host makes them."""

    @abstractmethod
    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Return drafts that may follow the known tokens; an empty list for none.

        token_ids: prompt and output so far, at least one token. From call to call of a request they only grow.
        """

    def finished(self, request_id: str) -> None:  # noqa: B027
        """Forget the request: it ended. Also called for requests that never got a draft."""
