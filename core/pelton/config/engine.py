"""`EngineConfig`: all settings of one engine, one struct per owner.

`EngineConfig.from_flat(model="smollm2", max_num_seqs=8)` takes the flat names that the flags and
`LLM(...)` use: a field's own name, wherever it lives, or `attention_backend`, or a whole section by
name (`attention_config={"backend": "sdpa"}`). Unknown names and bad values are `ConfigError`s.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from pelton.config.attention import AttentionConfig
from pelton.config.compilation import CompilationConfig
from pelton.config.eplb import EPLBConfig
from pelton.config.kv_cache import KVCacheConfig
from pelton.config.kv_transfer import KVTransferConfig
from pelton.config.lora import LoRAConfig
from pelton.config.model import LoadConfig, ModelConfig
from pelton.config.observability import ObservabilityConfig
from pelton.config.other_names import translated
from pelton.config.parallel import ParallelConfig
from pelton.config.pooling import PoolingConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.config.speculative import SpeculativeConfig
from pelton.config.structured_outputs import StructuredOutputsConfig
from pelton.errors import ConfigError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read once, never written again; what is found at run time goes into `Resolved...` values."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    load: LoadConfig = msgspec.field(default_factory=LoadConfig)
    kv_cache: KVCacheConfig = msgspec.field(default_factory=KVCacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    eplb: EPLBConfig = msgspec.field(default_factory=EPLBConfig)
    attention: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    compilation: CompilationConfig = msgspec.field(default_factory=CompilationConfig)
    speculative: SpeculativeConfig = msgspec.field(default_factory=SpeculativeConfig)
    structured_outputs: StructuredOutputsConfig = msgspec.field(default_factory=StructuredOutputsConfig)
    kv_transfer: KVTransferConfig = msgspec.field(default_factory=KVTransferConfig)
    pooling: PoolingConfig = msgspec.field(default_factory=PoolingConfig)
    lora: LoRAConfig = msgspec.field(default_factory=LoRAConfig)
    observability: ObservabilityConfig = msgspec.field(default_factory=ObservabilityConfig)
    plugin_config: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Settings of plugins, by plugin name; each plugin checks its own."""

    @classmethod
    def from_flat(cls, **flat: Any) -> EngineConfig:
        """Build from flat names. Raises `ConfigError` naming the field, its value and what would be right."""
        return build_from_flat(flat)

    @property
    def max_steps_in_flight(self) -> int:
        """Open steps with overlap on."""
        return self.scheduler.max_steps_in_flight + self.parallel.pipeline_parallel_size - 1


class EngineArgs(dict[str, Any]):
    """Settings by their flat names, as vLLM's programs make them: `LLMEngine.from_engine_args(EngineArgs(model="smollm2"))`."""


AsyncEngineArgs = EngineArgs
SECTIONS: dict[str, type[msgspec.Struct]] = {
    name: hint
    for name, hint in get_type_hints(EngineConfig).items()
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct)
}
FLAT_ALIASES = {
    "attention_backend": ("attention", "backend"),
    **{f"eplb_{name}": ("eplb", name) for name in EPLBConfig.__struct_fields__[1:]},
    "optimization_level": ("compilation", "level"),
    "speculative_method": ("speculative", "method"),
    "speculative_model": ("speculative", "model"),
    "structured_outputs_backend": ("structured_outputs", "backend"),
}
"""Flat names of the fields whose own name says too little without its section."""
FIELD_HOME: dict[str, tuple[str, str]] = {
    **{
        field: (section, field)
        for section, struct in SECTIONS.items()
        for field in struct.__struct_fields__
        if (section, field) not in FLAT_ALIASES.values()
    },
    **FLAT_ALIASES,
}
"""Flat name to (section, field)."""
_FLAT_NAME = {home: name for name, home in FIELD_HOME.items()}
_CONFIG_SUFFIX = "_config"
_FLAT = {*FIELD_HOME, *(section + _CONFIG_SUFFIX for section in SECTIONS), "plugin_config"}
_EXAMPLES = {
    "show_hidden_metrics_for_version": "0.1",
    "pooling_type": "mean",
    "performance_mode": "balanced",
    "data_parallel_size_local": 1,
    "data_parallel_address": "10.0.0.1",
}
"""Good values of fields whose default and type do not give one."""


def flat_home(name: str) -> tuple[str, str]:
    """(section, field) of a flat name. Raises `ConfigError` with the nearest name there is."""
    if name not in FIELD_HOME:
        raise ConfigError(f"Unknown setting {name!r}.{did_you_mean(name, FIELD_HOME)}")
    return FIELD_HOME[name]


