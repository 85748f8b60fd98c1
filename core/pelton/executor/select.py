"""Find the executor that the settings name, or the best there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pelton.config import EngineConfig
from pelton.config.parallel import ParallelConfig
from pelton.entries import Entry
from pelton.errors import ConfigError
from pelton.plugins import Plugins


def find_executor(config: ParallelConfig, plugins: Plugins) -> Entry:
    """Raises `ConfigError` when there is none."""
    name = config.distributed_executor_backend
    if name is not None:
        named: Entry = plugins.find("pelton_executors", name, setting="distributed_executor_backend")
        return named
    is_spread = config.num_ranks > 1
    entries: list[Entry] = plugins.entries("pelton_executors")
    for entry in entries:
        if getattr(entry, "runs_several", is_spread) == is_spread:
            return entry
    what = f"for {config.num_ranks} ranks" if is_spread else "of one device"
    raise ConfigError(f"No plugin that is loaded offers an executor {what}; see PELTON_PLUGINS and `pelton plugins`.")


def start_ahead(config: EngineConfig, plugins: Plugins) -> Any:
    """Start what the executor of these settings needs in any case: see `ExecutorEntry.ahead`. None where it needs nothing."""
    entry = find_executor(config.parallel, plugins)
    name = getattr(entry, "ahead", "")
    return replace(entry, load=name).resolve()(config, plugins) if name else None
