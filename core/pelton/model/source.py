"""The question to a model source: see the hook `pelton_model_sources`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pelton.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """One name to find. A new need is a new field here, with a default."""

    name: str
    """A model name, folder, file or hub id, as the user gave it."""
    revision: str | None = None
    download_dir: str | None = None
    needs_weights: bool = True
    """False where config and tokenizer files are enough (`--load-format dummy`, another tokenizer)."""
    config: EngineConfig | None = None
    """Of the engine, with `plugin_config`: see `pelton.config.plugin_settings.read_settings`."""


ModelSource = Callable[[SourceRequest], str | None]
"""The local folder or file, or None when the name is not this source's. `ConfigError` when it is, and cannot be had."""
