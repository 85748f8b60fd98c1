"""`EngineConfig`: all settings of one engine, one struct per owner.

`EngineConfig.from_flat(model="smollm2", max_num_seqs=8)` takes the flat names that the flags and
`LLM(...)` use: a field's own name, wherever it lives, or `attention_backend`, or a whole section by
name (`attention_config={"backend": "sdpa"}`). Unknown names and bad values are `ConfigError`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from pelton.config.attention import AttentionConfig
from pelton.config.compilation import CompilationConfig
from pelton.config.kv_cache import KVCacheConfig
from pelton.config.model import LoadConfig, ModelConfig
from pelton.config.observability import ObservabilityConfig
from pelton.config.parallel import ParallelConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.errors import ConfigError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read once, never written again; what is found at run time goes into `Resolved...` values."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    kv_cache: KVCacheConfig = msgspec.field(default_factory=KVCacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    attention: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    compilation: CompilationConfig = msgspec.field(default_factory=CompilationConfig)
    observability: ObservabilityConfig = msgspec.field(default_factory=ObservabilityConfig)
    plugin_config: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Settings of plugins, by plugin name; each plugin checks its own."""

    @classmethod
    def from_flat(cls, **flat: Any) -> EngineConfig:
        """Build from flat names. Raises `ConfigError` naming the field, its value and what would be right."""
        return build_from_flat(flat)


SECTIONS: dict[str, type[msgspec.Struct]] = {
    name: hint
    for name, hint in get_type_hints(EngineConfig).items()
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct)
}
FLAT_ALIASES = {"attention_backend": ("attention", "backend"), "optimization_level": ("compilation", "level")}
FIELD_HOME: dict[str, str] = {
    field: section for section, struct in SECTIONS.items() for field in struct.__struct_fields__
}


def build_from_flat(flat: Mapping[str, Any]) -> EngineConfig:
    """See `EngineConfig.from_flat`."""
    sections: dict[str, dict[str, Any]] = {}
    plugin_config: dict[str, Any] = {}
    for name, value in flat.items():
        if name == "plugin_config":
            plugin_config = value
        elif name.endswith("_config") and name.removesuffix("_config") in SECTIONS:
            section = name.removesuffix("_config")
            given = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
            if not isinstance(given, Mapping):
                raise ConfigError(f"{name} is {value!r}; give a mapping of {section} settings.")
            for key, item in given.items():
                _set(sections, section, key, item)
        elif name in FLAT_ALIASES:
            section, field = FLAT_ALIASES[name]
            _set(sections, section, field, value)
        elif name in FIELD_HOME and name not in ("backend", "level"):
            _set(
                sections,
                FIELD_HOME[name],
                name,
                [value] if name == "served_model_name" and isinstance(value, str) else value,
            )
        else:
            raise ConfigError(f"Unknown setting {name!r}.{_did_you_mean(name, [*FIELD_HOME, *FLAT_ALIASES])}")
    built = {section: convert_section(section, values) for section, values in sections.items()}
    return EngineConfig(**built, plugin_config=plugin_config)


def convert_section(section: str, values: Mapping[str, Any]) -> msgspec.Struct:
    """One section from plain values, with errors that name the setting."""
    struct = SECTIONS[section]
    for key in values:
        if key not in struct.__struct_fields__:
            raise ConfigError(f"Unknown setting {section}.{key}.{_did_you_mean(key, struct.__struct_fields__)}")
    try:
        return msgspec.convert(dict(values), struct)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.").split("[")[0]
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{section}.{field} is {values.get(field)!r}: {message}.") from None


def _set(sections: dict[str, dict[str, Any]], section: str, field: str, value: Any) -> None:
    values = sections.setdefault(section, {})
    if field in values:
        raise ConfigError(f"{section}.{field} is given twice ({values[field]!r} and {value!r}); give it once.")
    values[field] = value


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
