"""The draft proposer that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.plugins import make
from pelton.spec_decode.interface import DraftProposer, ProposerContext

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins


def make_draft_proposer(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, metrics: PluginMetrics | None = None
) -> DraftProposer | None:
    """The proposer that the settings name; None without speculation. Raises `ConfigError` for a name that nobody offers."""
    name = config.speculative.method
    if name is None:
        return None
    entry = plugins.find("pelton_draft_proposers", name, setting="speculative_config.method")
    context = ProposerContext(
        config=config.speculative, vocab_size=model.vocab_size, max_model_len=model.max_model_len, engine_config=config,
        metrics=metrics or PluginMetrics(),
    )  # fmt: skip
    return make(entry, DraftProposer, context)  # type: ignore[type-abstract]
