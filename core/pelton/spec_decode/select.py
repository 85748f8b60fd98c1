"""The draft proposer that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.spec_decode.interface import DraftProposer, ProposerContext

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins


def make_draft_proposer(config: EngineConfig, model: ResolvedModel, plugins: Plugins) -> DraftProposer | None:
    """The proposer that the settings name; None without speculation. Raises `ConfigError` for a name that nobody offers."""
    name = config.speculative.method
    if name is None:
        return None
    factory = plugins.find("pelton_draft_proposers", name, setting="speculative_config.method").resolve()
    proposer: DraftProposer = factory(
        ProposerContext(config=config.speculative, vocab_size=model.vocab_size, max_model_len=model.max_model_len)
    )
    return proposer
