"""The draft proposer that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pelton.errors import ConfigError
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.model.resolve import DUMMY_FORMAT, find_format, locate
from pelton.plugins import make
from pelton.spec_decode.interface import DraftProposer, ProposerContext

if TYPE_CHECKING:
    from pathlib import Path

    from pelton.config import EngineConfig
    from pelton.model.formats import ModelFormat
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins


def make_draft_proposer(
    config: EngineConfig, model: ResolvedModel, plugins: Plugins, metrics: PluginMetrics | None = None
) -> DraftProposer | None:
    """The proposer that the settings name; None without speculation. Raises `ConfigError` for a name that nobody offers, and where
    there is a checkpoint that it does not read."""
    name, checkpoint = config.speculative.method, config.speculative.model
    if name is None:
        return None
    if checkpoint is not None:
        raise ConfigError(
            f"speculative_config.model is {checkpoint!r}, and method {name!r} reads no checkpoint. Leave it out, or set another method."
        )
    entry = plugins.find("pelton_draft_proposers", name, setting="speculative_config.method")
    context = ProposerContext(
        config=config.speculative, vocab_size=model.vocab_size, max_model_len=model.max_model_len, engine_config=config,
        metrics=metrics or PluginMetrics(),
    )  # fmt: skip
    return make(entry, DraftProposer, context)  # type: ignore[type-abstract]


def find_checkpoint(config: EngineConfig, plugins: Plugins) -> tuple[Path, ModelFormat]:
    """Where `speculative_config.model` lies, and in which form. Raises `ConfigError` where there is none."""
    name = config.speculative.model
    if name is None:
        raise ConfigError(
            f"speculative_config.method is {config.speculative.method!r}, and there is no speculative_config.model; give the folder, name "
            "or hub id of the weights that make the drafts."
        )
    settings = replace(config, model=replace(config.model, revision=None))  # which is the model's own
    path = locate(name, settings, plugins, needs_weights=config.load.load_format != DUMMY_FORMAT)
    return path, find_format(path, plugins)
