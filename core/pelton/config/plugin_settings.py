"""Settings that plugins bring: `plugin_config.<name>`, each checked against its plugin's struct before anything is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from pelton.config.engine import EngineConfig, convert_struct, struct_defaults
from pelton.errors import PluginError

if TYPE_CHECKING:
    from pelton.entries import SettingsEntry
    from pelton.plugins import Plugins

S = TypeVar("S", bound=msgspec.Struct)


def read_settings(config: EngineConfig, name: str, struct: type[S]) -> S:
    """Return `plugin_config.<name>` as `struct`. Raises `ConfigError` naming the field, its value and what would be right."""
    made = convert_struct(struct, config.plugin_config.get(name, {}), prefix=f"plugin_config.{name}.")
    assert isinstance(made, struct)
    return made


def check_plugin_settings(config: EngineConfig, plugins: Plugins) -> None:
    """Raise `ConfigError` for settings of plugins that nobody reads, and for wrong ones of those that bring a struct."""
    plugins.check_config_names(config.plugin_config)
    for entry in plugins.entries("pelton_settings"):
        read_settings(config, entry.name, settings_struct(entry))


def settings_struct(entry: SettingsEntry) -> type[msgspec.Struct]:
    """The struct that a plugin brings. Raises `PluginError` when it is none, or when a field has no default."""
    struct = entry.resolve()
    if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
        raise PluginError(f"{entry} is {struct!r}; settings are a class made from msgspec.Struct.")
    lacking = [name for name in struct.__struct_fields__ if name not in struct_defaults(struct)]
    if lacking:
        raise PluginError(f"{entry} has no default for {', '.join(lacking)}; each field needs one.")
    return struct