def flat_name(section: str, field: str) -> str:
    """The flat name of a section's field."""
    return _FLAT_NAME[section, field]


def section_of(name: str) -> str | None:
    """The section that a name such as "attention_config" stands for."""
    section = name.removesuffix(_CONFIG_SUFFIX)
    return section if name.endswith(_CONFIG_SUFFIX) and section in SECTIONS else None


def explicit_names(flat: Mapping[str, Any]) -> set[str]:
    """Flat names of the settings that the arguments of `from_flat` give, sections taken apart."""
    names: set[str] = set()
    for name, value in translated(flat, _FLAT):
        section = section_of(name)
        if section is None:
            names.add(name)
        else:
            names.update(_FLAT_NAME.get((section, key), key) for key, _ in _fields(name, section, value))
    return names


def _fields(name: str, section: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Fields of a section that is given as a whole, and their values."""
    given = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {value!r}; give a mapping of {section} settings.")
    return translated(given, SECTIONS[section].__struct_fields__, f"{section}.")


def build_from_flat(flat: Mapping[str, Any]) -> EngineConfig:
    """See `EngineConfig.from_flat`."""
    sections: dict[str, dict[str, Any]] = {}
    plugin_config: dict[str, Any] = {}
    for name, value in translated(flat, _FLAT):
        section = section_of(name)
        if name == "plugin_config":
            plugin_config = _checked_plugin_config(value)
        elif section is not None:
            for key, item in _fields(name, section, value):
                _set(sections, section, key, item)
        else:
            section, field = flat_home(name)
            is_one_name = field == "served_model_name" and isinstance(value, str)
            _set(sections, section, field, [value] if is_one_name else value)
    built: dict[str, Any] = {section: convert_section(section, values) for section, values in sections.items()}
    return EngineConfig(**built, plugin_config=plugin_config)


def convert_section(section: str, values: Mapping[str, Any]) -> msgspec.Struct:
    """One section from plain values, with errors that name the setting."""
    return convert_struct(SECTIONS[section], values, prefix=f"{section}.")


_FEW_NAMES = 6


def convert_struct(struct: type[msgspec.Struct], values: Mapping[str, Any], *, prefix: str = "") -> msgspec.Struct:
    """A settings struct from plain values. Raises `ConfigError` naming the field, its value and a good one."""
    for key in values:
        if key not in struct.__struct_fields__:
            names = struct.__struct_fields__
            hint = did_you_mean(key, names) or (f" It takes {', '.join(names)}." if len(names) <= _FEW_NAMES else "")
            raise ConfigError(f"Unknown setting {prefix}{key}.{hint}")
    try:
        return msgspec.convert(dict(values), struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        message, _, path = str(error).partition(" - at ")
        field = path.strip("`").removeprefix("$.").split("[")[0].split(".")[0]
        example = getattr(found := example_value(struct, field), "value", found)
        shown = "not told here" if "api_key" in field else repr(values.get(field))
        raise ConfigError(f"{prefix}{field} is {shown}: {message}. Example: {example!r}.") from None


def example_value(struct: type[msgspec.Struct], field: str) -> Any:
    """A value that fits: the default, or a small value of the field's type where the default is None."""
    default = struct_defaults(struct).get(field)
    if default is not None or field in _EXAMPLES:
        return _EXAMPLES.get(field, default)
    hint = get_type_hints(struct).get(field)
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return next(iter(kind)).value
    hint = str(hint)
    for word, example in (
        ("list[int]", [1, 8]),
        ("list", ["name"]),
        ("dict", {}),
        ("int", 8),
        ("float", 0.5),
        ("bool", True),
    ):
        if word in hint:
            return example
    return "name"


def struct_defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name to default; a required field is left out."""
    defaults: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if field.default is not msgspec.NODEFAULT:
            defaults[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            defaults[field.name] = field.default_factory()
    return defaults


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest of `known`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _set(sections: dict[str, dict[str, Any]], section: str, field: str, value: Any) -> None:
    values = sections.setdefault(section, {})
    if field in values:
        raise ConfigError(f"{section}.{field} is given twice ({values[field]!r} and {value!r}); give it once.")
    values[field] = value


def _checked_plugin_config(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(item, Mapping) for item in value.values()):
        raise ConfigError(
            f"plugin_config is {value!r}; give a mapping of plugin name to its settings, such as {{'name': {{}}}}."
        )
    return {name: dict(item) for name, item in value.items()}
