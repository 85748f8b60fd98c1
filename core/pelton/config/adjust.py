"""Let plugins change settings before anything is built: each change has a reason, and an explicit setting wins.

And let them take settings of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pelton.config.engine import EngineConfig, convert_section, flat_home
from pelton.errors import ConfigError, PluginError
from pelton.logging import get_logger
from pelton.plugins import FIX_IT, Plugins


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One change that a plugin asked for."""

    plugin: str
    name: str  # flat setting name
    old: Any
    new: Any
    reason: str
    is_applied: bool

    def __str__(self) -> str:
        if self.is_applied:
            return f"{self.name}: {self.old!r} -> {self.new!r} ({self.reason}; plugin {self.plugin})"
        return (
            f"{self.name}: {self.old!r} stays, set explicitly; plugin {self.plugin} wanted {self.new!r} ({self.reason})"
        )


def adjust_config(
    config: EngineConfig, plugins: Plugins, explicit: Collection[str] = ()
) -> tuple[EngineConfig, list[Adjustment]]:
    """Apply what the plugins' `pelton_config_adjustments` return, and log each change.

    explicit: flat names of settings that the user gave (`explicit_names`). Raises `PluginError` when a plugin names no
    setting, gives a bad value, or two of them want one setting to be different things.
    """
    wanted: dict[str, tuple[str, Any, str]] = {}
    for plugin, changes in plugins.call_each("pelton_config_adjustments", config=config):
        for name, change in _checked(plugin, "pelton_config_adjustments", changes).items():
            if not (isinstance(change, tuple) and len(change) == 2 and isinstance(change[1], str) and change[1]):
                raise PluginError(f"Plugin {plugin!r} adjusts {name!r} with {change!r}; return (value, reason).")
            if name in wanted and wanted[name][1] != change[0] and name not in explicit:
                other, value, reason = wanted[name]
                raise PluginError(
                    f"Plugins disagree on {name}: {other!r} wants {value!r} ({reason}), {plugin!r} wants {change[0]!r} "
                    f"({change[1]}). Set {name} yourself, or leave one of them out."
                )
            wanted.setdefault(name, (plugin, *change))
    done: list[Adjustment] = []
    for name, (plugin, value, reason) in sorted(wanted.items()):
        try:
            section, field = flat_home(name)
            old = getattr(getattr(config, section), field)
            is_applied = name not in explicit
            if is_applied and old != value:
                values = {**msgspec.structs.asdict(getattr(config, section)), field: value}
                config = msgspec.structs.replace(config, **{section: convert_section(section, values)})
        except ConfigError as error:
            raise PluginError(f"Plugin {plugin!r} adjusts {name!r}: {error}") from error
        if old != value:
            done.append(Adjustment(plugin, name, old, value, reason, is_applied))
            get_logger(__name__).info("setting %s", done[-1])
    return config, done


def take_settings(config: EngineConfig, plugins: Plugins, device_type: str) -> dict[str, str]:
    """Let plugins put their own settings to use in this process; returns what they chose, by name."""
    chosen: dict[str, str] = {}
    for plugin, choices in plugins.call_each("pelton_worker_settings", config=config, device_type=device_type):
        chosen |= _checked(plugin, "pelton_worker_settings", choices, str)
    return chosen


def _checked(plugin: str, hook: str, found: Any, kind: type = object) -> Mapping[str, Any]:
    """Return the mapping that a plugin gave, with values of a `kind`; nothing is an empty one."""
    if not isinstance(found or {}, Mapping) or not all(isinstance(value, kind) for value in (found or {}).values()):
        wanted = "names to texts" if kind is str else "names to (value, reason)"
        raise PluginError(f"Plugin {plugin!r} returns {found!r} from {hook}; return a mapping of {wanted}. {FIX_IT}")
    return found or {}
